use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData, activation::silu};
use burn_sp::kernels::gelu;

/// Of the times of frames: what modulates their tokens.
#[derive(Module, Debug)]
pub struct TimeEmbedding {
    /// `frequencies -> hidden`.
    pub first: Linear,
    /// `hidden -> hidden`, behind SiLU.
    pub second: Linear,
    /// `hidden -> 6 * hidden`, behind SiLU: the vectors that all blocks share.
    pub projection: Linear,
    /// Cosines and sines of a time, half each.
    pub frequencies: usize,
}

impl TimeEmbedding {
    /// # Shapes
    /// - `times`: `[batch, frames]`, from 0 (clean) to 1000 (noise), on the host: its angles are computed in f64
    /// - returns the embedding `[batch, frames, hidden]` and the blocks' vectors `[batch, frames, 6, hidden]`
    pub fn forward(&self, times: &TensorData) -> (Tensor<3>, Tensor<4>) {
        let weight = self.first.weight.val();
        let data = sinusoid(times, self.frequencies).convert_dtype(weight.dtype());
        let x = Tensor::<3>::from_data(data, (&weight.device(), weight.dtype()));
        let embedding = self.second.forward(silu(self.first.forward(x)));
        let vectors = self.projection.forward(silu(embedding.clone()));
        let [batch, frames, hidden] = embedding.dims();
        (embedding, vectors.reshape([batch, frames, 6, hidden]))
    }
}

/// `[cos(t f_i)..., sin(t f_i)...]`, with `f_i = 10000^(-i / n)` of `n` frequencies: `[batch, frames, 2 n]`.
fn sinusoid(times: &TensorData, size: usize) -> TensorData {
    let half = size / 2;
    let frequency = |i: usize| 10000f64.powf(-(i as f64) / half as f64);
    let frequencies: Vec<f64> = (0..half).map(frequency).collect();
    let of = |time: f64| {
        let angles = frequencies.iter().map(move |frequency| time * frequency);
        angles.clone().map(f64::cos).chain(angles.map(f64::sin))
    };
    let values: Vec<f64> = times.iter::<f64>().flat_map(of).collect();
    let shape = times.shape();
    TensorData::new(values, [shape[0], shape[1], size]).convert_dtype(DType::F64)
}

/// Of the states of a text encoder: what cross-attention reads.
#[derive(Module, Debug)]
pub struct TextEmbedding {
    /// `text -> hidden`.
    pub first: Linear,
    /// `hidden -> hidden`, behind GELU (its tanh approximation).
    pub second: Linear,
}

impl TextEmbedding {
    /// # Shapes
    /// - `text`: `[batch, text tokens, text_dim]`; returns `[batch, text tokens, hidden]`
    pub fn forward(&self, text: Tensor<3>) -> Tensor<3> {
        self.second.forward(gelu(self.first.forward(text)))
    }
}
