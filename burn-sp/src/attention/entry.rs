use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_sp_comm::{Parts, Site, raise};
use kernels_cubecl::{AttentionDropout, AttentionSpec, HeadMap, Mask, Positions};
use serde::{Deserialize, Serialize};

use super::{
    gather_kv::GatherKv,
    local::Local,
    ring::Ring,
    strategy::{AttentionCall, HEADS, Strategy},
    ulysses::Ulysses,
};
use crate::layout::{Axis, Layout, Placement, Split};
use crate::nn::DropoutKey;
use crate::tensor::{Refusal, SpOps, SpTensor};

pub(super) const TOKENS: usize = 1;
const OP: &str = "attention";

/// How the ring axis brings keys and values to the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvMove {
    /// From rank to rank, each block while attention to the one before is computed (Ring Attention, arXiv 2310.01889).
    #[default]
    Ring,
    /// All of them at once, by an all-gather (as Llama 3 was trained, arXiv 2407.21783).
    Gather,
}

/// What attention needs to know beside its tensors.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// Who sees whom, over global positions.
    pub mask: Mask,
    /// Factor of the scores; `1 / sqrt(head_dim)` if none is given.
    pub scale: Option<f64>,
    /// How the ring axis moves keys and values.
    pub kv: KvMove,
    /// Probability that an attention weight is dropped, in `[0, 1)`.
    pub dropout: f64,
    /// Names the mask of the dropped weights, the same in every layout; none for evaluation.
    pub dropout_key: Option<DropoutKey>,
}

/// Attention under a mask, and no more than that.
impl From<Mask> for AttentionOptions {
    fn from(mask: Mask) -> Self {
        Self {
            mask,
            ..Self::default()
        }
    }
}

/// Attention of queries over keys and values whose tokens may be sharded.
///
/// The layout chooses the strategy: tokens sharded over `ulysses` are exchanged for heads (DeepSpeed-Ulysses, arXiv
/// 2309.14509), over `ring` the keys and values travel ([`KvMove`]), over both `ring` runs inside the exchange. Keys
/// and values that every rank holds whole (text in cross-attention, say) need no communication. Any number of heads,
/// any number of query heads a key/value head, any length. Keys and values may also be of other tokens than the
/// queries, sharded in another way, over `ring` and under [`Mask::Full`]: of a cache, say, whose heads `ulysses` shares
/// out already.
///
/// # Shapes
/// - `q`: `[batch, tokens, heads, head_dim]`
/// - `k`: `[batch, tokens, kv_heads, head_dim]`, `v`: `[batch, tokens, kv_heads, value_dim]`
/// - returns `[batch, tokens, heads, value_dim]` in the layout of `q`
///
/// # Panics
/// If the shapes or layouts do not fit together; the message says which layouts do.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_sp::prelude::*;
///
/// // All scores are 0, so each token gets the mean of the values that it sees: its own and the one before.
/// let mask = Mask::Window { size: 2, sink: 0 };
/// let means = launch(&LaunchConfig::new(MeshShape::ring(2)), &Device::flex(), |device: SpDevice| {
///     let values = Tensor::<1>::from_floats([1.0, 3.0, 5.0, 9.0], device.device()).reshape([1, 4, 1, 1]);
///     let zeros = Tensor::<4>::zeros([1, 4, 1, 1], device.device());
///     let layout = device.sequence_layout([1, 4, 1, 1]);
///     let [q, k, v] = [zeros.clone(), zeros, values].map(|whole| device.distribute(whole, &layout));
///     let out = attention(q, k, v, &mask.clone().into());
///     out.gather().into_local().into_data().to_vec::<f32>().unwrap()
/// })?;
/// assert_eq!(means, vec![[1.0, 2.0, 4.0, 7.0]; 2]);
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[track_caller]
pub fn attention(q: SpTensor<4>, k: SpTensor<4>, v: SpTensor<4>, options: &AttentionOptions) -> SpTensor<4> {
    check(&q, &k, &v, &options.mask);
    let heads = Heads::of(&q, &k);
    let call = AttentionCall {
        strategy: choose(&q, &k, &heads, options),
        kv_heads: (heads.kv.len() < k.local().dims()[HEADS]).then(|| heads.kv.clone()),
        site: Site::here(),
    };
    run(q, k.into_parts().0, v.into_parts().0, call)
}

