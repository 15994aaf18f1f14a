use std::ops::Range;

use burn::tensor::Tensor;
use burn_sp_comm::{Site, raise};
use kernels_cubecl::{AttentionSpec, HeadMap, Mask, Positions};

use super::entry::{AttentionOptions, Heads, TOKENS, attention, check, run, token_axes};
use super::{
    local::Local,
    pass_q::PassQ,
    strategy::{AttentionCall, HEADS, Strategy},
};
use crate::layout::{Axis, Mesh, Placement};
use crate::tensor::{Refusal, SpTensor};

const OP: &str = "cached_attention";

/// Of tokens that several ranks have, each keeps so many in a row, which is what kernels take at a time. A cache makes room for
/// so many at a time, and drops no fewer, so that what it has is copied once in so many tokens.
const RUN: usize = 64;

/// Keys and values of one layer, of the tokens so far: what [`cached_attention`] reads and extends.
///
/// Every rank keeps its share and no more, and nothing that is kept is ever sent. Of the heads it keeps those that its query
/// heads read. Of the tokens it keeps those that its layout gives it; of tokens that are whole on all P ranks of `ring` and
/// `ulysses` one in P, by runs of 64: the token at position `p` on rank `p / 64 mod P` of these.
#[derive(Clone, Debug, Default)]
pub struct AttentionCache {
    /// `[batch, tokens and room, kv_heads, head_dim]`, of this rank; none before the first tokens. Room for more comes last.
    held: Option<[Tensor<4>; 2]>,
    /// Where those tokens are, in order.
    positions: Vec<Range<usize>>,
    tokens: usize,
}

impl AttentionCache {
    /// How many tokens there have been, on all ranks, those that are kept no more included: the next one's position.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes that this rank keeps, with the room for up to 64 tokens more.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor<4>| tensor.shape().num_elements() * tensor.dtype().size();
        self.held.iter().flatten().map(bytes).sum()
    }

    /// Takes up this rank's share of the tokens that come next: some of `local` along the dimension of tokens, which are at
    /// `positions`.
    fn extend(
        &mut self,
        new: [Tensor<4>; 2],
        heads: &Range<usize>,
        local: &[Range<usize>],
        positions: &[Range<usize>],
    ) {
        let (kept, count) = (length(&self.positions), length(positions));
        let old = self.held.take();
        let fits = old.as_ref().is_some_and(|[k, _]| kept + count <= k.dims()[TOKENS]);
        let mut old = old.into_iter().flatten();
        self.held = Some(new.map(|new| {
            let new = pick(pick(new, HEADS, std::slice::from_ref(heads)), TOKENS, local);
            let with_room = match old.next() {
                Some(old) if fits => old,
                old => {
                    let mut shape = new.dims();
                    shape[TOKENS] = kept + count.max(RUN);
                    let empty = Tensor::zeros(shape, (&new.device(), new.dtype()));
                    match old {
                        Some(old) => put(empty, 0, pick(old, TOKENS, &[0..kept])),
                        None => empty,
                    }
                }
            };
            put(with_room, kept, new)
        }));
        for range in positions {
            match self.positions.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => self.positions.push(range.clone()),
            }
        }
    }

    /// Drops what no later token sees, if it is much.
    fn forget(&mut self, mask: &Mask) {
        let Mask::Window { size, sink } = *mask else {
            return;
        };
        // The next token sees itself and `size - 1` before it.
        let gone = sink..(self.tokens + 1).saturating_sub(size);
        let (mut local, mut positions, mut before) = (Vec::new(), Vec::new(), 0);
        for range in &self.positions {
            let left = range.start..range.end.min(gone.start);
            let right = range.start.max(gone.end.max(gone.start))..range.end;
            for kept in [left, right].into_iter().filter(|kept| !kept.is_empty()) {
                local.push(before + kept.start - range.start..before + kept.end - range.start);
                positions.push(kept);
            }
            before += range.len();
        }
        if before - length(&positions) >= RUN {
            self.held = self
                .held
                .take()
                .map(|held| held.map(|held| own(pick(held, TOKENS, &local))));
            self.positions = positions;
        }
    }

    /// Where the keys are, the room for more after `end`, which is behind all queries: masks hide it.
    fn keys(&self, end: usize) -> Positions {
        let all = self.held.iter().map(|[k, _]| k.dims()[TOKENS]).sum::<usize>();
        let room = end..end + all - length(&self.positions);
        Positions::new(self.positions.iter().cloned().chain([room]))
    }
}

