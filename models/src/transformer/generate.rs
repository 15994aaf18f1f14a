use burn::tensor::{Int, Tensor, TensorData};
use burn_sp::attention::{KvMove, Mask};
use burn_sp::comm::{Buffer, raise};
use burn_sp::layout::{Axis, Layout, Placement};
use burn_sp::{SpDevice, SpTensor};

use super::{ForwardOptions, KvCache, MemoryOptions, Sampling, Transformer};

/// What [`generate`] does with a prompt.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// How many tokens are added, at most.
    pub max_tokens: usize,
    /// Tokens at which the text ends; they are no part of it.
    pub stop: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Who sees whom: causal or a window, as in training.
    pub mask: Mask,
    /// How the ring axis moves keys and values of the prompt.
    pub kv: KvMove,
    /// How many tokens of the prompt are taken at a time; all of them if none is given. The activations of one chunk are shared
    /// out, but for the queries of all chunks but the first, which every rank has in attention.
    pub chunk: Option<usize>,
    /// How passes need less memory: the tiles of the MLP, and the parameters that ranks share out, of which a block is gathered
    /// at a time, for each token again.
    pub memory: MemoryOptions,
}

impl GenerateOptions {
    /// So many tokens, the most likely ones.
    pub fn new(max_tokens: usize) -> Self {
        Self {
            max_tokens,
            stop: Vec::new(),
            sampling: Sampling::greedy(),
            mask: Mask::Causal,
            kv: KvMove::Ring,
            chunk: None,
            memory: MemoryOptions::default(),
        }
    }

    /// What cannot work with a prompt of so many tokens, in one line; `None` if all is well. `positions` is how many the model
    /// [knows](Transformer::max_positions).
    pub fn problem(&self, prompt: usize, positions: Option<usize>) -> Option<String> {
        if prompt == 0 {
            return Some("a prompt of no tokens has nothing to go on from; give at least one".into());
        }
        if self.chunk == Some(0) {
            return Some("chunk 0: take at least one token of the prompt at a time".into());
        }
        if !matches!(self.mask, Mask::Causal | Mask::Window { size: 1.., .. }) {
            return Some(format!(
                "{:?}: tokens that come one after another need Mask::Causal, or a Mask::Window of at least 1",
                self.mask
            ));
        }
        // The last token needs no position: nothing comes after it.
        let needed = prompt + self.max_tokens.saturating_sub(1);
        if let Some(positions) = positions.filter(|positions| *positions < needed) {
            let room = (positions + 1).saturating_sub(prompt);
            return Some(match room {
                0 => {
                    format!("a prompt of {prompt} tokens is longer than the {positions} positions that the model knows")
                }
                _ => format!(
                    "{prompt} tokens and {} more need {needed} positions, and the model knows {positions}; add {room} at most",
                    self.max_tokens
                ),
            });
        }
        self.sampling.problem()
    }
}

/// What was added to a prompt, the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The tokens, without the one at which the text ended.
    pub tokens: Vec<u32>,
    /// Whether a stop token ended it.
    pub stopped: bool,
    /// Bytes of this rank's [cache](KvCache) in the end.
    pub cache_bytes: usize,
}