/// A call that is decided, with this rank's keys and values.
#[track_caller]
pub(super) fn run(q: SpTensor<4>, k: Tensor<4>, v: Tensor<4>, call: AttentionCall) -> SpTensor<4> {
    let mut shape = q.global_shape().to_vec();
    let [.., value_dim] = v.dims();
    shape[3] = value_dim;
    let (q, layout, mesh) = q.into_parts();
    let out = <Dispatch as SpOps>::sharded_attention(q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), call);
    SpTensor::checked(OP, Tensor::from_dispatch(out), layout.with_shape(shape), mesh)
}

impl AttentionOptions {
    /// The factor of the scores of these queries.
    pub(super) fn scale_of(&self, q: &SpTensor<4>) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (q.global_shape()[3] as f64).sqrt())
    }
}

/// Which heads this rank has, and which of its key/value heads they read.
pub(super) struct Heads {
    /// Query heads that share one key/value head.
    pub ratio: usize,
    /// The first query head, counted over all ranks.
    pub first: usize,
    /// How many query heads.
    count: usize,
    /// The local key/value heads that are read: all, unless query heads are sharded and key/value heads are not.
    pub kv: Range<usize>,
    /// The first of those, counted over all ranks.
    pub kv_first: usize,
}

impl Heads {
    /// The query heads of this rank, counted over all ranks.
    fn all(&self) -> Range<usize> {
        self.first..self.first + self.count
    }

    #[track_caller]
    pub fn of(q: &SpTensor<4>, k: &SpTensor<4>) -> Self {
        let ratio = (q.global_shape()[HEADS] / k.global_shape()[HEADS]).max(1);
        let first = |tensor: &SpTensor<4>| tensor.positions(HEADS).ranges().first().map_or(0, |range| range.start);
        let held = first(k)..first(k) + k.local().dims()[HEADS];
        let (first, count) = (first(q), q.local().dims()[HEADS]);
        let read = first / ratio..(first + count).div_ceil(ratio);
        let apart = [q, k].iter().any(|tensor| tensor.positions(HEADS).ranges().len() > 1);
        if apart || count > 0 && !(held.start <= read.start && read.end <= held.end) {
            Refusal::new(
                OP,
                format!(
                    "query heads {first}..{} of {} read key/value heads {read:?}, but {} has {held:?} here",
                    first + count,
                    q.layout(),
                    k.layout()
                ),
                "shard heads contiguously, key/value heads only where each rank's query heads read its own alone; \
                 otherwise give every rank all key/value heads",
            )
            .refuse();
        }
        let kv = match count {
            0 => 0..0,
            _ => read.start - held.start..read.end - held.start,
        };
        Heads {
            ratio,
            first,
            count,
            kv_first: held.start + kv.start,
            kv,
        }
    }
}

