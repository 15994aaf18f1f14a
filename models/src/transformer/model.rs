use burn::module::Module;
use burn::nn::{Embedding, Linear};
use burn::tensor::{Int, Tensor, TensorData};
use burn_sp::attention::{AttentionOptions, KvMove, Mask, Positions, RotaryStyle};
use burn_sp::layout::{Axis, Placement, Split};
use burn_sp::nn::{
    Dropout, DropoutKey, Features, Gathered, Rotary, RotaryScaling, RotaryTable, parallel_embedding, shard_columns,
    shard_entries,
};
use burn_sp::train::{LossShare, ParamLayouts, ParamShards, class_parallel_loss};
use burn_sp::{SpDevice, SpTensor};

use super::{Block, BlockContext, KvCache, MemoryOptions, Norm};

/// What a forward pass depends on beside its tokens.
#[derive(Clone, Debug, Default)]
pub struct ForwardOptions {
    /// Who sees whom; causal by default.
    pub mask: Mask,
    /// How the ring axis moves keys and values.
    pub kv: KvMove,
    /// Names the dropout masks of a training step; none for evaluation.
    pub dropout: Option<DropoutKey>,
    /// How it needs less memory.
    pub memory: MemoryOptions,
}

/// A decoder-only language model; made by [`TransformerConfig`](super::TransformerConfig).
///
/// # Example
/// ```
/// use burn::optim::{AdamWConfig, GradientsParams};
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_sp::prelude::*;
/// use burn_sp_models::transformer::{ForwardOptions, TransformerConfig, tokens_and_labels};
///
/// let config = TransformerConfig::llama(16, 8, 1, 2, 12);
/// let ranks = LaunchConfig::new(MeshShape::ulysses(2));
/// launch(&ranks, &Device::flex().autodiff(), |device: SpDevice| {
///     let (model, layouts) = device.seeded(1, |device| config.init(device)).shard(&device);
///     // 7 tokens, each with the next one as its label: 4 on rank 0 and 3 on rank 1.
///     let windows = Tensor::<1, Int>::arange(0..8, device.device()).reshape([1, 8]);
///     let (tokens, labels) = tokens_and_labels(windows, &device);
///     let options = ForwardOptions::default();
///     let logits = model.logits(tokens.clone(), &options);
///     assert_eq!(logits.local().dims(), [1, if device.rank() == 0 { 4 } else { 3 }, 16]);
///
///     let loss = model.loss(tokens, &labels, valid_tokens([&labels]), &options);
///     let grads = GradientsParams::from_grads(loss.backward(), &model);
///     let grads = sum_gradients(&model, grads, &layouts, device.mesh());
///     let (grads, _) = clip_by_global_norm(&model, grads, Some(1.0), &layouts, device.mesh());
///     AdamWConfig::new().init().step(1e-3, model, grads);
/// })?;
/// # Ok::<(), burn_sp::Error>(())
/// ```
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
    /// How rotary angles are scaled.
    #[module(skip)]
    pub rotary_scaling: RotaryScaling,
    /// Entries of the vocabulary, of all ranks.
    pub vocab_size: usize,
    /// Probability of dropout after the embedding and on the residual branches.
    pub dropout: f64,
    /// Probability that an attention weight is dropped.
    pub attention_dropout: f64,
}

impl Transformer {
    /// This rank's part of the model on a mesh with a [`tp`](Axis::Tp) axis: its heads, hidden units and vocabulary. Every
    /// rank calls it on the same whole model, so that a model is the same on every mesh. With one rank on the axis
    /// nothing changes.
    ///
    /// The layouts say which parameters are sharded, and how.
    ///
    /// # Panics
    /// If it has been sharded already.
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
    ///
    /// # Panics
    /// If an id is no entry of the vocabulary, a token's position has no learned embedding, or the tokens' layout is
    /// none that [`attention`](burn_sp::attention::attention) takes.
    #[track_caller]
    pub fn forward(&self, tokens: SpTensor<2, Int>, options: &ForwardOptions) -> SpTensor<3> {
        let dropout = Dropout {
            probability: self.dropout,
        };
        let key = |layer: u64| options.dropout.map(|key| key.layer(layer));
        let (x, mut context) = self.begin(tokens, 0, Placement::Shard(1), options);
        let mut x = dropout.forward(x, key(0));
        for (index, block) in self.blocks.iter().enumerate() {
            let _span = tracing::trace_span!("block", number = index).entered();
            context.key = key(1 + 3 * index as u64);
            x = block.forward_with(x, &context, &options.memory);
        }
        self.end(x, options)
    }

