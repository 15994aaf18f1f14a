use std::fs;
use std::path::Path;

use burn::tensor::{bf16, f16};
use burn_sp::kernels::philox::Philox;
use safetensors::{Dtype, SafeTensors};

use super::{scene, wrong};
use crate::InputError;
use crate::fnv::Fnv;

/// What is said about a clip: to each of its blocks in turn, and after the last to the first again.
#[derive(Clone, Debug, PartialEq)]
pub enum Captions {
    /// In words, for [`embed`].
    Prompts(Vec<String>),
    /// In the vectors of a text encoder.
    Embedded {
        /// How many texts.
        blocks: usize,
        /// Vectors a text.
        tokens: usize,
        /// Numbers a vector.
        dim: usize,
        /// `[blocks, tokens, dim]`.
        values: Vec<f32>,
    },
}

impl Captions {
    /// The captions of the clip `a.mp4`: the vectors in `a.safetensors`, else the lines of `a.txt`, else its name. Those of
    /// a folder of pictures are `caption.safetensors` or `caption.txt` in it.
    ///
    /// Lines without words are passed over. The vectors are the tensor `text`, f32, f16 or bf16.
    ///
    /// # Shapes
    /// - `text`: `[tokens, dim]` for the whole clip, or `[blocks, tokens, dim]`
    ///
    /// # Errors
    /// If such a file is there, but cannot be read or says nothing.
    pub fn of(clip: &Path) -> Result<Self, InputError> {
        let beside = match clip.is_dir() {
            true => clip.join("caption"),
            false => clip.with_extension(""),
        };
        let [vectors, lines] = ["safetensors", "txt"].map(|extension| {
            let mut file = beside.clone().into_os_string();
            file.push(format!(".{extension}"));
            file
        });
        let (vectors, lines) = (Path::new(&vectors), Path::new(&lines));
        if vectors.exists() {
            let bytes = fs::read(vectors).map_err(|error| wrong(vectors, error))?;
            return embedded(&bytes).map_err(|line| wrong(vectors, line));
        }
        if lines.exists() {
            let text = fs::read_to_string(lines).map_err(|error| wrong(lines, error))?;
            let prompts = text.lines().map(str::trim).filter(|line| words(line).next().is_some());
            let prompts: Vec<String> = prompts.map(String::from).collect();
            return match prompts.is_empty() {
                true => Err(wrong(
                    lines,
                    "no words are in it; write a caption a line, or remove it for the clip's name",
                )),
                false => Ok(Self::Prompts(prompts)),
            };
        }
        let name = match clip.is_dir() {
            true => clip.file_name(),
            false => clip.file_stem(),
        };
        let name = name.unwrap_or_default().to_string_lossy().replace(['-', '_'], " ");
        Ok(Self::Prompts(vec![name.trim().into()]))
    }

    /// Those of the rendered scene.
    pub fn scene() -> Self {
        Self::Prompts(scene::CAPTIONS.map(String::from).into())
    }

    /// How many texts.
    pub fn texts(&self) -> usize {
        match self {
            Self::Prompts(prompts) => prompts.len(),
            Self::Embedded { blocks, .. } => *blocks,
        }
    }

    /// The most tokens of a text.
    pub fn tokens(&self) -> usize {
        match self {
            Self::Prompts(prompts) => prompts.iter().map(|prompt| words(prompt).count()).max().unwrap_or(0),
            Self::Embedded { tokens, .. } => *tokens,
        }
    }

    /// The hash with these captions.
    pub(super) fn add_to(&self, hash: Fnv) -> Fnv {
        match self {
            Self::Prompts(prompts) => prompts.iter().fold(hash, |hash, prompt| hash.field(prompt.as_bytes())),
            Self::Embedded { values, .. } => values
                .iter()
                .fold(hash, |hash, value| hash.number(value.to_bits().into())),
        }
    }

    /// The vectors of a block: those of its words or of its text, the first `tokens` of them, then zeros.
    ///
    /// # Shapes
    /// - returns `[tokens, dim]`
    ///
    /// # Errors
    /// If vectors that were read are of another `dim`.
    ///
    /// # Panics
    /// If there is no text.
    pub fn embed(&self, block: usize, tokens: usize, dim: usize) -> Result<Vec<f32>, InputError> {
        match self {
            Self::Prompts(prompts) => Ok(embed(&prompts[block % prompts.len()], tokens, dim)),
            Self::Embedded { dim: found, .. } if *found != dim => Err(InputError(format!(
                "captions: vectors of {found} numbers were read, but the model wants {dim}; use the text encoder that it \
                 was made for, or --text-dim {found}"
            ))),
            Self::Embedded {
                blocks,
                tokens: found,
                values,
                ..
            } => {
                let text = &values[block % blocks * found * dim..][..found * dim];
                let mut rows = text[..tokens.min(*found) * dim].to_vec();
                rows.resize(tokens * dim, 0.0);
                Ok(rows)
            }
        }
    }
}