#[track_caller]
pub(super) fn check(q: &SpTensor<4>, k: &SpTensor<4>, v: &SpTensor<4>, mask: &Mask) {
    check_shapes(q.global_shape(), k.global_shape(), v.global_shape());
    for tensor in [q, k, v] {
        tensor.refuse_partial(OP);
        check_layout(&tensor.layout().without_single(tensor.mesh()));
    }
    let samples = |tensor: &SpTensor<4>| tensor.layout().without_single(tensor.mesh()).shards(0).to_vec();
    if samples(k) != samples(q) || samples(v) != samples(q) {
        Refusal::new(
            OP,
            format!(
                "samples of q {}, k {} and v {} are sharded differently",
                q.layout(),
                k.layout(),
                v.layout()
            ),
            "shard the first dimension of all three alike",
        )
        .refuse();
    }
    let (q_axes, k_axes) = (token_axes(q), token_axes(k));
    // Then it does not matter which tokens these are.
    let over_ring = |axes: &[(Axis, Split)]| matches!(axes, [(Axis::Ring, _)]);
    let any_keys = *mask == Mask::Full && over_ring(&q_axes) && over_ring(&k_axes);
    if k_axes != token_axes(v) || (!k_axes.is_empty() && q_axes != k_axes && !any_keys) {
        Refusal::new(
            OP,
            format!(
                "tokens of q {}, k {} and v {} are sharded differently",
                q.layout(),
                k.layout(),
                v.layout()
            ),
            "shard all three alike, or give keys and values whole",
        )
        .refuse();
    }
    let [queries, keys] = [q, k].map(|tensor| tensor.global_shape()[TOKENS]);
    if !k_axes.is_empty() && queries != keys && !any_keys {
        Refusal::new(
            OP,
            format!(
                "the tokens of {keys} keys {} are sharded, for {queries} queries",
                k.layout()
            ),
            "give keys and values whole where they are of other tokens than the queries, or shard both over Ring alone and \
             use Mask::Full",
        )
        .refuse();
    }
}

/// The axes of more than one rank that shard the tokens, with their splits.
pub(super) fn token_axes(tensor: &SpTensor<4>) -> Vec<(Axis, Split)> {
    tensor.layout().without_single(tensor.mesh()).shards(TOKENS).to_vec()
}

fn choose(q: &SpTensor<4>, k: &SpTensor<4>, heads: &Heads, options: &AttentionOptions) -> Strategy {
    let mesh = q.mesh();
    let ratio = heads.ratio;
    let scale = options.scale_of(q);
    let dropout = |heads: Range<usize>| {
        let key = options.dropout_key.filter(|_| options.dropout > 0.0)?;
        let [batch, queries, all_heads, _] = <[usize; 4]>::try_from(q.global_shape()).expect("q has four dimensions");
        Some(AttentionDropout {
            probability: options.dropout,
            seed: key.seed,
            stream: key.stream(),
            shape: [batch, all_heads, queries, k.global_shape()[TOKENS]],
            batch: q.positions(0),
            heads: Positions::new([heads]),
        })
    };
    // Of some query heads, and the key/value heads from `first_kv` on, all counted over all ranks.
    let spec = |q_positions, k_positions, heads: Range<usize>, first_kv: usize| AttentionSpec {
        mask: options.mask.clone(),
        q_positions,
        k_positions,
        scale,
        heads: HeadMap {
            ratio,
            offset: heads.start - (first_kv * ratio).min(heads.start),
        },
        dropout: dropout(heads),
        wide: false,
    };

    let axes: Vec<Axis> = token_axes(k).into_iter().map(|(axis, _)| axis).collect();
    if axes.is_empty() {
        return Strategy::Local(Local {
            spec: spec(q.positions(TOKENS), k.positions(TOKENS), heads.all(), heads.kv_first),
        });
    }
    let [layout, key_layout] = [q, k].map(|tensor| tensor.layout().without_single(mesh));
    let group = |axis| mesh.group(&[axis]).unwrap_or_else(|error| raise(error));
    // What runs once no token is sharded over ulysses any more, given the heads this rank then holds.
    let over_ring = |layout: &Layout, key_layout: &Layout, heads: Range<usize>, first_kv| {
        let [queries, keys] = [layout, key_layout].map(|layout| Positions::new(layout.positions(TOKENS, mesh)));
        if !axes.contains(&Axis::Ring) {
            return Strategy::Local(Local {
                spec: spec(queries, keys, heads, first_kv),
            });
        }
        let (comm, tokens) = (group(Axis::Ring), key_layout.inner_parts(TOKENS, mesh));
        match options.kv {
            KvMove::Ring => Strategy::Ring(Ring {
                owners: (0..comm.size())
                    .map(|rank| Positions::new(tokens.of(rank).iter().cloned()))
                    .collect(),
                comm,
                spec: spec(queries, keys, heads, first_kv),
            }),
            KvMove::Gather => Strategy::GatherKv(GatherKv {
                comm,
                tokens,
                spec: spec(queries, Positions::whole(key_layout.shape()[TOKENS]), heads, first_kv),
            }),
        }
    };
    match axes.as_slice() {
        [Axis::Ring] => over_ring(&layout, &key_layout, heads.all(), heads.kv_first),
        [Axis::Ulysses] | [Axis::Ring, Axis::Ulysses] => {
            let comm = group(Axis::Ulysses);
            let q_heads = Split::Contiguous.parts(heads.count, comm.size());
            let kv_heads = kv_heads_of(&q_heads, heads);
            let own = |parts: &Parts, first| {
                let range = parts.of(comm.rank()).first().cloned().unwrap_or(0..0);
                first + range.start..first + range.end
            };
            let outer = layout.without_inner(TOKENS);
            let inner = over_ring(
                &outer,
                &outer,
                own(&q_heads, heads.first),
                own(&kv_heads, heads.kv_first).start,
            );
            let tokens = layout.inner_parts(TOKENS, mesh);
            Strategy::Ulysses(Box::new(Ulysses {
                comm,
                tokens,
                heads: q_heads,
                kv_heads,
                inner,
            }))
        }
        _ => Refusal::new(
            OP,
            format!("tokens of {} are sharded over {axes:?}", q.layout()),
            "shard tokens over Ring, over Ulysses, or over Ring and inside it Ulysses",
        )
        .refuse(),
    }
}