/// Attention of the tokens that come next to those before, of which a cache has the keys and values, and to each other. The
/// cache takes up theirs.
///
/// Tokens count on from chunk to chunk. Those of the first chunk are attended to as [`attention`] does it; of a later
/// one the queries go to every rank of `ring` and `ulysses` (pass-Q of arXiv 2411.01783), each of which attends to the
/// keys that it keeps, and what they find comes back: heads and head_dim a query, however many tokens there have been.
/// A chunk may be sharded over these axes as in [`attention`], or be whole on all of them: a single token should be,
/// and then only what was found travels.
///
/// Under a [window](Mask::Window) the cache drops what no later token sees, 64 tokens a rank or more at a time; its mask must be
/// the same for all chunks. Samples may be sharded over `dp` and heads over `tp`, but not over the axes that share out tokens.
///
/// # Shapes
/// - as [`attention`]
///
/// # Panics
/// If the shapes or layouts do not fit together, the mask is neither causal nor a window, there is dropout, or the tensors
/// are on an autodiff device: there is no backward pass.
#[track_caller]
pub fn cached_attention(
    q: SpTensor<4>,
    k: SpTensor<4>,
    v: SpTensor<4>,
    cache: &mut AttentionCache,
    options: &AttentionOptions,
) -> SpTensor<4> {
    let axes = check_cached(&q, &k, &v, options);
    let heads = Heads::of(&q, &k);
    let (first, count) = (cache.tokens, q.global_shape()[TOKENS]);
    let (local, positions) = share(&k, &axes, first);
    cache.tokens += count;
    let new = [k.local(), v.local()].map(Tensor::clone);
    cache.extend(new, &heads.kv, &local, &positions);
    let out = match first {
        0 => attention(q, k, v, options),
        _ => {
            let call = AttentionCall {
                strategy: choose(&q, cache, &axes, &heads, first, options),
                kv_heads: None,
                site: Site::here(),
            };
            let held = cache.held.clone();
            let [k, v] = held.expect("the cache has been extended");
            run(q, k, v, call)
        }
    };
    cache.forget(&options.mask);
    out
}

/// The axes whose ranks share out the tokens of the cache.
#[track_caller]
fn check_cached(q: &SpTensor<4>, k: &SpTensor<4>, v: &SpTensor<4>, options: &AttentionOptions) -> Vec<Axis> {
    check(q, k, v, &options.mask);
    let refuse = |reason: String, help: &str| Refusal::new(OP, reason, help).refuse();
    if q.local().device().is_autodiff() {
        refuse(
            "the tensors are on an autodiff device, and there is no backward pass".into(),
            "use model.valid(), and tensors on device.inner()",
        );
    }
    if options.dropout_key.is_some() && options.dropout > 0.0 {
        refuse(format!("a dropout of {}", options.dropout), "give no dropout_key");
    }
    if !matches!(options.mask, Mask::Causal | Mask::Window { size: 1.., .. }) {
        refuse(
            format!("tokens come one after another, under {:?}", options.mask),
            "use Mask::Causal, or a Mask::Window of at least 1",
        );
    }
    let mesh = q.mesh();
    let shared = [Axis::Ring, Axis::Ulysses]
        .into_iter()
        .filter(|axis| mesh.size(*axis) > 1);
    let shared: Vec<Axis> = shared.collect();
    let other = |axis: &Axis| {
        let placements = [q, k, v].map(|tensor| tensor.layout().placement(*axis));
        placements
            .iter()
            .any(|placement| matches!(placement, Placement::Shard(dim) if *dim != TOKENS))
    };
    if let Some(axis) = shared.iter().find(|axis| other(axis)) {
        refuse(
            format!(
                "{axis} shares out samples or heads of q {}, k {} and v {}, and the tokens of the cache",
                q.layout(),
                k.layout(),
                v.layout()
            ),
            "shard samples over Dp, heads over Tp, and tokens over Ring and Ulysses",
        );
    }
    let over = token_axes(k);
    let named: Vec<Axis> = over.iter().map(|(axis, _)| *axis).collect();
    if token_axes(q) != over || !(named.is_empty() || named == shared) {
        refuse(
            format!(
                "tokens of q {} and k {} are shared out over {named:?}",
                q.layout(),
                k.layout()
            ),
            &format!("shard both over {shared:?}, or give every rank all of them"),
        );
    }
    shared
}