    /// [`forward`](Self::forward) of the tokens that come next in a sequence: they see those before too, whose keys and values
    /// a cache has, and it takes up theirs. So a sequence may come in chunks of any lengths, the last ones token by token.
    ///
    /// A chunk is sharded over `ring` and `ulysses` or whole on all their ranks; see
    /// [`cached_attention`](burn_sp::attention::cached_attention). A single token should be whole: then a block sends, for each
    /// query head, `head_dim + 2` numbers to each of these ranks, however many tokens the cache has. With fewer tokens than ranks
    /// they are not sharded over `tp` either.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, tokens]`, at least one, with ids below the vocabulary's size
    /// - returns `[batch, tokens, hidden]` in the same layout, tokens sharded over [`Axis::Tp`] too, unless they are too few
    ///
    /// # Panics
    /// If the model or the tokens are on an autodiff device (use [`valid`](burn::module::Module::valid) and
    /// `device.inner()`), a token's position has no learned embedding, dropout is asked for, the mask is neither causal nor a
    /// window, or the cache belongs to another mask or model.
    #[track_caller]
    pub fn forward_cached(
        &self,
        tokens: SpTensor<2, Int>,
        cache: &mut KvCache,
        options: &ForwardOptions,
    ) -> SpTensor<3> {
        let count = tokens.global_shape()[1];
        assert!(count > 0, "transformer: a chunk of no tokens; give at least one");
        assert!(
            options.dropout.is_none(),
            "transformer: a cache is for evaluation; give no dropout"
        );
        let autodiff = [tokens.local().device(), self.embedding.weight.val().device()].map(|on| on.is_autodiff());
        assert!(
            autodiff == [false; 2],
            "transformer: a cache has no gradients, but the model or its tokens are on an autodiff device; use model.valid() and \
             device.inner()"
        );
        let few = !tokens.mesh().shape().fits(count);
        let over_tp = if few { Placement::Replicate } else { Placement::Shard(1) };
        let first = cache.expect(count, self.blocks.len(), &options.mask);
        let (mut x, context) = self.begin(tokens, first, over_tp, options);
        for (index, (block, cache)) in self.blocks.iter().zip(cache.layers()).enumerate() {
            let _span = tracing::trace_span!("block", number = index).entered();
            x = block.forward_cached(x, &context, cache, &options.memory);
        }
        self.end(x, options)
    }

    /// The embedded tokens, of which the first is at a position, placed so over [`Axis::Tp`], and what blocks depend on.
    #[track_caller]
    fn begin(
        &self,
        tokens: SpTensor<2, Int>,
        first: usize,
        over_tp: Placement,
        options: &ForwardOptions,
    ) -> (SpTensor<3>, BlockContext) {
        // Those of attention, where no token is sharded over tp.
        let positions = moved(tokens.positions(1), first);
        let shards = &options.memory.shards;
        let embedding = shards.gather(&self.embedding);
        let x = parallel_embedding(&embedding, tokens, self.vocabulary(), over_tp);
        let x = add_positions(shards.gather(&self.positions), x, first);
        let context = BlockContext {
            rotary: self.rotary_table(&x, &positions),
            attention: AttentionOptions {
                mask: options.mask.clone(),
                kv: options.kv,
                dropout: self.attention_dropout,
                ..AttentionOptions::default()
            },
            dropout: Dropout {
                probability: self.dropout,
            },
            key: None,
        };
        (x, context)
    }

    fn end(&self, x: SpTensor<3>, options: &ForwardOptions) -> SpTensor<3> {
        let norm = options.memory.shards.gather(&self.norm);
        x.tokenwise(|x| norm.forward(x))
    }

    /// Next-token logits; for losses use [`loss`](Self::loss), which never holds them all.
    ///
    /// # Shapes
    /// - `tokens`: `[batch, tokens]`; returns `[batch, tokens, vocab]`, the vocabulary sharded over [`Axis::Tp`]
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[track_caller]
    pub fn logits(&self, tokens: SpTensor<2, Int>, options: &ForwardOptions) -> SpTensor<3> {
        self.logits_of(self.forward(tokens, options), options)
    }

    /// The logits of a residual stream that [`forward`](Self::forward) or [`forward_cached`](Self::forward_cached) returned.
    ///
    /// # Shapes
    /// - `hidden`: `[batch, tokens, hidden]`; returns `[batch, tokens, vocab]`, the vocabulary sharded over [`Axis::Tp`]
    ///
    /// # Panics
    /// As [`Gathered::new`].
    #[track_caller]
    pub fn logits_of(&self, hidden: SpTensor<3>, options: &ForwardOptions) -> SpTensor<3> {
        let weight = self.output_weight(&options.memory.shards);
        Gathered::new(hidden).linear_with(weight, None, self.vocabulary())
    }

    /// This rank's share of the mean cross entropy, in nats, over `count` labels; see
    /// [`class_parallel_loss`](burn_sp::train::class_parallel_loss).
    ///
    /// # Shapes
    /// - `tokens`, `labels`: `[batch, tokens]`, laid out alike; a negative label is ignored
    ///
    /// # Panics
    /// As [`forward`](Self::forward), if the labels are laid out otherwise, or one is no entry of the vocabulary.
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

    /// How many positions it knows, where they are learned; with rotary ones there is no last. Collective if ranks share out
    /// parameters.
    pub fn max_positions(&self, shards: &ParamShards) -> Option<usize> {
        let learned = shards.gather(&self.positions);
        learned.map(|learned| learned.weight.dims()[0])
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

    fn rotary_table(&self, x: &SpTensor<3>, positions: &Positions) -> Option<RotaryTable> {
        let theta = self.rotary_theta?;
        let head_dim = self.blocks.first()?.attention.head_dim;
        let rotary = Rotary {
            head_dim,
            theta,
            style: RotaryStyle::Halves,
            scaling: self.rotary_scaling,
        };
        Some(rotary.table(positions, x.local().dtype(), &x.local().device()))
    }
}

/// Positions that count from `first`.
fn moved(positions: Positions, first: usize) -> Positions {
    let ranges = positions.ranges().iter();
    Positions::new(ranges.map(|range| first + range.start..first + range.end))
}

#[track_caller]
fn add_positions(learned: Option<Embedding>, x: SpTensor<3>, first: usize) -> SpTensor<3> {
    let Some(learned) = learned else {
        return x;
    };
    let [max, _] = learned.weight.dims();
    let end = first + x.global_shape()[1];
    assert!(
        end <= max,
        "transformer: position {} has no learned embedding; there are {max}",
        end - 1
    );
    let positions = moved(x.positions(1), first);
    x.tokenwise(|x| {
        // Not reshaped from one dimension: Burn takes a length of 0, of a rank without tokens, as one to keep.
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
///
/// # Panics
/// If windows are empty.
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
