//! Outputs and every gradient of diffusers' WanTransformer3DModel.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::attention::{AttentionOptions, Mask};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::{LossShare, sum_gradients};
use burn_sp::{SpDevice, SpTensor, launch_module};
use burn_sp_models::video_dit::{
    FrameBlocks, FrameRuns, Naming, VideoContext, VideoDit, VideoDitConfig, VideoGrid, VideoInput, VideoMask,
    VideoOptions, VideoRotary, from_output_patches, output_patches,
};
use burn_sp_tests::{Fixture, Values, cast, gather_gradients, gradients_by_path, parameters_by_path};
use safetensors::SafeTensors;

use crate::common::{config, f64s, mesh, near};

pub const WEIGHTS: &[u8] = include_bytes!("../../fixtures/wan/wan.weights.safetensors");

const GRID: VideoGrid = VideoGrid {
    frames: 4,
    rows: 3,
    columns: 4,
};

pub fn wan() -> VideoDitConfig {
    VideoDitConfig {
        text_dim: 32,
        frequencies: 32,
        ..VideoDitConfig::new(4, 64, 128, 4, 2)
    }
}

fn load(dtype: DType) -> VideoDit {
    let weights = SafeTensors::deserialize(WEIGHTS).expect("a safetensors file");
    let model = wan().init(&Device::flex()).load(&[weights]);
    cast(model.unwrap_or_else(|error| panic!("{error}")), dtype)
}

fn data() -> Fixture<'static> {
    Fixture::new(include_bytes!("../../fixtures/wan/wan.data.safetensors"))
}

#[derive(Clone, Copy, Debug)]
enum Case {
    Full,
    PerTokenT,
    BlockCausal,
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Case::Full => "full",
            Case::PerTokenT => "per_token_t",
            Case::BlockCausal => "block_causal",
        }
    }

    /// `[samples, frames]`.
    fn times(self) -> TensorData {
        match self {
            Case::Full => {
                let times = data().f64s("full.timestep");
                let of = |time: &f64| [*time; GRID.frames];
                TensorData::new(times.iter().flat_map(of).collect::<Vec<_>>(), [2, GRID.frames])
            }
            _ => data().data("per_frame_timesteps"),
        }
    }

    fn options(self) -> VideoOptions {
        VideoOptions {
            mask: match self {
                Case::BlockCausal => VideoMask::block_causal(FrameBlocks::new(2)),
                _ => VideoMask::Full,
            },
            ..VideoOptions::default()
        }
    }

    /// Of all parameters, and whether in f64.
    fn gradients(self) -> (Fixture<'static>, bool) {
        let bytes: &[u8] = match self {
            Case::Full => include_bytes!("../../fixtures/wan/wan.full.grads_f64.safetensors"),
            Case::PerTokenT => include_bytes!("../../fixtures/wan/wan.per_token_t.grads.safetensors"),
            Case::BlockCausal => include_bytes!("../../fixtures/wan/wan.block_causal.grads.safetensors"),
        };
        (Fixture::new(bytes), matches!(self, Case::Full))
    }

    /// What the fixtures say about a tensor.
    fn fact(self, tensor: &str, fact: &str) -> f64 {
        let facts: serde_json::Value =
            serde_json::from_str(include_str!("../../fixtures/wan/wan.json")).expect("valid JSON");
        let fact = facts["cases"][self.name()]["tolerances"][tensor][fact].as_f64();
        fact.unwrap_or_else(|| panic!("no number for {tensor}"))
    }

    /// How far from an f64 reference: in f32 within PyTorch's own error with the fixtures' headroom, in f64 only the order
    /// of sums differs.
    fn allowed(self, tensor: &str, dtype: DType) -> f64 {
        match dtype {
            DType::F64 => 1e-12 * self.fact(tensor, "peak_abs_value"),
            _ => self.fact(tensor, "suggested_atol"),
        }
    }
}

fn inputs(dtype: DType, device: &Device) -> (Tensor<5>, Tensor<3>) {
    let (latents, text) = (data(), data());
    (
        latents.float("latents", dtype, device),
        text.float("text_states", dtype, device),
    )
}

/// A weight of a linear layer as the checkpoint has it; all else as it is.
fn stored(values: &Values) -> Vec<f64> {
    match *values.shape {
        [inputs, outputs] => (0..inputs * outputs)
            .map(|i| values.elements[i % inputs * outputs + i / inputs])
            .collect(),
        _ => values.elements.clone(),
    }
}

struct Found {
    out: Vec<f64>,
    loss: f64,
    latents: Vec<f64>,
    text: Vec<f64>,
    parameters: BTreeMap<String, Values>,
}

fn run(case: Case, dtype: DType, device: &SpDevice, model: VideoDit) -> Found {
    let (model, layouts) = model.shard(device);
    let (latents, text) = inputs(dtype, device.device());
    let (latents, text) = (latents.require_grad(), text.require_grad());
    let input = VideoInput::partition(GRID, latents.clone(), case.times(), text.clone(), device);
    let out = model.forward(&input, &case.options());
    let cotangent = output_patches(data().float("cotangent", dtype, device.device()), 2);
    let layout = device.sequence_layout(cotangent.dims());
    let cotangent = device
        .distribute(cotangent, &layout)
        .shard(Axis::Tp, 1, Split::Contiguous);
    let whole = from_output_patches(out.clone().gather().into_local(), &GRID, 2);
    let count = whole.shape().num_elements() as u64;
    let loss = LossShare::new(out.mul(cotangent), count);
    let value = loss.value();
    let mut grads = loss.backward();
    // Every rank has a term.
    let sum = |term: Tensor<3>| {
        let layout = Axis::ALL
            .into_iter()
            .fold(Layout::replicated(term.dims()), Layout::partial);
        f64s(SpTensor::from_local(term, layout, device).gather().local())
    };
    let of_latents = latents.grad(&grads).expect("a gradient").flatten::<3>(2, 4);
    let of_text = text.grad(&grads).expect("a gradient");
    let (of_latents, of_text) = (sum(of_latents), sum(of_text));
    let own = GradientsParams::from_module(&mut grads, &model);
    let grads = sum_gradients(&model, own, &layouts, device.mesh());
    let grads = gather_gradients(&model, grads, &layouts, device);
    Found {
        out: f64s(&whole),
        loss: value,
        latents: of_latents,
        text: of_text,
        parameters: gradients_by_path(&model, &grads),
    }
}

