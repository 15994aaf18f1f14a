//! What a rank reads of the clips: its own frames, as latents, and their captions.

use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use burn_sp::SpDevice;
use burn_sp_models::vae::Vae;

use super::VideoTrainConfig;
use crate::InputError;
use crate::video::{Dataset, Picture, Window};

/// Reads for one rank.
pub(super) struct Reader<'a> {
    pub config: &'a VideoTrainConfig,
    pub data: &'a Dataset,
    /// Without autodiff.
    pub device: SpDevice,
    pub vae: Option<Vae>,
}

impl Reader<'_> {
    /// Latents of some ascending frames of windows. A VAE is given the frames before them that they depend on as well.
    ///
    /// # Shapes
    /// - returns `[windows, channels, frames, height, width]`, on this device
    pub fn latents(&self, windows: &[Window], frames: &[usize], device: &Device) -> Result<Tensor<5>, InputError> {
        let clips = windows.iter().map(|window| {
            let runs = runs(frames).into_iter().map(|run| self.run(window, run, device));
            Ok(Tensor::cat(runs.collect::<Result<_, _>>()?, 2))
        });
        Ok(Tensor::cat(clips.collect::<Result<_, InputError>>()?, 0))
    }

    fn run(&self, window: &Window, run: Range<usize>, device: &Device) -> Result<Tensor<5>, InputError> {
        let Some(vae) = &self.vae else {
            return Ok(tensor(&self.pictures(window, run)?, device));
        };
        let slice = match vae.slice(run, vae.least_halo()) {
            Ok(slice) => slice,
            // The least halo is large enough.
            Err(error) => return Err(InputError(error.to_string())),
        };
        let pictures = self.pictures(window, slice.frames.clone())?;
        let latents = vae.encode_slice(tensor(&pictures, self.device.device()), &slice, &self.device);
        Ok(Tensor::from_data(latents.into_data(), device))
    }

    /// Frames of a window, in the size that is trained on.
    pub fn pictures(&self, window: &Window, frames: Range<usize>) -> Result<Vec<Picture>, InputError> {
        let first = window.frames.start;
        let clip = &self.data.clips()[window.clip];
        let size = [self.config.height, self.config.width];
        clip.footage.read(first + frames.start..first + frames.end, size)
    }

    /// How many prompts a clip has: one for each block of frames if any clip has several captions.
    pub fn prompts(&self) -> usize {
        let mut clips = self.data.clips().iter();
        match clips.any(|clip| clip.captions.texts() > 1) {
            true => self.config.objective().blocks().count(self.config.frames),
            false => 1,
        }
    }

    /// Captions of some blocks of windows.
    ///
    /// # Shapes
    /// - returns `[windows, blocks, text tokens, text_dim]`
    pub fn texts(&self, windows: &[Window], blocks: Range<usize>, device: &Device) -> Result<Tensor<4>, InputError> {
        let VideoTrainConfig {
            text_tokens, text_dim, ..
        } = *self.config;
        let mut values = Vec::new();
        for window in windows {
            for block in blocks.clone() {
                let captions = &self.data.clips()[window.clip].captions;
                values.extend(captions.embed(block, text_tokens, text_dim)?);
            }
        }
        let data = TensorData::new(values, [windows.len(), blocks.len(), text_tokens, text_dim]);
        Ok(Tensor::from_data(data, device))
    }
}

/// Ascending numbers as ranges.
fn runs(numbers: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == *number => run.end += 1,
            _ => runs.push(*number..number + 1),
        }
    }
    runs
}

/// Pictures of one size as pixels in [-1, 1].
///
/// # Shapes
/// - returns `[1, 3, pictures, height, width]`
fn tensor(pictures: &[Picture], device: &Device) -> Tensor<5> {
    let [height, width] = pictures.first().map_or([0, 0], Picture::size);
    let value = |byte: u8| f32::from(byte) / 127.5 - 1.0;
    let mut values = Vec::with_capacity(3 * pictures.len() * height * width);
    for channel in 0..3 {
        for picture in pictures {
            values.extend(picture.rgb.iter().skip(channel).step_by(3).map(|byte| value(*byte)));
        }
    }
    let data = TensorData::new(values, [1, 3, pictures.len(), height, width]);
    Tensor::from_data(data, device)
}

/// Takes [`tensor`] back, for each sample of a batch.
pub(super) fn pictures(pixels: Tensor<5>) -> Vec<Vec<Picture>> {
    let [batch, channels, frames, height, width] = pixels.dims();
    let values: Vec<f32> = pixels.into_data().iter::<f32>().collect();
    let byte = |value: f32| ((value.clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8;
    let picture = |sample: usize, frame: usize| {
        let at = |channel: usize, row: usize, column: usize| {
            let plane = (sample * channels + channel) * frames + frame;
            byte(values[(plane * height + row) * width + column])
        };
        Picture::draw([height, width], |row, column| {
            [0, 1, 2].map(|channel| at(channel, row, column))
        })
    };
    let clip = |sample| (0..frames).map(|frame| picture(sample, frame)).collect();
    (0..batch).map(clip).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_go_there_and_back() {
        let picture = |seed: usize| {
            Picture::draw([2, 3], |row, column| {
                [seed + row, seed + column, row * column].map(|value| 37 * value as u8)
            })
        };
        let clip = vec![picture(0), picture(3)];
        let there = tensor(&clip, &Device::flex());
        assert_eq!(there.dims(), [1, 3, 2, 2, 3]);
        assert_eq!(pictures(there), [clip]);
    }

    #[test]
    fn numbers_in_a_row_are_a_run() {
        assert_eq!(runs(&[]), Vec::<Range<usize>>::new());
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), [0..3, 5..6, 7..9]);
    }
}