/// Of the tokens of a chunk, which this rank keeps: where they are among its own, and their positions.
fn share(k: &SpTensor<4>, axes: &[Axis], first: usize) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
    let moved = |range: &Range<usize>| first + range.start..first + range.end;
    let count = k.local().dims()[TOKENS];
    let (rank, ranks) = place(k.mesh(), axes);
    if token_axes(k).is_empty() && ranks > 1 {
        let end = first + count;
        let runs = (first / RUN..end.div_ceil(RUN)).filter(|run| run % ranks == rank);
        let kept: Vec<_> = runs
            .map(|run| (run * RUN).max(first)..((run + 1) * RUN).min(end))
            .collect();
        let local = kept.iter().map(|range| range.start - first..range.end - first);
        return (local.collect(), kept);
    }
    let own = k.positions(TOKENS);
    (vec![0..count], own.ranges().iter().map(moved).collect())
}

/// This rank among those of some axes, and how many they are.
fn place(mesh: &Mesh, axes: &[Axis]) -> (usize, usize) {
    axes.iter().fold((0, 1), |(rank, ranks), axis| {
        let size = mesh.size(*axis);
        (rank * size + mesh.coordinate(*axis), ranks * size)
    })
}

fn choose(
    q: &SpTensor<4>,
    cache: &AttentionCache,
    axes: &[Axis],
    heads: &Heads,
    first: usize,
    options: &AttentionOptions,
) -> Strategy {
    let (mesh, count) = (q.mesh(), q.global_shape()[TOKENS]);
    let spec = AttentionSpec {
        mask: options.mask.clone(),
        q_positions: Positions::new([first..first + count]),
        k_positions: cache.keys(first + count),
        scale: options.scale_of(q),
        heads: HeadMap {
            ratio: heads.ratio,
            offset: heads.first - (heads.kv_first * heads.ratio).min(heads.first),
        },
        dropout: None,
        wide: !axes.is_empty(),
    };
    if axes.is_empty() {
        return Strategy::Local(Local { spec });
    }
    let layout = q.layout().without_single(mesh);
    Strategy::PassQ(PassQ {
        comm: mesh.group(axes).unwrap_or_else(|error| raise(error)),
        queries: (!layout.shards(TOKENS).is_empty()).then(|| layout.all_parts(TOKENS, mesh)),
        spec,
    })
}

/// These ranges of a dimension.
fn pick(tensor: Tensor<4>, dim: usize, ranges: &[Range<usize>]) -> Tensor<4> {
    let mut shape = tensor.dims();
    shape[dim] = ranges.iter().map(|range| range.len()).sum();
    if shape == tensor.dims() {
        return tensor;
    }
    if shape.contains(&0) {
        // Not a view: Flex fails on a view of nothing that does not start at 0.
        return Tensor::zeros(shape, (&tensor.device(), tensor.dtype()));
    }
    let parts = ranges.iter().map(|range| tensor.clone().slice_dim(dim, range.clone()));
    Tensor::cat(parts.collect(), dim)
}

/// Puts tokens where there is room for them, in place if nothing else holds that memory.
fn put(room: Tensor<4>, at: usize, new: Tensor<4>) -> Tensor<4> {
    let [batch, count, heads, dim] = new.dims();
    match new.shape().num_elements() {
        0 => room,
        _ => room.slice_assign([0..batch, at..at + count, 0..heads, 0..dim], new),
    }
}

/// How many positions there are.
fn length(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(|range| range.len()).sum()
}

/// In memory of its own: a view would hold on to all that it is a part of.
fn own(tensor: Tensor<4>) -> Tensor<4> {
    tensor.mul_scalar(1.0)
}
