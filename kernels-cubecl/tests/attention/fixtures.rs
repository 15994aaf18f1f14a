//! Numbers that no one here wrote: PyTorch's inputs, and results from an independent f64 computation.

use burn::tensor::{Device, Tensor, TensorData};
use kernels_cubecl::{AttentionSpec, HeadMap, Mask, Positions, attention};
use safetensors::{Dtype, SafeTensors};

use crate::support::{error, f64s, spec};

const TENSORS: &[u8] = include_bytes!("../fixtures/attention/attention.safetensors");
const FACTS: &str = include_str!("../fixtures/attention/attention.json");

struct Fixture {
    name: &'static str,
    facts: serde_json::Value,
    tensors: SafeTensors<'static>,
}

impl Fixture {
    fn new(name: &'static str) -> Self {
        let mut facts: serde_json::Value = serde_json::from_str(FACTS).expect("valid JSON");
        Self {
            name,
            facts: facts["cases"][name].take(),
            tensors: SafeTensors::deserialize(TENSORS).expect("a valid file"),
        }
    }

    fn number(&self, fact: &str) -> usize {
        self.facts[fact].as_u64().expect("an integer") as usize
    }

    fn values(&self, name: &str) -> (Vec<f64>, Vec<usize>) {
        let view = self
            .tensors
            .tensor(&format!("{}.{name}", self.name))
            .expect("in the file");
        let values = match view.dtype() {
            Dtype::F32 => view
                .data()
                .chunks(4)
                .map(|x| f32::from_le_bytes(x.try_into().unwrap()) as f64)
                .collect(),
            Dtype::F64 => view
                .data()
                .chunks(8)
                .map(|x| f64::from_le_bytes(x.try_into().unwrap()))
                .collect(),
            other => panic!("unexpected {other:?}"),
        };
        (values, view.shape().to_vec())
    }

    /// An f32 input, `[batch, heads, tokens, dim]` in the file, as a view in the kernel's order.
    fn input(&self, name: &str, device: &Device) -> Tensor<4> {
        let (values, shape) = self.values(name);
        let values: Vec<f32> = values.into_iter().map(|x| x as f32).collect();
        Tensor::<4>::from_data(TensorData::new(values, shape), device).swap_dims(1, 2)
    }

    fn assert_close(&self, name: &str, actual: &[f64], device: &str) {
        let (expected, _) = self.values(&format!("{name}_f64"));
        let tolerance = self.facts["tolerances"][name]["suggested_rel_to_peak"]
            .as_f64()
            .unwrap_or(0.0);
        let error = error(actual, &expected);
        assert!(
            error <= tolerance,
            "{} {name} on {device}: error {error:e} of the peak, at most {tolerance:e} expected",
            self.name
        );
    }

    fn check(&self, spec: AttentionSpec) {
        let plain = Device::flex();
        let checkpointing = Device::flex().autodiff().gradient_checkpointing();
        for (label, device) in [("autodiff", plain.clone().autodiff()), ("checkpointing", checkpointing)] {
            let [q, k, v] = ["q", "k", "v"].map(|name| self.input(name, &device).require_grad());
            let (out, lse) = attention(q.clone(), k.clone(), v.clone(), spec.clone());
            let in_file = |tensor: Tensor<4>| f64s(&tensor.swap_dims(1, 2));
            self.assert_close("out", &in_file(out.clone()), label);
            self.assert_close("lse", &f64s(&lse), label);
            let grads = (out * self.input("dout", &device)).sum().backward();
            for (name, input) in [("dq", q), ("dk", k), ("dv", v)] {
                self.assert_close(name, &in_file(input.grad(&grads).expect("a gradient")), label);
            }
        }
        let [q, k, v] = ["q", "k", "v"].map(|name| self.input(name, &plain));
        let (out, lse) = attention(q, k, v, spec);
        self.assert_close("out", &f64s(&out.swap_dims(1, 2)), "the plain device");
        self.assert_close("lse", &f64s(&lse), "the plain device");
    }
}

fn check(name: &'static str, mask: Mask, q_positions: Positions, k_positions: Positions) {
    let fixture = Fixture::new(name);
    let heads = HeadMap::new(fixture.number("heads_q"), fixture.number("heads_kv"));
    let scale = fixture.facts["scale"].as_f64().expect("a number");
    fixture.check(spec(mask, q_positions, k_positions, scale, heads));
}

#[test]
fn full() {
    check("full_mha", Mask::Full, Positions::whole(24), Positions::whole(24));
    check("full_gqa", Mask::Full, Positions::whole(20), Positions::whole(20));
    check("cross", Mask::Full, Positions::whole(12), Positions::whole(7));
}

#[test]
fn causal() {
    check("causal_mha", Mask::Causal, Positions::whole(32), Positions::whole(32));
    check(
        "causal_gqa_odd",
        Mask::Causal,
        Positions::whole(33),
        Positions::whole(33),
    );
    check("causal_mqa", Mask::Causal, Positions::whole(17), Positions::whole(17));
    check("big_scores", Mask::Causal, Positions::whole(24), Positions::whole(24));
}

#[test]
fn queries_after_cached_keys() {
    check(
        "causal_cached",
        Mask::Causal,
        Positions::new([16..24]),
        Positions::whole(24),
    );
}

#[test]
fn rows_that_see_nothing() {
    check("all_dead", Mask::Causal, Positions::whole(9), Positions::new([9..18]));
    // Position 0 lies before all keys, so the rows moved there are dead.
    let queries = Positions::new([0..1, 2..8, 0..1, 9..18, 0..1]);
    check("dead_rows", Mask::Causal, queries, Positions::new([1..19]));
}