/// The key/value heads, among those this rank reads, that each part of its query heads reads.
fn kv_heads_of(parts: &Parts, heads: &Heads) -> Parts {
    let read = |head: usize| (heads.first + head) / heads.ratio - heads.kv_first;
    let of = |rank: usize| {
        let needed = parts.of(rank).iter().filter(|range| !range.is_empty());
        needed.map(|range| read(range.start)..read(range.end - 1) + 1).collect()
    };
    Parts::new((0..parts.ranks()).map(of).collect())
}

#[track_caller]
fn check_shapes(q: &[usize], k: &[usize], v: &[usize]) {
    if q[0] != k[0] || k[..3] != v[..3] || q[3] != k[3] {
        Refusal::new(
            OP,
            format!("q {q:?}, k {k:?} and v {v:?} do not fit"),
            "use q [batch, queries, heads, d], k [batch, keys, kv_heads, d], v [batch, keys, kv_heads, e]",
        )
        .refuse();
    }
    if k[HEADS] == 0 || !q[HEADS].is_multiple_of(k[HEADS]) {
        Refusal::new(
            OP,
            format!("{} query heads cannot share {} key/value heads", q[HEADS], k[HEADS]),
            "the query heads must be a multiple of the key/value heads",
        )
        .refuse();
    }
}

#[track_caller]
fn check_layout(layout: &Layout) {
    let fits = |axis: Axis| match layout.placement(axis) {
        Placement::Shard(0) => true,
        Placement::Shard(TOKENS) => matches!(axis, Axis::Ring | Axis::Ulysses),
        Placement::Shard(HEADS) => matches!(axis, Axis::Tp | Axis::Ulysses),
        Placement::Shard(_) => false,
        Placement::Replicate | Placement::Partial => true,
    };
    if let Some(axis) = Axis::ALL.into_iter().find(|axis| !fits(*axis)) {
        Refusal::new(
            OP,
            format!("no strategy for {axis} on {layout}, which is [batch, tokens, heads, head_dim]"),
            "shard tokens over Ring and Ulysses, heads over Tp or Ulysses, samples over any axis",
        )
        .refuse();
    }
}