fn embedded(bytes: &[u8]) -> Result<Captions, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let Ok(text) = tensors.tensor("text") else {
        let found = tensors.names().join(", ");
        return Err(format!("no tensor \"text\" is in it (but: {found}); call it that"));
    };
    let (blocks, tokens, dim) = match *text.shape() {
        [tokens, dim] => (1, tokens, dim),
        [blocks, tokens, dim] => (blocks, tokens, dim),
        ref other => {
            return Err(format!(
                "\"text\" is {other:?}; [tokens, dim] and [blocks, tokens, dim] work"
            ));
        }
    };
    if blocks * tokens * dim == 0 {
        return Err(format!(
            "\"text\" is {:?}, which is empty; give a vector at least",
            text.shape()
        ));
    }
    let halves = || text.data().as_chunks().0.iter();
    let values: Vec<f32> = match text.dtype() {
        Dtype::F32 => text
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect(),
        Dtype::F16 => halves().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
        Dtype::BF16 => halves().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
        other => return Err(format!("\"text\" is of {other}; F32, F16 and BF16 work")),
    };
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        return Err(format!(
            "number {at} of \"text\" is {}; encode the captions anew",
            values[at]
        ));
    }
    Ok(Captions::Embedded {
        blocks,
        tokens,
        dim,
        values,
    })
}

/// Keeps the words' random numbers apart from all that have a run's seed: here the seed is the word.
const STREAM: u64 = u64::MAX;

/// A text as vectors, without parameters: enough to tell captions apart, not to understand them.
///
/// Each word (lower case, split at what is neither letter nor digit) gives a row: a unit vector that depends on the word
/// only, with signs drawn by its hash, plus a sinusoid of its place in the text (Vaswani et al., "Attention Is All You Need",
/// 2017, section 3.5), scaled to the length 1. Words after the first `tokens` are cut; rows without a word are zeros.
///
/// # Shapes
/// - returns `[tokens, dim]`
pub fn embed(prompt: &str, tokens: usize, dim: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(tokens * dim);
    for (place, word) in words(prompt).take(tokens).enumerate() {
        let mut signs = vec![0; dim.div_ceil(32)];
        Philox::new(Fnv::new().bytes(word.as_bytes()).value(), STREAM).fill(0, &mut signs);
        values.extend((0..dim).map(|index| {
            let sign = 1.0 - 2.0 * f64::from(signs[index / 32] >> (index % 32) & 1);
            let angle = place as f64 * 10000f64.powf(-((index / 2 * 2) as f64) / dim as f64);
            let wave = if index % 2 == 0 { angle.sin() } else { angle.cos() };
            // Each pair of a sine and a cosine has the length 1.
            ((sign + 2f64.sqrt() * wave) / (dim as f64).sqrt()) as f32
        }));
    }
    values.resize(tokens * dim, 0.0);
    values
}

fn words(prompt: &str) -> impl Iterator<Item = String> {
    let words = prompt.split(|char: char| !char.is_alphanumeric());
    words.filter(|word| !word.is_empty()).map(str::to_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_and_lowered() {
        assert_eq!(
            words("  A red-ball, 2 ÄPFEL!").collect::<Vec<_>>(),
            ["a", "red", "ball", "2", "äpfel"]
        );
        assert_eq!(words("-- ...").count(), 0);
    }

    /// At place 0 the sinusoid is 0 and the root of 2 in turn, so what is left is the word's signs.
    #[test]
    fn a_word_is_a_unit_vector_and_its_place_another() {
        let dim = 64;
        let rows = embed("Ball ball box", 5, dim);
        assert_eq!(rows.len(), 5 * dim);
        let row = |index: usize| &rows[index * dim..][..dim];
        for (index, value) in row(0).iter().enumerate() {
            let wave = if index % 2 == 0 { 0.0 } else { 2f32.sqrt() };
            assert!(((value * 8.0 - wave).abs() - 1.0).abs() < 1e-6, "{index}");
        }
        // The same word elsewhere: only the places differ, by less than their lengths.
        let moved: f32 = row(0)
            .iter()
            .zip(row(1))
            .map(|(left, right)| (left - right).powi(2))
            .sum();
        assert!(moved > 0.01 && moved < 4.0, "{moved}");
        assert!(rows[3 * dim..].iter().all(|value| *value == 0.0));
        // Cut, not changed; and the same in every case of letters.
        assert_eq!(embed("BALL, BALL", 2, dim), rows[..2 * dim]);
        assert_eq!(embed("ball ball box", 1, dim), rows[..dim]);
        assert_ne!(embed("box", 1, dim), embed("ball", 1, dim));
        assert_eq!(embed("box", 1, 7).len(), 7);
    }

    #[test]
    fn blocks_take_their_prompts_in_turn() {
        let captions = Captions::Prompts(vec!["one".into(), "two words".into()]);
        assert_eq!(captions.tokens(), 2);
        assert_eq!(captions.embed(3, 4, 8).unwrap(), embed("two words", 4, 8));
        assert_eq!(captions.embed(2, 4, 8).unwrap(), embed("one", 4, 8));
        let captions = Captions::Embedded {
            blocks: 2,
            tokens: 2,
            dim: 1,
            values: vec![1.0, 2.0, 3.0, 4.0],
        };
        assert_eq!(captions.embed(3, 3, 1).unwrap(), [3.0, 4.0, 0.0]);
        assert_eq!(captions.embed(0, 1, 1).unwrap(), [1.0]);
        let InputError(line) = captions.embed(0, 1, 2).unwrap_err();
        assert!(
            line.contains("vectors of 1 numbers") && line.contains("wants 2"),
            "{line}"
        );
    }
}