fn meshes() -> Vec<MeshShape> {
    vec![
        mesh(1, 1, 1),
        mesh(1, 1, 2),
        mesh(1, 1, 4),
        mesh(1, 2, 1),
        mesh(1, 4, 1),
        mesh(1, 2, 2),
        // 48 tokens do not divide by 5.
        mesh(1, 5, 1),
        mesh(2, 1, 2),
        MeshShape::tp(2),
        // More ranks than heads.
        MeshShape::tp(5),
        MeshShape::tp(2).with_ulysses(2),
    ]
}

fn is_pytorchs(case: Case) {
    let data = data();
    let (gradients, exact) = case.gradients();
    for dtype in [DType::F32, DType::F64] {
        let model = load(dtype).train();
        let names = parameters_by_path(&model);
        for mesh in meshes() {
            let context = format!("{} in {} on {mesh}", case.name(), dtype.name());
            let body = |device: SpDevice, model| run(case, dtype, &device, model);
            let found = launch_module(&config(mesh), &Device::flex().autodiff(), model.clone(), body);
            let found = found.unwrap_or_else(|error| panic!("{context}: {error}"));
            for (rank, found) in found.iter().enumerate() {
                let context = format!("{context}, rank {rank}");
                let reference = |name: &str| data.f64s(&format!("{}.{name}_f64", case.name()));
                let is = |found: &[f64], name: &str| {
                    let allowed = case.allowed(name, dtype);
                    near(found, &reference(name), allowed, &format!("{context}: {name}"));
                };
                is(&found.out, "out");
                is(&[found.loss], "loss");
                is(&found.latents, "d_latents");
                is(&found.text, "d_text_states");
                assert!(
                    found.parameters.keys().eq(names.keys()),
                    "{context}: every parameter has one"
                );
                for (path, found) in &found.parameters {
                    let name = Naming::Diffusers.tensor(path).expect("a parameter");
                    let expected = Values::from(gradients.data(&name));
                    let rtol = match (dtype, exact) {
                        (DType::F64, true) => 1e-12,
                        // The reference's own error, as its authors measured it, to four digits.
                        (DType::F64, false) => {
                            1.001 * case.fact("every gradient", "torch_f32_vs_f64_worst_rel_to_peak")
                        }
                        _ => case.fact("every gradient", "suggested_rel_to_peak"),
                    };
                    near(
                        &stored(found),
                        &expected.elements,
                        rtol * expected.peak(),
                        &format!("{context}: gradient of {path}"),
                    );
                }
            }
        }
    }
}

#[test]
fn full_attention_is_pytorchs() {
    is_pytorchs(Case::Full);
}

#[test]
fn a_time_per_frame_is_pytorchs() {
    is_pytorchs(Case::PerTokenT);
}

#[test]
fn block_causal_attention_is_pytorchs() {
    is_pytorchs(Case::BlockCausal);
}

/// Embeddings, and the residual stream after each block.
#[test]
fn the_stages_are_pytorchs() {
    let expected = |name: &str| data().f64s(&format!("full.{name}_f64"));
    let found = launch_module(
        &config(MeshShape::default()),
        &Device::flex(),
        load(DType::F64),
        |device, model| {
            let (latents, text) = inputs(DType::F64, device.device());
            let input = VideoInput::partition(GRID, latents, Case::Full.times(), text, &device);
            let (time, vectors) = model.time.forward(&input.times);
            let text = input.text.tokenwise(|text| model.text.forward(text));
            let mut x = input.patches.tokenwise(|patches| model.patch.forward(patches));
            let mut stages = vec![
                ("patch_tokens".to_owned(), f64s(x.local())),
                ("text_tokens".to_owned(), f64s(text.local())),
                // Those of the first frame: one per sample.
                ("time_embedding".to_owned(), f64s(&time.narrow(1, 0, 1))),
                ("time_modulation".to_owned(), f64s(&vectors.clone().narrow(1, 0, 1))),
            ];
            let positions = x.positions(1);
            let context = VideoContext {
                frames: FrameRuns::new(&positions, GRID.tokens_per_frame()),
                rotary: VideoRotary::new(&GRID, &positions, 16, DType::F64, device.device()),
                attention: AttentionOptions {
                    mask: VideoMask::Full.over(&GRID),
                    ..Default::default()
                },
                text: Mask::Full,
            };
            x = x.shard(Axis::Tp, 1, Split::Contiguous);
            for (index, block) in model.blocks.iter().enumerate() {
                x = block.forward(x, vectors.clone(), text.clone(), &context, &Default::default());
                stages.push((format!("block{index}_out"), f64s(x.local())));
            }
            stages
        },
    );
    let found = found.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(found[0].len(), 6);
    for (name, found) in &found[0] {
        near(found, &expected(name), Case::Full.allowed(name, DType::F64), name);
    }
}