/// Goes on from a prompt, token by token. Collective: every rank calls the same, and `on_token` with each token as it comes.
///
/// The prompt's tokens are shared out over `ring` and `ulysses`, and stay shared out in the cache; see [`KvCache`]. The token
/// that is read next is on every rank. Rank 0 chooses, so that ranks cannot part.
///
/// # Panics
/// If the options have a [`problem`](GenerateOptions::problem), a token is no entry of the vocabulary, the mesh has a `dp` axis
/// (one prompt is nothing to share out), or as [`Transformer::forward_cached`].
///
/// # Example
/// ```
/// use burn::tensor::Device;
/// use burn_sp::prelude::*;
/// use burn_sp_models::transformer::{GenerateOptions, TransformerConfig, generate};
///
/// let config = TransformerConfig::llama(256, 32, 2, 4, 64);
/// let text = |mesh| {
///     let texts = launch(&LaunchConfig::new(mesh), &Device::flex(), |device: SpDevice| {
///         let model = device.seeded(1, |device| config.init(device));
///         let (model, _) = model.shard(&device);
///         generate(&model, &[7, 1, 4], &GenerateOptions::new(5), &device, |_| {}).tokens
///     });
///     texts.map(|texts| texts[0].clone())
/// };
/// assert_eq!(text(MeshShape::ulysses(2))?, text(MeshShape::tp(2))?);
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[track_caller]
pub fn generate(
    model: &Transformer,
    prompt: &[u32],
    options: &GenerateOptions,
    device: &SpDevice,
    mut on_token: impl FnMut(u32),
) -> Generated {
    if let Some(problem) = options.problem(prompt.len(), model.max_positions(&options.memory.shards)) {
        panic!("generate: {problem}");
    }
    let unknown = prompt.iter().find(|token| **token as usize >= model.vocab_size);
    if let Some(token) = unknown {
        panic!(
            "generate: token {token} of the prompt is no entry of the vocabulary, which has {}",
            model.vocab_size
        );
    }
    let samples = device.mesh().size(Axis::Dp);
    assert!(
        samples == 1,
        "generate: one prompt on {samples} data-parallel ranks; use ring, ulysses and tp"
    );
    let mut reader = Reader {
        model,
        // Not with a split that may be for sequences of another length.
        device: SpDevice::new(device.device().clone(), device.mesh().clone()),
        options: ForwardOptions {
            mask: options.mask.clone(),
            kv: options.kv,
            dropout: None,
            memory: options.memory.clone(),
        },
        cache: KvCache::new(),
    };
    let mut hidden = None;
    for chunk in prompt.chunks(options.chunk.unwrap_or(prompt.len())) {
        hidden = Some(reader.read(chunk));
    }
    let mut hidden = hidden.expect("a prompt has tokens");
    let mut text = Generated {
        tokens: Vec::new(),
        stopped: false,
        cache_bytes: 0,
    };
    while text.tokens.len() < options.max_tokens {
        let token = reader.choose(hidden.clone(), &options.sampling);
        text.stopped = options.stop.contains(&token);
        if text.stopped {
            break;
        }
        text.tokens.push(token);
        on_token(token);
        if text.tokens.len() < options.max_tokens {
            hidden = reader.read(&[token]);
        }
    }
    text.cache_bytes = reader.cache.bytes();
    text
}

/// A model in the middle of a text.
struct Reader<'a> {
    model: &'a Transformer,
    device: SpDevice,
    options: ForwardOptions,
    cache: KvCache,
}

impl Reader<'_> {
    /// Reads the next tokens; returns the residual stream of the last one, on every rank.
    ///
    /// # Shapes
    /// - returns `[1, 1, hidden]`
    fn read(&mut self, tokens: &[u32]) -> SpTensor<3> {
        let shape = [1, tokens.len()];
        let ids: Vec<i64> = tokens.iter().map(|token| i64::from(*token)).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, shape), self.device.device());
        let layout = match self.device.mesh().shape().fits(tokens.len()) {
            true => self.device.sequence_layout(shape),
            false => Layout::replicated(shape),
        };
        let ids = self.device.distribute(ids, &layout);
        let hidden = self.model.forward_cached(ids, &mut self.cache, &self.options);
        self.last(hidden)
    }

    /// The last token's. The rank that has it adds it to the others' zeros.
    fn last(&self, hidden: SpTensor<3>) -> SpTensor<3> {
        let [batch, tokens, width] = *hidden.global_shape() else {
            unreachable!("three dimensions")
        };
        let axes: Vec<Axis> = hidden.layout().shards(1).iter().map(|(axis, _)| *axis).collect();
        let at = hidden.positions(1).iter().position(|position| position == tokens - 1);
        let local = hidden.into_local();
        let own = match at {
            Some(at) => local.narrow(1, at, 1),
            None => Tensor::zeros([batch, 1, width], (&local.device(), local.dtype())),
        };
        let layout = Layout::replicated([batch, 1, width]);
        let layout = axes.iter().fold(layout, |layout, axis| layout.partial(*axis));
        let term = SpTensor::from_local(own, layout, &self.device);
        let sum = |sum: SpTensor<3>, axis: &Axis| sum.redistribute(*axis, Placement::Replicate);
        axes.iter().fold(term, sum)
    }

    /// The token that comes next.
    fn choose(&self, hidden: SpTensor<3>, sampling: &Sampling) -> u32 {
        let logits = self.model.logits_of(hidden, &self.options);
        let logits = logits.redistribute(Axis::Tp, Placement::Replicate).into_local();
        let world = self.device.mesh().world();
        let token = match world.rank() {
            0 => {
                let logits: Vec<f64> = logits.into_data().iter::<f64>().collect();
                Buffer::from_slice(&[sampling.choose(&logits, self.cache.tokens())], [1])
            }
            _ => Buffer::empty(),
        };
        match world.broadcast(token, 0) {
            Ok(token) => token.to_vec::<u32>()[0],
            Err(error) => raise(error),
        }
    }
}
