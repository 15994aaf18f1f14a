use burn::module::Module;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Int, Tensor, TensorData};
use burn_sp::attention::{AttentionOptions, KvMove, Mask, RotaryStyle};
use burn_sp::layout::{Axis, Placement, Split};
use burn_sp::nn::{
    Dropout, DropoutKey, Features, Gathered, Rotary, RotaryTable, parallel_embedding, shard_columns, shard_entries,
};
use burn_sp::train::{LossShare, ParamLayouts, ParamShards, class_parallel_loss};
use burn_sp::{SpDevice, SpTensor};

use super::{Block, BlockContext, MemoryOptions, Norm};

/// What a forward pass depends on beside its tokens.
#[derive(Clone, Debug, Default)]
pub struct ForwardOptions {
    /// Who sees whom.
    pub mask: Mask,
    /// How the ring axis moves keys and values.
    pub kv: KvMove,
    /// Names the dropout masks of a training step; none for evaluation.
    pub dropout: Option<DropoutKey>,
    /// How it needs less memory.
    pub memory: MemoryOptions,
}

/// A decoder-only language model; made by [`TransformerConfig`](super::TransformerConfig).
#[derive(Module, Debug)]
pub struct Transformer {
    /// Token embedding, `[vocab, hidden]`.
    pub embedding: Embedding,
    /// Position embedding, where positions are learned.
    pub positions: Option<Embedding>,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// Norm before the output layer.
    pub norm: Norm,
    /// Output layer, where it is not the token embedding.
    pub head: Option<Linear>,
    /// Base of the rotary wavelengths, where positions are rotary.
    pub rotary_theta: Option<f64>,
    /// Entries of the vocabulary, of all ranks.
    pub vocab_size: usize,
    /// Dropout after the embedding and on the residual branches.
    pub dropout: f64,
    /// Dropout of the attention weights.
    pub attention_dropout: f64,
}

impl Transformer {
    /// This rank's part of the model on a mesh with a [`tp`](Axis::Tp) axis: its heads, hidden units and vocabulary. Every
    /// rank calls it on the same whole model, so that a model is the same on every mesh. With one rank on the axis
    /// nothing changes.
    ///
    /// The layouts say which parameters are sharded, and how.
    pub fn shard(self, device: &SpDevice) -> (Self, ParamLayouts) {
        let mut layouts = ParamLayouts::replicated();
        let vocabulary = self.vocabulary();
        let model = Self {
            embedding: shard_entries(self.embedding, vocabulary, device, &mut layouts),
            blocks: self
                .blocks
                .into_iter()
                .map(|block| block.shard(device, &mut layouts))
                .collect(),
            head: self
                .head
                .map(|head| shard_columns(head, vocabulary, device, &mut layouts)),
            ..self
        };
        (model, layouts)
    }

    /// The residual stream after the last norm.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, tokens]` with ids below the vocabulary's size
    /// - returns `[batch, tokens, hidden]` in the same layout, tokens sharded over [`Axis::Tp`] too
    #[track_caller]
    pub fn forward(&self, tokens: SpTensor<2, Int>, options: &ForwardOptions) -> SpTensor<3> {
        // Those of attention, where no token is sharded over tp.
        let positions = tokens.positions(1);
        let dropout = Dropout {
            probability: self.dropout,
        };
        let key = |layer: u64| options.dropout.map(|key| key.layer(layer));
        let shards = &options.memory.shards;
        let embedding = shards.gather(&self.embedding);
        let x = parallel_embedding(&embedding, tokens, self.vocabulary(), Placement::Shard(1));
        let x = add_positions(shards.gather(&self.positions), x);
        let mut context = BlockContext {
            rotary: self.rotary_table(&x, &positions),
            attention: AttentionOptions {
                mask: options.mask.clone(),
                kv: options.kv,
                dropout: self.attention_dropout,
                ..AttentionOptions::default()
            },
            dropout,
            key: None,
        };
        let mut x = dropout.forward(x, key(0));
        for (index, block) in self.blocks.iter().enumerate() {
            let _span = tracing::trace_span!("block", number = index).entered();
            context.key = key(1 + 3 * index as u64);
            x = block.forward_with(x, &context, &options.memory);
        }
        let norm = shards.gather(&self.norm);
        x.tokenwise(|x| norm.forward(x))
    }

