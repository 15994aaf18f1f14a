//! Numbers that no one here wrote: PyTorch's inputs, and results from an independent f64 computation.

use burn::tensor::{Device, Tensor, TensorData};
use kernels_cubecl::{AttentionSpec, Blocks, HeadMap, Mask, Positions, attention};
use safetensors::{Dtype, SafeTensors};

use crate::backend::device;
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
            Dtype::U8 => view.data().iter().map(|&x| f64::from(x)).collect(),
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
        let plain = device();
        let checkpointing = device().autodiff().gradient_checkpointing();
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

/// A mask over whole sequences: first pair by pair against the file, then through the kernel.
fn check_mask(name: &'static str, mask: impl FnOnce(&Fixture) -> Mask) {
    let fixture = Fixture::new(name);
    let mask = mask(&fixture);
    let (visible, shape) = fixture.values("mask");
    let [queries, keys] = [Positions::whole(shape[0]), Positions::whole(shape[1])];
    for (at, expected) in visible.into_iter().enumerate() {
        let (query, key) = (at / shape[1], at % shape[1]);
        assert_eq!(
            mask.visible(query, key),
            expected == 1.0,
            "{name}: query {query}, key {key}"
        );
    }
    let pairs = mask.visible_pairs(&queries, &keys);
    assert_eq!(pairs, fixture.number("visible_pairs") as u64, "{name}");
    check(name, mask, queries, keys);
}

#[test]
fn windows() {
    for name in ["token_window", "token_window_sink"] {
        check_mask(name, |fixture| Mask::Window {
            size: fixture.number("window"),
            sink: fixture.number("sink"),
        });
    }
}

#[test]
fn packed_documents() {
    let lengths = |fixture: &Fixture| -> Vec<usize> {
        let lengths = fixture.facts["doc_lengths"].as_array().expect("a list");
        lengths
            .iter()
            .map(|len| len.as_u64().expect("an integer") as usize)
            .collect()
    };
    check_mask("docs_causal", |fixture| Mask::documents(lengths(fixture)));
    check_mask("docs_full", |fixture| Mask::whole_documents(lengths(fixture)));
}

fn blocks(fixture: &Fixture) -> Blocks {
    Blocks::new(fixture.number("block_frames") * fixture.number("frame_tokens"))
}

#[test]
fn blocks_of_frames() {
    for name in ["frame_block_causal", "frame_block_causal_ragged"] {
        check_mask(name, |fixture| Mask::block_causal(blocks(fixture)));
    }
    check_mask("frame_block_causal_lone_first", |fixture| {
        Mask::block_causal(blocks(fixture).with_first(fixture.number("frame_tokens")))
    });
    for name in ["frame_window_sink", "frame_window_sink_blocks"] {
        check_mask(name, |fixture| {
            let tokens = |fact| fixture.number(fact) * fixture.number("frame_tokens");
            Mask::BlockCausal {
                blocks: blocks(fixture),
                // The file's budget counts the sink.
                window: Some(tokens("budget_frames") - tokens("sink_frames")),
                sink: tokens("sink_frames"),
            }
        });
    }
}

#[test]
fn teacher_forcing() {
    check_mask("teacher_forcing", |fixture| Mask::TeacherForcing {
        blocks: blocks(fixture),
        half: fixture.number("frames") * fixture.number("frame_tokens"),
    });
}
