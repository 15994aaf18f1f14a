//! A model of plain Burn, and what it takes to train it with its sequences split over ranks: compare
//! [`before`]'s source with [`after`]'s, of which 14 lines are others.

pub mod after;
pub mod before;

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Tokens, and the one after each.
///
/// # Shapes
/// - both `[samples, tokens]`
pub type Batch = [Tensor<2, Int>; 2];

/// How many batches there are.
const BATCHES: usize = 20;
const SAMPLES: usize = 2;
/// No number of ranks divides it.
const TOKENS: usize = 61;

/// The first windows of a text, each byte a token; shorter texts come round again.
///
/// # Panics
/// If the text is empty.
pub fn batches(text: &[u8], device: &Device) -> Vec<Batch> {
    assert!(!text.is_empty(), "the text is empty; give one with a byte at least");
    let window = |from: usize| {
        let tokens = (from..from + SAMPLES * TOKENS).map(|at| i64::from(text[at % text.len()]));
        Tensor::from_data(TensorData::new(tokens.collect::<Vec<_>>(), [SAMPLES, TOKENS]), device)
    };
    (0..BATCHES)
        .map(|batch| batch * SAMPLES * TOKENS)
        .map(|from| [window(from), window(from + 1)])
        .collect()
}
