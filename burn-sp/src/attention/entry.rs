use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_sp_comm::{Parts, Site, raise};
use kernels_cubecl::{AttentionSpec, HeadMap, Mask, Positions};
use serde::{Deserialize, Serialize};

use super::{
    gather_kv::GatherKv,
    local::Local,
    strategy::{AttentionCall, Strategy},
    ulysses::Ulysses,
};
use crate::layout::{Axis, Layout, Placement, Split};
use crate::tensor::{Refusal, SpOps, SpTensor};

const TOKENS: usize = 1;
const HEADS: usize = 2;
const OP: &str = "attention";

/// How the ring axis brings keys and values to the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvMove {
    /// All of them at once, by an all-gather.
    #[default]
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
}

/// Attention of queries over keys and values whose tokens may be sharded.
///
/// The layout chooses the strategy: tokens sharded over `ulysses` are exchanged for heads, over `ring` the keys and
/// values travel, over both `ring` runs inside the exchange. Keys and values that every rank holds whole (text in
/// cross-attention, say) need no communication. Any number of heads, any number of query heads a key/value head, any
/// length.
///
/// # Shapes
/// - `q`: `[batch, tokens, heads, head_dim]`, `k`, `v`: `[batch, tokens, kv_heads, head_dim]`
/// - returns the shape and layout of `q` (with the last dimension of `v`)
///
/// # Panics
/// If the shapes or layouts do not fit together; the message says which layouts do.
#[track_caller]
pub fn attention(q: SpTensor<4>, k: SpTensor<4>, v: SpTensor<4>, options: &AttentionOptions) -> SpTensor<4> {
    let call = AttentionCall {
        strategy: choose(&q, &k, &v, options),
        site: Site::here(),
    };
    let mut shape = q.global_shape().to_vec();
    shape[3] = v.global_shape()[3];
    let (q, layout, mesh) = q.into_parts();
    let (k, v) = (k.into_parts().0, v.into_parts().0);
    let out = <Dispatch as SpOps>::sharded_attention(q.into_dispatch(), k.into_dispatch(), v.into_dispatch(), call);
    SpTensor::checked(OP, Tensor::from_dispatch(out), layout.with_shape(shape), mesh)
}

#[track_caller]
fn choose(q: &SpTensor<4>, k: &SpTensor<4>, v: &SpTensor<4>, options: &AttentionOptions) -> Strategy {
    check_shapes(q.global_shape(), k.global_shape(), v.global_shape());
    for tensor in [q, k, v] {
        tensor.refuse_partial(OP);
        check_layout(tensor.layout());
    }
    if k.layout().shards(0) != q.layout().shards(0) || v.layout().shards(0) != q.layout().shards(0) {
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
    let mesh = q.mesh();
    let sharded = |tensor: &SpTensor<4>| -> Vec<(Axis, Split)> {
        tensor
            .layout()
            .shards(TOKENS)
            .iter()
            .filter(|(axis, _)| mesh.size(*axis) > 1)
            .cloned()
            .collect()
    };
    let (q_axes, k_axes) = (sharded(q), sharded(k));
    if k_axes != sharded(v) || (!k_axes.is_empty() && q_axes != k_axes) {
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

    let ratio = q.global_shape()[HEADS] / k.global_shape()[HEADS].max(1);
    let head_start = |tensor: &SpTensor<4>| tensor.positions(HEADS).ranges().first().map_or(0, |range| range.start);
    let (q_first, kv_first) = (head_start(q), head_start(k));
    let scale = options
        .scale
        .unwrap_or_else(|| 1.0 / (q.global_shape()[3] as f64).sqrt());
    let spec = |q_positions, k_positions, first_head: usize, first_kv: usize| AttentionSpec {
        mask: options.mask.clone(),
        q_positions,
        k_positions,
        scale,
        heads: HeadMap {
            ratio: ratio.max(1),
            offset: first_head - (first_kv * ratio).min(first_head),
        },
        wide: false,
    };

    if k_axes.is_empty() {
        return Strategy::Local(Local {
            spec: spec(q.positions(TOKENS), k.positions(TOKENS), q_first, kv_first),
        });
    }
    let axes: Vec<Axis> = k_axes.iter().map(|(axis, _)| *axis).collect();
    let group = |axis| mesh.group(&[axis]).unwrap_or_else(|error| raise(error));
    // What runs once no token is sharded over ulysses any more, given the first heads this rank then holds.
    let over_ring = |layout: &Layout, first_head, first_kv| {
        let own = Positions::new(layout.positions(TOKENS, mesh));
        if !axes.contains(&Axis::Ring) {
            return Strategy::Local(Local {
                spec: spec(own.clone(), own, first_head, first_kv),
            });
        }
        let all = Positions::whole(layout.shape()[TOKENS]);
        match options.kv {
            KvMove::Gather => Strategy::GatherKv(GatherKv {
                comm: group(Axis::Ring),
                tokens: layout.inner_parts(TOKENS, mesh),
                spec: spec(own, all, first_head, first_kv),
            }),
        }
    };
    match axes.as_slice() {
        [Axis::Ring] => over_ring(&trimmed(q, &axes), q_first, kv_first),
        [Axis::Ulysses] | [Axis::Ring, Axis::Ulysses] => {
            let layout = trimmed(q, &axes);
            let comm = group(Axis::Ulysses);
            let local_heads = q.local().dims()[HEADS];
            let heads = Split::Contiguous.parts(local_heads, comm.size());
            let kv_heads = kv_heads_of(&heads, ratio, q_first, kv_first);
            let first = |parts: &Parts, base| base + parts.of(comm.rank()).first().map_or(0, |range| range.start);
            let inner = over_ring(
                &layout.without_inner(TOKENS),
                first(&heads, q_first),
                first(&kv_heads, kv_first),
            );
            let tokens = layout.inner_parts(TOKENS, mesh);
            Strategy::Ulysses(Box::new(Ulysses {
                comm,
                tokens,
                heads,
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

/// The layout of `q` with only the given axes on its tokens: those with one rank move nothing.
fn trimmed(q: &SpTensor<4>, axes: &[Axis]) -> Layout {
    let mut layout = Layout::replicated(q.global_shape());
    for (axis, split) in q.layout().shards(TOKENS).iter().filter(|(axis, _)| axes.contains(axis)) {
        layout = layout.shard(TOKENS, *axis, split.clone());
    }
    layout
}

/// The local key/value heads that each rank's local query heads read.
fn kv_heads_of(heads: &Parts, ratio: usize, q_first: usize, kv_first: usize) -> Parts {
    let of = |rank: usize| {
        let needed = heads.of(rank).iter().filter(|range| !range.is_empty());
        needed
            .map(|range| (q_first + range.start) / ratio - kv_first..(q_first + range.end - 1) / ratio + 1 - kv_first)
            .collect()
    };
    Parts::new((0..heads.ranks()).map(of).collect())
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
        Placement::Shard(HEADS) => axis == Axis::Tp,
        Placement::Shard(_) => false,
        Placement::Replicate | Placement::Partial => true,
    };
    if let Some(axis) = Axis::ALL.into_iter().find(|axis| !fits(*axis)) {
        Refusal::new(
            OP,
            format!("no strategy for {axis} on {layout}, which is [batch, tokens, heads, head_dim]"),
            "shard tokens over Ring and Ulysses, heads over Tp, samples over any axis",
        )
        .refuse();
    }
}
