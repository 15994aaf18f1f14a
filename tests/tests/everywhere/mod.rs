//! What the generated suites run over.

use burn_sp::attention::{Blocks, KvMove, Mask, MaskRule};
use burn_sp::layout::MeshShape;

/// Every mesh of at most 8 ranks, and both ways of moving keys where there is a ring.
#[allow(dead_code, reason = "each suite uses its part")]
pub fn meshes() -> Vec<(MeshShape, KvMove)> {
    let axis = || 1..=8usize;
    let mut meshes = Vec::new();
    for (dp, ring) in axis().flat_map(|dp| axis().map(move |ring| (dp, ring))) {
        for (ulysses, tp) in axis().flat_map(|ulysses| axis().map(move |tp| (ulysses, tp))) {
            let mesh = MeshShape { dp, ring, ulysses, tp };
            if mesh.ranks() > 8 {
                continue;
            }
            meshes.push((mesh, KvMove::Ring));
            if ring > 1 {
                meshes.push((mesh, KvMove::Gather));
            }
        }
    }
    meshes
}

/// Every kind of mask, over `tokens` positions.
pub fn masks(tokens: usize) -> Vec<Mask> {
    let third = tokens / 3;
    let blocks = Blocks::new(third.max(1)).with_first(1);
    vec![
        Mask::Full,
        Mask::Causal,
        Mask::Window { size: 3, sink: 0 },
        Mask::Window { size: 2, sink: 1 },
        Mask::documents([third, 0, tokens - third]),
        // The last tokens belong to no document.
        Mask::whole_documents([third, tokens.saturating_sub(third + 1)]),
        Mask::block_causal(Blocks::new(2)),
        Mask::BlockCausal {
            blocks,
            window: Some(third + 1),
            sink: 1,
        },
        Mask::TeacherForcing {
            blocks,
            half: tokens.div_ceil(2),
        },
        Mask::documents([tokens - third, third]).and(Mask::Window { size: 4, sink: 0 }),
        Mask::custom(Friends),
    ]
}

/// A rule that no other mask has: not causal, with holes, and some see nothing.
#[derive(Debug)]
struct Friends;

impl MaskRule for Friends {
    fn visible(&self, query: usize, key: usize) -> bool {
        query % 5 != 3 && (query + key) % 3 != 1
    }
}
