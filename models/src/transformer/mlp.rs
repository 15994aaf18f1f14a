use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Tensor, activation::gelu_approximate};
use burn_sp::kernels::swiglu;

/// The MLP of a block: SwiGLU if it has a gate, GELU if not.
#[derive(Module, Debug)]
pub struct Mlp {
    /// The gated branch, `hidden -> ffn`.
    pub gate: Option<Linear>,
    /// `hidden -> ffn`.
    pub up: Linear,
    /// `ffn -> hidden`.
    pub down: Linear,
}

impl Mlp {
    /// # Shapes
    /// - `x`: `[..., hidden]`, and so is the result
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let hidden = match &self.gate {
            Some(gate) => swiglu(gate.forward(x.clone()), self.up.forward(x)),
            None => gelu_approximate(self.up.forward(x)),
        };
        self.down.forward(hidden)
    }
}
