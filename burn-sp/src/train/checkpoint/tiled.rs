use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use burn_sp_comm::Parts;

use super::{Forward, Keep, Piece, TOKENS, record};
use crate::{
    SpTensor,
    layout::{Axis, Layout, Mesh, Split},
    tensor::Refusal,
};

const OP: &str = "tiled";

/// Runs what treats tokens one by one, an MLP say, on some tokens at a time, forward and backward: what it computes
/// between input and output is held of a tile only (as the tiled MLP of Arctic Long Sequence Training, arXiv
/// 2506.13996). Backward runs each tile again, as [`checkpoint`](super::checkpoint()) does.
///
/// A rank's tokens are cut into `tiles` parts, as equal as can be; every rank must give the same number, since a part
/// that communicates does so once a tile. `forward` sees tensors whose tokens are sharded over [`Axis::Tp`] at most, and
/// may gather them over it.
///
/// # Shapes
/// - `x`: `[batch, tokens, ...]`; returns the same tokens in the same layout, with whatever `forward` makes of the rest
///
/// # Panics
/// If `tiles` is 0, `x` is partial, another axis shards its tokens inside `tp`, or a tile's tokens come out in another
/// layout; else as [`checkpoint`](super::checkpoint()).
#[track_caller]
pub fn tiled<const D: usize, const E: usize, M: Module + 'static>(
    module: &M,
    x: SpTensor<D>,
    tiles: usize,
    forward: impl Fn(&M, SpTensor<D>) -> SpTensor<E> + Send + Sync + 'static,
) -> SpTensor<E> {
    x.refuse_partial(OP);
    if tiles == 0 {
        Refusal::new(OP, "0 tiles", "give it at least 1").refuse();
    }
    let (local, layout, mesh) = x.into_parts();
    let pieces: Vec<_> = cuts(&layout, tiles, &mesh)
        .into_iter()
        .map(|(range, tile)| Piece {
            frame: (tile, mesh.clone()),
            range: Some(range),
        })
        .collect();
    let forward: Forward<M, SpTensor<D>, SpTensor<E>> = {
        let checked = move |module: &M, x: SpTensor<D>| {
            let before = x.layout().clone();
            let y = forward(module, x);
            // Axes of one rank shard nothing.
            let after = y.layout().without_single(y.mesh());
            if after.shards(TOKENS) != before.shards(TOKENS) || after.shape()[TOKENS] != before.shape()[TOKENS] {
                Refusal::new(
                    OP,
                    format!("tokens went in as {before} and came out as {}", y.layout()),
                    "give them back in the layout in which they came",
                )
                .refuse();
            }
            y.refuse_partial(OP);
            y
        };
        Arc::new(checked)
    };
    let (shape, out) = match record(
        module,
        pieces,
        vec![local.clone().into_dispatch()],
        &forward,
        Keep::Device,
    ) {
        Ok((frames, out)) => {
            let (tile, _) = &frames[0];
            (tile.shape().to_vec(), Tensor::<E>::from_dispatch(out))
        }
        Err(_) => {
            let tile = |(range, layout): (Range<usize>, Layout)| {
                let tokens = local.clone().slice_dim(TOKENS, range);
                forward(module, SpTensor::checked(OP, tokens, layout, mesh.clone()))
            };
            let tiles: Vec<_> = cuts(&layout, tiles, &mesh).into_iter().map(tile).collect();
            let shape = tiles[0].layout().shape().to_vec();
            let own = tiles.into_iter().map(SpTensor::into_local).collect();
            (shape, Tensor::cat(own, TOKENS))
        }
    };
    // The tokens of all ranks, and what a tile has beside them.
    let mut whole = shape;
    whole[..=TOKENS].copy_from_slice(&layout.shape()[..=TOKENS]);
    SpTensor::checked(OP, out, layout.with_shape(whole), mesh)
}

/// This rank's tokens of each tile, and the tile's layout: of the ranks of `tp` only, between which its tokens may travel.
/// For the others it is as if each had a batch of its own.
fn cuts(layout: &Layout, tiles: usize, mesh: &Mesh) -> Vec<(Range<usize>, Layout)> {
    let own = layout.without_single(mesh);
    let held: Vec<usize> = match own.shards(TOKENS).last() {
        Some((Axis::Tp, _)) => {
            let parts = own.inner_parts(TOKENS, mesh);
            (0..mesh.size(Axis::Tp)).map(|rank| parts.len_of(rank)).collect()
        }
        Some(_) if own.shards(TOKENS).iter().any(|(axis, _)| *axis == Axis::Tp) => Refusal::new(
            OP,
            format!("the input is {layout}"),
            "shard its tokens over Tp, inside the other axes that shard them",
        )
        .refuse(),
        _ => vec![own.local_len(TOKENS, mesh)],
    };
    let by_tp = held.len() > 1;
    let tiles_of: Vec<Parts> = held.iter().map(|length| Parts::contiguous(*length, tiles)).collect();
    let rank = if by_tp { mesh.coordinate(Axis::Tp) } else { 0 };
    let local = own.local_shape(mesh);
    (0..tiles)
        .map(|tile| {
            let mut next = 0;
            let part = |tiles: &Parts| {
                let start = next;
                next += tiles.len_of(tile);
                vec![start..next]
            };
            let parts = Parts::new(tiles_of.iter().map(part).collect());
            let mut shape = local.clone();
            shape[TOKENS] = parts.extent();
            let mut layout = Layout::replicated(shape);
            if by_tp {
                let even = parts == Parts::contiguous(parts.extent(), held.len());
                let split = if even {
                    Split::Contiguous
                } else {
                    Split::Explicit(parts)
                };
                layout = layout.shard(TOKENS, Axis::Tp, split);
            }
            (tiles_of[rank].of(tile)[0].clone(), layout)
        })
        .collect()
}