    /// Next-token logits; for losses use [`loss`](Self::loss), which never holds them all.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, tokens]`; returns `[batch, tokens, vocab]`, the vocabulary sharded over [`Axis::Tp`]
    #[track_caller]
    pub fn logits(&self, tokens: SpTensor<2, Int>, options: &ForwardOptions) -> SpTensor<3> {
        let hidden = Gathered::new(self.forward(tokens, options));
        hidden.linear_with(self.output_weight(&options.memory.shards), None, self.vocabulary())
    }

    /// This rank's share of the mean cross entropy over `count` labels; see
    /// [`class_parallel_loss`](burn_sp::train::class_parallel_loss).
    ///
    /// # Shapes
    /// - `tokens`, `labels`: `[batch, tokens]`; a negative label is ignored
    #[track_caller]
    pub fn loss(
        &self,
        tokens: SpTensor<2, Int>,
        labels: &SpTensor<2, Int>,
        count: u64,
        options: &ForwardOptions,
    ) -> LossShare {
        let hidden = self.forward(tokens, options);
        let labels = labels.clone().shard(Axis::Tp, 1, Split::Contiguous);
        let weight = self.output_weight(&options.memory.shards);
        class_parallel_loss(hidden, weight, self.vocabulary(), &labels, None, count)
    }

    fn vocabulary(&self) -> Features {
        Features::sharded(self.vocab_size, 1)
    }

    fn output_weight(&self, shards: &ParamShards) -> Tensor<2> {
        match &self.head {
            Some(head) => shards.gather(head).weight.val(),
            None => shards.gather(&self.embedding).weight.val().transpose(),
        }
    }

    fn rotary_table(&self, x: &SpTensor<3>, positions: &burn_sp::attention::Positions) -> Option<RotaryTable> {
        let theta = self.rotary_theta?;
        let head_dim = self.blocks.first()?.attention.head_dim;
        let rotary = Rotary {
            head_dim,
            theta,
            style: RotaryStyle::Halves,
        };
        Some(rotary.table(positions, x.local().dtype(), &x.local().device()))
    }
}

fn add_positions(learned: Option<Embedding>, x: SpTensor<3>) -> SpTensor<3> {
    let Some(learned) = learned else {
        return x;
    };
    let positions = x.positions(1);
    let [max, _] = learned.weight.dims();
    let last = positions.ranges().iter().map(|range| range.end).max().unwrap_or(0);
    assert!(
        last <= max,
        "transformer: position {} has no learned embedding; there are {max}",
        last - 1
    );
    x.tokenwise(|x| {
        let ids: Vec<i64> = positions.iter().map(|position| position as i64).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, positions.len()]), &x.device());
        x + learned.forward(ids)
    })
}

/// The labels of next-token prediction: each token's successor, `-100` (ignored) at the end.
///
/// Shifts the *whole* batch, before any rank takes its tokens, so that no label is lost where slices meet.
///
/// # Shapes
/// - `tokens`: `[batch, tokens]`, and so is the result
pub fn next_token_labels(tokens: Tensor<2, Int>) -> Tensor<2, Int> {
    let [batch, length] = tokens.dims();
    let device = tokens.device();
    let ignored = Tensor::full([batch, length.min(1)], -100, &device);
    if length <= 1 {
        return ignored;
    }
    Tensor::cat(vec![tokens.narrow(1, 1, length - 1), ignored], 1)
}

/// Tokens and labels of this rank from global windows of one token more than the sequence length.
///
/// # Shapes
/// - `windows`: `[batch, tokens + 1]`; returns two `[batch, tokens]`
pub fn tokens_and_labels(windows: Tensor<2, Int>, device: &SpDevice) -> (SpTensor<2, Int>, SpTensor<2, Int>) {
    let [_, length] = windows.dims();
    assert!(
        length > 0,
        "tokens_and_labels: windows hold one token more than the sequence, so at least one"
    );
    let tokens = device.distribute_tokens(windows.clone().narrow(1, 0, length - 1));
    let labels = device.distribute_tokens(windows.narrow(1, 1, length - 1));
    (tokens, labels)
}
