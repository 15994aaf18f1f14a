use burn::nn::Embedding;
use burn::tensor::Int;

use super::Features;
use crate::{
    SpTensor,
    layout::{Axis, Layout, Placement},
    tensor::Refusal,
};

/// An embedding of which this rank has some entries: each rank looks up those that it has, and the sum over the ranks, in
/// which one of them has a say for each token, goes to `tokens` (Megatron-LM, arXiv 1909.08053).
///
/// # Shapes
/// - `ids`: `[batch, tokens]`, whole over [`Axis::Tp`]
/// - returns `[batch, tokens, hidden]`; with `tokens` = `Placement::Shard(1)` each rank gets its tokens, by a
///   reduce-scatter
///
/// # Panics
/// If an id is no entry (with one tp rank, as Burn's embedding does), there are fewer entries than tp ranks, the ids
/// are partial or sharded over `tp`, or the embedding's weight is not this rank's part.
#[track_caller]
pub fn parallel_embedding(
    embedding: &Embedding,
    ids: SpTensor<2, Int>,
    entries: Features,
    tokens: Placement,
) -> SpTensor<3> {
    const OP: &str = "parallel_embedding";
    if !entries.is_split(ids.mesh()) {
        return ids
            .tokenwise(|ids| embedding.forward(ids))
            .redistribute(Axis::Tp, tokens);
    }
    ids.refuse_partial(OP);
    let (ids, layout, mesh) = ids.into_parts();
    let weight = embedding.weight.val();
    let [_, hidden] = weight.dims();
    entries.check_shard(OP, &weight, Layout::replicated([entries.count(), hidden]), 0, &mesh);
    if let Placement::Shard(_) = layout.placement(Axis::Tp) {
        Refusal::new(
            OP,
            format!("the ids are {layout}"),
            "give every tp rank all ids of the group",
        )
        .refuse();
    }
    if let Some(id) = ids
        .to_data()
        .iter::<i64>()
        .find(|id| !(0..entries.count() as i64).contains(id))
    {
        Refusal::new(
            OP,
            format!("token id {id} has no entry"),
            format!("there are {}, from 0", entries.count()),
        )
        .refuse();
    }
    let own = entries.range(&mesh);
    if own.is_empty() {
        Refusal::new(
            OP,
            format!(
                "{} entries on {} ranks: one would have none",
                entries.count(),
                mesh.size(Axis::Tp)
            ),
            "use fewer tp ranks",
        )
        .refuse();
    }
    let elsewhere = ids
        .clone()
        .lower_elem(own.start as i64)
        .bool_or(ids.clone().greater_equal_elem(own.end as i64));
    let local = (ids - own.start as i64).mask_fill(elsewhere.clone(), 0);
    let found = burn::tensor::module::embedding(weight, local);
    let elsewhere = elsewhere.unsqueeze_dim::<3>(2).expand(found.shape());
    let mut shape = layout.shape().to_vec();
    shape.push(hidden);
    let terms = found.mask_fill(elsewhere, 0.0);
    SpTensor::checked(OP, terms, layout.with_shape(shape).partial(Axis::Tp), mesh).redistribute(Axis::Tp, tokens)
}
