//! Samples of a model in training: made on all ranks, written by the first.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use burn_sp::comm::{Parts, raise};
use burn_sp::layout::{Axis, Layout, Mesh, MeshShape, Placement, Split};
use burn_sp::{SpDevice, SpTensor};
use burn_sp_models::vae::Vae;
use burn_sp_models::video_dit::{VideoDit, VideoGrid, VideoKey, VideoOptions, from_output_patches};

use super::latents::{Reader, pictures};
use crate::RunError;
use crate::video::{Picture, Sampler, contact_sheet, write_video};

/// Names the noise and the captions of samples: no step of training.
const STEP: u64 = (1 << 56) - 1;

/// On the contact sheet, small frames become about so many pixels high.
const SHEET_HEIGHT: usize = 128;

/// Axes that share the tokens of a sample.
const SEQUENCE: [Axis; 3] = [Axis::Ring, Axis::Ulysses, Axis::Tp];

impl Reader<'_> {
    /// Makes samples with captions of the data, always the same ones and from the same noise, and writes them: a video each
    /// and one sheet, on which each is below the clip that its caption is of.
    ///
    /// # Errors
    /// If a clip cannot be read, or a file cannot be written (by the first rank).
    pub fn sample(
        &self,
        model: &VideoDit,
        options: &VideoOptions,
        windows: &Sampler,
        step: usize,
        folder: &Path,
    ) -> Result<(), RunError> {
        let (config, on) = (self.config, self.device.device());
        let count = config.samples;
        let numbers = 0..count as u64;
        let chosen: Vec<_> = numbers
            .map(|sample| windows.window(config.run.seed, STEP, sample))
            .collect();

        let model = model.valid();
        let key = VideoKey {
            seed: config.run.seed,
            step: STEP,
        };
        let grid = config.grid();
        let mut sampler = config
            .sampler()
            .init([grid.rows, grid.columns], count, key, &self.device);
        let blocks = config.objective().blocks();
        let mut video = Video::new(self, config.sample_frames);
        for block in 0..blocks.count(config.sample_frames) {
            let frames = blocks.range(block, config.sample_frames);
            let text = self.texts(&chosen, block..block + 1, on)?.squeeze_dim(1);
            if config.image_to_video && block == 0 {
                let image = self.latents(&chosen, &[0], on)?;
                sampler.give(&model, image.clone(), text, options);
                video.add_whole(image);
                continue;
            }
            let clean = sampler.next_block(&model, frames.len(), text, options);
            video.add(clean, &grid, config.patch);
        }
        let made = video.finish(self.vae.as_ref());
        if self.device.rank() > 0 {
            return Ok(());
        }

        const FLAG: &str = "--sample";
        std::fs::create_dir_all(folder).map_err(RunError::output(FLAG, folder))?;
        let name = |sample: usize| folder.join(format!("step-{step:06}-{}", sample + 1));
        for (sample, clip) in made.iter().enumerate() {
            write_video(FLAG, &name(sample), clip, config.fps)?;
        }
        let real = chosen.iter().map(|window| {
            let shown = made[0].len().min(window.frames.len());
            self.pictures(window, 0..shown)
        });
        let real: Vec<Vec<Picture>> = real.collect::<Result<_, _>>()?;
        let rows = real.iter().zip(&made).flat_map(|(real, made)| [real.as_slice(), made]);
        let sheet = folder.join(format!("step-{step:06}.png"));
        let scale = (SHEET_HEIGHT / config.height).max(1);
        contact_sheet(FLAG, &sheet, &rows.collect::<Vec<_>>(), scale)
    }
}

/// Samples as they grow: pixels, or a rank's share of latents until all are there to be decoded.
struct Video<'a> {
    device: &'a SpDevice,
    /// The ranks of a replica, all on one axis, as decoding wants them.
    line: SpDevice,
    /// Frames of the latents; of those of a VAE each rank keeps one range.
    frames: usize,
    /// Channels, height and width of the latents.
    latent: [usize; 3],
    decoded: bool,
    /// Frames that came.
    come: usize,
    /// Of this rank's samples.
    latents: Vec<Tensor<5>>,
    pixels: Vec<Vec<Picture>>,
    samples: usize,
}

impl<'a> Video<'a> {
    fn new(reader: &'a Reader<'_>, frames: usize) -> Self {
        let (channels, stride) = reader.config.latents();
        Self {
            device: &reader.device,
            line: line(&reader.device),
            frames,
            latent: [channels, reader.config.height / stride, reader.config.width / stride],
            decoded: reader.vae.is_some(),
            come: 0,
            latents: Vec::new(),
            pixels: vec![Vec::new(); reader.config.samples],
            samples: reader.config.samples,
        }
    }

