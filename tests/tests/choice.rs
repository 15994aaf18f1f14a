//! What the choice of a mesh counts is what attention sends.

mod common;

use burn::tensor::{DType, Tensor};
use burn_sp::SpTensor;
use burn_sp::attention::{AttentionOptions, Mask, attention};
use burn_sp::layout::{AttentionWorkload, Split};
use common::{mesh, ranks, sequence};

/// Key/value heads of one rank each and shared, forward and backward, on shapes that divide.
#[test]
fn bytes_counted_are_bytes_sent() {
    let (batch, tokens, heads, head_dim) = (2, 16, 8, 4);
    let meshes = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (2, 4)];
    for mesh in meshes.map(|(ring, ulysses)| mesh(1, ring, ulysses)) {
        for (dtype, kv_heads) in [DType::F64, DType::F32, DType::BF16]
            .into_iter()
            .flat_map(|dtype| [8, 4, 2, 1].map(|kv_heads| (dtype, kv_heads)))
        {
            let workload = AttentionWorkload {
                batch,
                tokens,
                heads,
                kv_heads,
                head_dim,
                element_bytes: dtype.size(),
                mask: Mask::Causal,
            };
            let options = AttentionOptions::default();
            assert_eq!(options.mask, workload.mask);
            let sent = ranks(mesh, |device| {
                let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| {
                    let layout = sequence([batch, tokens, heads, head_dim], Split::Zigzag);
                    let local: [usize; 4] = layout.local_shape(device.mesh()).try_into().expect("four dimensions");
                    let leaf = Tensor::<4>::ones(local, (device.device(), dtype)).require_grad();
                    SpTensor::from_local(leaf, layout, &device)
                });
                let world = device.mesh().world().clone();
                let bytes = || {
                    let counters = world.statistics();
                    world.reset_statistics();
                    counters.iter().map(|counter| counter.bytes_sent).sum::<u64>()
                };
                bytes();
                let out = attention(q, k, v, &options);
                let forward = bytes();
                out.local().clone().sum().backward();
                [forward, bytes()]
            });
            let mean = |pass: usize| sent.iter().map(|bytes| bytes[pass]).sum::<u64>() as f64 / sent.len() as f64;
            assert_eq!(
                [mean(0), mean(1)],
                [workload.forward_bytes(&mesh), workload.backward_bytes(&mesh)],
                "{kv_heads} key/value heads on {mesh}, {dtype:?}"
            );
        }
    }
}
