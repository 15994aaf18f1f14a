use burn::module::Module;
use burn::nn::Linear;
use burn_sp::kernels::{gelu, swiglu};
use burn_sp::layout::Axis;
use burn_sp::nn::{Features, Gathered, row_linear, shard_columns, shard_rows};
use burn_sp::train::{ParamLayouts, tiled};
use burn_sp::{SpDevice, SpTensor};

/// The MLP of a block: SwiGLU (Shazeer, arXiv 2002.05202) if it has a gate, GELU if not. Tensor parallelism may share
/// out its hidden units.
#[derive(Module, Debug)]
pub struct Mlp {
    /// The gated branch, `hidden -> ffn`.
    pub gate: Option<Linear>,
    /// `hidden -> ffn`.
    pub up: Linear,
    /// `ffn -> hidden`.
    pub down: Linear,
    /// Hidden units, of all ranks.
    pub ffn_size: usize,
}

impl Mlp {
    /// # Shapes
    /// - `x`: `[batch, tokens, hidden]`, and so is the result, in the same layout
    ///
    /// # Panics
    /// As [`Gathered::new`].
    #[track_caller]
    pub fn forward(&self, x: SpTensor<3>) -> SpTensor<3> {
        let (units, tokens) = (self.units(), x.layout().placement(Axis::Tp));
        let hidden = {
            let x = Gathered::new(x);
            let up = x.linear(&self.up, units);
            match &self.gate {
                Some(gate) => x.linear(gate, units).tokenwise(|gate| swiglu(gate, up.into_local())),
                None => up.tokenwise(gelu),
            }
        };
        row_linear(hidden, &self.down, tokens)
    }

    /// [`forward`](Self::forward), some of a rank's tokens at a time, forward and backward; see [`tiled`].
    ///
    /// # Shapes
    /// - as [`forward`](Self::forward)
    ///
    /// # Panics
    /// As [`forward`](Self::forward) and [`tiled`].
    #[track_caller]
    pub fn forward_tiled(&self, x: SpTensor<3>, tiles: usize) -> SpTensor<3> {
        match tiles {
            0 | 1 => self.forward(x),
            _ => tiled(self, x, tiles, |mlp: &Mlp, x| mlp.forward(x)),
        }
    }

    /// This rank's hidden units; see [`Transformer::shard`](super::Transformer::shard).
    ///
    /// # Panics
    /// If it has been sharded already.
    pub fn shard(self, device: &SpDevice, layouts: &mut ParamLayouts) -> Self {
        let units = self.units();
        Self {
            gate: self.gate.map(|gate| shard_columns(gate, units, device, layouts)),
            up: shard_columns(self.up, units, device, layouts),
            down: shard_rows(self.down, units, device, layouts),
            ..self
        }
    }

    fn units(&self) -> Features {
        Features::sharded(self.ffn_size, 1)
    }
}