    /// Frames that every rank has, of all samples.
    fn add_whole(&mut self, latents: Tensor<5>) {
        let layout = Layout::replicated(latents.dims()).shard(0, Axis::Dp, Split::Contiguous);
        let own = self.device.distribute(latents, &layout).into_local();
        self.keep(own);
    }

    /// A block of patches.
    fn add(&mut self, patches: SpTensor<3>, grid: &VideoGrid, patch: usize) {
        let patches = patches
            .redistribute(Axis::Ulysses, Placement::Replicate)
            .redistribute(Axis::Ring, Placement::Replicate);
        self.keep(from_output_patches(patches.into_local(), grid, patch));
    }

    /// The next frames of this rank's samples.
    fn keep(&mut self, latents: Tensor<5>) {
        let frames = latents.dims()[2];
        let (start, end) = (self.come, self.come + frames);
        self.come = end;
        if !self.decoded {
            let last = latents.dims()[0] - 1;
            self.show(|sample| latents.clone().narrow(0, sample.min(last), 1));
            return;
        }
        let own = self.share();
        let (from, to) = (own.start.clamp(start, end), own.end.clamp(start, end));
        if from < to {
            self.latents.push(latents.slice_dim(2, from - start..to - start));
        }
    }

    /// The samples' pictures, on the first rank; none elsewhere.
    fn finish(mut self, vae: Option<&Vae>) -> Vec<Vec<Picture>> {
        if let Some(vae) = vae {
            let pixels = self.decode(vae);
            // One sample at a time is whole on a rank.
            let own = pixels.local().dims()[0];
            self.show(|sample| {
                let one = pixels
                    .clone()
                    .tokenwise(|pixels| pixels.narrow(0, sample.min(own - 1), 1));
                one.gather().into_local()
            });
        }
        self.pixels
    }

    /// Decodes the latents, each rank its range of frames; the samples of this rank's replica.
    fn decode(&mut self, vae: &Vae) -> SpTensor<5> {
        let samples = self.own_samples().len();
        let [channels, height, width] = self.latent;
        let latents = match self.latents.is_empty() {
            // It has no frames.
            true => Tensor::zeros([samples, channels, 0, height, width], self.line.device()),
            false => Tensor::cat(std::mem::take(&mut self.latents), 2),
        };
        let whole = Layout::replicated([samples, channels, self.frames, height, width]);
        let layout = whole.shard(2, Axis::Ulysses, Split::Contiguous);
        vae.decode(SpTensor::from_local(latents, layout, &self.line))
    }

    /// This rank's frames.
    fn share(&self) -> Range<usize> {
        let parts = Split::Contiguous.parts(self.frames, self.line.mesh().size(Axis::Ulysses));
        parts.of(self.line.rank())[0].clone()
    }

    fn replicas(&self) -> Parts {
        Split::Contiguous.parts(self.samples, self.device.mesh().size(Axis::Dp))
    }

    /// The samples of this rank's replica.
    fn own_samples(&self) -> Range<usize> {
        let replica = self.device.mesh().coordinate(Axis::Dp);
        self.replicas().of(replica)[0].clone()
    }

    /// Pixels become pictures on the first rank, one sample of each replica at a time. `pixels` gives those of a replica's
    /// sample, `[1, 3, frames, height, width]`; a replica that has fewer samples is asked for its last once more.
    fn show(&mut self, pixels: impl Fn(usize) -> Tensor<5>) {
        let replicas = self.replicas();
        let most = (0..replicas.ranks())
            .map(|replica| replicas.len_of(replica))
            .max()
            .unwrap_or(0);
        for turn in 0..most {
            let own = pixels(turn);
            let mut shape = own.dims();
            shape[0] = replicas.ranks();
            let layout = Layout::replicated(shape).shard(0, Axis::Dp, Split::Contiguous);
            let all = SpTensor::from_local(own, layout, self.device).gather().into_local();
            if self.device.rank() > 0 {
                continue;
            }
            for (replica, clip) in pictures(all).into_iter().enumerate() {
                let samples = replicas.of(replica)[0].clone();
                if let Some(sample) = samples.clone().nth(turn) {
                    self.pixels[sample].extend(clip);
                }
            }
        }
    }
}

/// The ranks of a replica, all on one axis.
fn line(device: &SpDevice) -> SpDevice {
    let line = device.mesh().group(&SEQUENCE).unwrap_or_else(|error| raise(error));
    let mesh = Mesh::new(MeshShape::ulysses(line.size()), line).expect("as many ranks as the mesh has");
    SpDevice::new(device.device().clone(), Arc::new(mesh))
}
