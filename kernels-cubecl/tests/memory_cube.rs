//! What attention holds on a device, as the device's memory pools report it.

use burn::tensor::{Device, Distribution, Tensor};
use burn_cubecl::{Cube, cubecl::MemoryScope};
use kernels_cubecl::{AttentionSpec, HeadMap, Mask, Positions, attention, cube::resolve_float};

const HEADS: usize = 2;
const DIM: usize = 64;

/// Bytes reserved for forward and backward, beyond the inputs, by a thread that has run nothing else: each has its own
/// pools, which give nothing back.
fn reserved(tokens: usize) -> usize {
    let run = move || {
        let device = Device::wgpu(Default::default()).autodiff();
        let input = || {
            let shape = [1, tokens, HEADS, DIM];
            Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device).require_grad()
        };
        let (q, k, v) = (input(), input(), input());
        let bytes = || {
            let inner = q
                .clone()
                .inner()
                .try_into_primitive::<Cube>()
                .expect("a tensor on the device");
            let report = resolve_float(inner).client.memory_report(MemoryScope::CurrentStream);
            report.usage().bytes_reserved as usize
        };
        let before = bytes();
        let spec = AttentionSpec {
            mask: Mask::Causal,
            q_positions: Positions::whole(tokens),
            k_positions: Positions::whole(tokens),
            scale: 0.125,
            heads: HeadMap::new(HEADS, HEADS),
            dropout: None,
            wide: false,
        };
        let (out, _) = attention(q.clone(), k.clone(), v.clone(), spec);
        let grads = out.sum().backward();
        for input in [&q, &k, &v] {
            let grad: f32 = input.grad(&grads).expect("a gradient").abs().max().into_scalar();
            assert!(grad.is_finite());
        }
        bytes() - before
    };
    std::thread::spawn(run).join().expect("the thread has run")
}

#[test]
fn attention_memory_is_linear_in_the_sequence() {
    // Kernels compile, tables fill.
    reserved(256);
    let [short, long] = [1024, 4096].map(reserved);
    eprintln!("1,024 tokens: {short} bytes beyond the inputs; 4,096 tokens: {long}");
    // 16 times as much if scores were kept. Pools hand out pages, so a small sum may be rounded up.
    assert!(
        long <= 5 * short.max(1 << 20),
        "{short} bytes for 1,024 tokens, {long} for 4,096"
    );
    let scores = HEADS * 4096 * 4096 * size_of::<f32>();
    assert!(long < scores / 4, "{long} bytes, the scores are {scores}");
}
