use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn::module::Module;
use burn::tensor::Device;
use burn_sp::comm::{CommError, raise};
use burn_sp::train::{LossShare, ParamLayouts};
use burn_sp::{SpDevice, seeded};
use burn_sp_models::vae::Vae;
use burn_sp_models::video_dit::{VideoBatch, VideoDit, VideoKey, VideoOptions, VideoPartition, VideoSample};
use safetensors::SafeTensors;

use super::VideoTrainConfig;
use super::latents::Reader;
use crate::progress::Progress;
use crate::report::Report;
use crate::trainer::{Job, Task};
use crate::video::{Dataset, Sampler, Window};
use crate::{InputError, RunError, memory};

/// Trains as configured and says how it went.
///
/// # Errors
/// If videos or weights cannot be read (before any rank starts), or the ranks fail.
pub fn train(config: &VideoTrainConfig, progress: &Progress) -> Result<Report, RunError> {
    let data = Dataset::open(config.video.as_deref())?;
    let frames = config.video_frames(config.frames);
    let sampler = data.sampler(frames)?;
    for clip in data.clips() {
        // Vectors that were read may be of another width.
        let embedded = clip.captions.embed(0, config.text_tokens, config.text_dim);
        embedded.map_err(|error| InputError(format!("video {}: {error}", clip.footage.path().display())))?;
    }
    let vae = vae(config)?.map(Mutex::new);
    memory::unranked_work_for(config.run.only_rank()?);
    let job = Job {
        program: "train-video-dit",
        run: &config.run,
        learning: &config.learning,
        state: &config.state,
        lines: vec![config.run.mesh_line(), data.line(frames, config.text_tokens)],
        data: data.digest(),
        config: serde_json::to_value(config).unwrap_or_default(),
        transformer: None,
    };
    let task = |device: &SpDevice, _: &ParamLayouts, shards| {
        let plain = SpDevice::new(device.device().clone().inner(), device.mesh().clone());
        let reader = Reader {
            config,
            data: &data,
            vae: vae.as_ref().map(|vae| {
                let vae = vae.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                vae.clone().fork(plain.device())
            }),
            device: plain,
        };
        Clips {
            partition: config.objective().partition(config.grid(), config.run.batch, device),
            device: device.clone(),
            sampler: sampler.clone(),
            reader,
            options: VideoOptions {
                kv: config.run.kv_move(),
                memory: config.learning.memory(shards),
                ..VideoOptions::default()
            },
        }
    };
    let report = job.train(model(config)?, task, progress)?;
    if let Some(folder) = &config.sample {
        progress.line(&format!("samples: {}", folder.display()));
    }
    Ok(report)
}

/// The initial model: a function of the seed, whatever the device, or what is read.
fn model(config: &VideoTrainConfig) -> Result<VideoDit, InputError> {
    let cpu = Device::flex().autodiff();
    let model = seeded(&cpu, config.run.seed, |device| config.model().init(device));
    match &config.weights {
        Some(files) => load("--weights", files, |files| model.load(files)),
        None => Ok(model),
    }
}

fn vae(config: &VideoTrainConfig) -> Result<Option<Vae>, InputError> {
    let (Some(folder), Some(vae)) = (&config.vae, &config.vae_config) else {
        return Ok(None);
    };
    let wrong = |error: std::io::Error| InputError(format!("--vae {}: {error}", folder.display()));
    let entries = std::fs::read_dir(folder).map_err(wrong)?;
    let mut files = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<PathBuf>, _>>()
        .map_err(wrong)?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    if files.is_empty() {
        return Err(InputError(format!(
            "--vae {}: no safetensors file is in it; give diffusers' folder of an AutoencoderKLWan",
            folder.display()
        )));
    }
    let vae = vae.init(&Device::flex());
    load("--vae", &files, |files| vae.load(files)).map(Some)
}

fn load<M, E: std::fmt::Display>(
    flag: &str,
    files: &[PathBuf],
    load: impl FnOnce(&[SafeTensors<'_>]) -> Result<M, E>,
) -> Result<M, InputError> {
    let wrong = |file: &Path, error: &dyn std::fmt::Display| InputError(format!("{flag} {}: {error}", file.display()));
    let read = |file: &PathBuf| std::fs::read(file).map_err(|error| wrong(file, &error));
    let bytes: Vec<Vec<u8>> = files.iter().map(read).collect::<Result<_, _>>()?;
    let named = files.iter().zip(&bytes);
    let parsed = named.map(|(file, bytes)| {
        SafeTensors::deserialize(bytes).map_err(|error| wrong(file, &format!("not a safetensors file: {error}")))
    });
    let parsed: Vec<SafeTensors> = parsed.collect::<Result<_, _>>()?;
    load(&parsed).map_err(|error| InputError(format!("{flag}: {error}")))
}

/// A rank's part of the clips.
struct Clips<'a> {
    device: SpDevice,
    partition: VideoPartition,
    sampler: Sampler,
    reader: Reader<'a>,
    options: VideoOptions,
}

impl Task for Clips<'_> {
    type Model = VideoDit;
    type Sample = VideoSample;

    fn shard(model: VideoDit, device: &SpDevice) -> (VideoDit, ParamLayouts) {
        model.shard(device)
    }

    fn sample(&mut self, micro_step: u64) -> VideoSample {
        let _span = tracing::trace_span!("data").entered();
        let (seed, on) = (self.reader.config.run.seed, self.device.device());
        let samples = self.partition.samples().map(|sample| sample as u64);
        let windows: Vec<Window> = samples
            .map(|sample| self.sampler.window(seed, micro_step, sample))
            .collect();
        let prompts = self.reader.prompts();
        let batch = VideoBatch {
            latents: self.or_fail(self.reader.latents(&windows, self.partition.frames(), on)),
            texts: self.or_fail(self.reader.texts(&windows, 0..prompts, on)),
            valid_frames: Vec::new(),
        };
        let key = VideoKey { seed, step: micro_step };
        self.partition.sample(batch, key)
    }

    fn count(&self, samples: &[VideoSample]) -> u64 {
        samples.iter().map(|sample| sample.count).sum()
    }

    fn loss(&self, model: &VideoDit, sample: VideoSample, count: u64, _micro_step: u64) -> LossShare {
        sample.loss(model, count, &self.options)
    }

    fn after(&mut self, step: usize, model: &VideoDit) {
        let config = self.reader.config;
        let due = config.sample_every.is_some_and(|every| step.is_multiple_of(every)) || step == config.run.steps;
        if let Some(folder) = config.sample.as_deref().filter(|_| due) {
            let _span = tracing::trace_span!("samples").entered();
            self.or_fail(self.reader.sample(model, &self.options, &self.sampler, step, folder));
        }
    }
}

impl Clips<'_> {
    /// What a rank cannot read or write ends the run, with its reason.
    fn or_fail<T, E: std::fmt::Display>(&self, result: Result<T, E>) -> T {
        result.unwrap_or_else(|error| raise(CommError::failed(self.device.rank(), error.to_string())))
    }
}
