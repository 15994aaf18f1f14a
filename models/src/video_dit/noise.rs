use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::kernels::philox::Philox;

/// The generator's streams below are dropout's (step and layer), those above the programs' data.
const STREAMS: u64 = 1 << 62;

/// Bits of a position that count a frame's elements, and those that count a sample's frames.
const ELEMENT_BITS: u32 = 24;
const FRAME_BITS: u32 = 20;

/// Names the random numbers of a training batch, or of samples: noise, times and dropped texts. They are functions of the
/// key and of the *global* sample, block, frame and element, so that one rank and many see the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoKey {
    /// The run's seed.
    pub seed: u64,
    /// The training step (micro-steps counted).
    pub step: u64,
}

/// What the numbers of a stream are for.
#[derive(Clone, Copy)]
enum Purpose {
    Noise,
    Level,
    Text,
}

impl VideoKey {
    /// The noise of a frame, standard normal: `len` elements in the order of the latents (channels, rows, columns).
    ///
    /// # Panics
    /// If there are too many frames or elements to count: 2^20 and 2^24.
    pub fn noise(&self, sample: usize, frame: usize, len: usize) -> Vec<f32> {
        assert!(
            len <= 1 << ELEMENT_BITS && frame < 1 << FRAME_BITS,
            "video noise: frame {frame} of {len} elements; at most 2^20 frames of 2^24 elements are told apart"
        );
        let start = ((sample as u64) << FRAME_BITS | frame as u64) << ELEMENT_BITS;
        let mut words = vec![0; len.next_multiple_of(2)];
        self.stream(Purpose::Noise).fill(start, &mut words);
        let pairs = words.chunks_exact(2).flat_map(|pair| normal(pair[0], pair[1]));
        pairs.take(len).collect()
    }

    /// The noise of some frames of some samples.
    ///
    /// # Shapes
    /// - `shape`: channels, height and width; returns `[samples, channels, frames, height, width]`
    pub(super) fn latents(
        &self,
        samples: Range<usize>,
        frames: &[usize],
        [channels, height, width]: [usize; 3],
        dtype: DType,
        device: &Device,
    ) -> Tensor<5> {
        let shape = [samples.len(), frames.len(), channels, height, width];
        let of_frames = samples.flat_map(|sample| frames.iter().map(move |frame| (sample, *frame)));
        let noise: Vec<f32> = of_frames
            .flat_map(|(sample, frame)| self.noise(sample, frame, channels * height * width))
            .collect();
        let data = TensorData::new(noise, shape).convert_dtype(dtype);
        Tensor::<5>::from_data(data, (device, dtype)).swap_dims(1, 2)
    }

    /// Which of so many noise levels a block has, `0..levels`.
    pub fn level(&self, sample: usize, block: usize, levels: usize) -> usize {
        let word = self
            .stream(Purpose::Level)
            .word((sample as u64) << FRAME_BITS | block as u64);
        ((u64::from(word) * levels as u64) >> 32) as usize
    }

    /// Whether a sample learns without its text, which it does with this probability.
    pub fn drops_text(&self, sample: usize, probability: f64) -> bool {
        f64::from(self.stream(Purpose::Text).word(sample as u64)) < probability * 2f64.powi(32)
    }

    fn stream(&self, purpose: Purpose) -> Philox {
        Philox::new(self.seed, STREAMS | (purpose as u64) << 56 | self.step)
    }
}

/// Two normal numbers of two words (Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958).
fn normal(first: u32, second: u32) -> [f32; 2] {
    let unit = |word: u32| f64::from(word) / 2f64.powi(32);
    // Not 0, of which there is no logarithm.
    let radius = f64::sqrt(-2.0 * f64::ln(1.0 - unit(first)));
    let (sin, cos) = f64::sin_cos(std::f64::consts::TAU * unit(second));
    [(radius * cos) as f32, (radius * sin) as f32]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: VideoKey = VideoKey { seed: 5, step: 9 };

    #[test]
    fn noise_is_standard_normal() {
        let noise = KEY.noise(1, 2, 1 << 16);
        let count = noise.len() as f64;
        let moment = |power: i32| noise.iter().map(|value| f64::from(*value).powi(power)).sum::<f64>() / count;
        // Five standard deviations of each estimate.
        let near = |power: i32, expected: f64, variance: f64| {
            let found = moment(power);
            assert!(
                (found - expected).abs() < 5.0 * (variance / count).sqrt(),
                "{power}: {found}"
            );
        };
        near(1, 0.0, 1.0);
        near(2, 1.0, 2.0);
        near(3, 0.0, 15.0);
        near(4, 3.0, 96.0);
        assert!(noise.iter().all(|value| value.is_finite()));
    }

    #[test]
    fn every_name_has_numbers_of_its_own() {
        let same = KEY.noise(1, 2, 7);
        assert_eq!(same, KEY.noise(1, 2, 8)[..7]);
        let others = [
            KEY.noise(2, 2, 7),
            KEY.noise(1, 3, 7),
            VideoKey { seed: 6, ..KEY }.noise(1, 2, 7),
            VideoKey { step: 8, ..KEY }.noise(1, 2, 7),
        ];
        for (index, other) in others.iter().enumerate() {
            assert!(same.iter().zip(other).all(|(one, other)| one != other), "{index}");
        }
    }

    #[test]
    fn levels_and_dropped_texts_are_as_frequent_as_they_should() {
        let mut counts = [0; 10];
        for sample in 0..100 {
            for block in 0..100 {
                counts[KEY.level(sample, block, 10)] += 1;
            }
        }
        // Of 10000, 1000 each, with a standard deviation of 30.
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        let dropped = |probability| {
            (0..10_000)
                .filter(|sample| KEY.drops_text(*sample, probability))
                .count()
        };
        assert_eq!((dropped(0.0), dropped(1.0)), (0, 10_000));
        assert!((900..1100).contains(&dropped(0.1)), "{}", dropped(0.1));
    }
}
