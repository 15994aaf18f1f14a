//! The numbers of diffusers' AutoencoderKLWan, of both kinds, and its checkpoints.

use std::collections::{BTreeMap, HashMap};

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, TensorData};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::{LossShare, ParamLayouts, sum_gradients};
use burn_sp::{SpDevice, SpTensor, launch_module};
use burn_sp_models::vae::{ImportError, Vae, VaeConfig};
use burn_sp_tests::{Fixture, Values, cast, gradients_by_path, parameters_by_path};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};

use crate::common::{config, f64s, near};

/// Of the fixtures' 9 frames.
const LATENTS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Wan21,
    Wan22,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Wan21, Self::Wan22];

    fn config(self) -> VaeConfig {
        let tiny = |preset, decoder_channels, res_blocks| VaeConfig {
            base_channels: 4,
            decoder_channels,
            latent_channels: 4,
            multipliers: vec![1, 1, 2, 2],
            res_blocks,
            latent_mean: vec![0.25, -0.5, 0.0, 1.0],
            latent_std: vec![2.0, 0.5, 1.25, 0.75],
            ..preset
        };
        match self {
            Kind::Wan21 => tiny(VaeConfig::wan21(), 4, 2),
            Kind::Wan22 => tiny(VaeConfig::wan22(), 6, 1),
        }
    }

    fn weights(self) -> SafeTensors<'static> {
        let bytes: &[u8] = match self {
            Kind::Wan21 => include_bytes!("../../fixtures/vae/wan21.weights.safetensors"),
            Kind::Wan22 => include_bytes!("../../fixtures/vae/wan22.weights.safetensors"),
        };
        SafeTensors::deserialize(bytes).expect("a safetensors file")
    }

    fn data(self) -> Fixture<'static> {
        Fixture::new(match self {
            Kind::Wan21 => include_bytes!("../../fixtures/vae/wan21.data.safetensors"),
            Kind::Wan22 => include_bytes!("../../fixtures/vae/wan22.data.safetensors"),
        })
    }

    fn load(self) -> Vae {
        load(&self.config(), self.weights()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// How far a quantity may be from its f64 truth, as a part of its largest element: 32 times as many roundings as torch
    /// itself had in f32, or those of a handful of terms.
    fn allowed(self, quantity: &str, dtype: DType) -> f64 {
        let facts: serde_json::Value =
            serde_json::from_str(include_str!("../../fixtures/vae/vae.json")).expect("valid JSON");
        let name = match self {
            Kind::Wan21 => "wan21",
            Kind::Wan22 => "wan22",
        };
        let torch = facts["models"][name]["torch_f32"][quantity].as_f64();
        let single = (32.0 * torch.unwrap_or_else(|| panic!("no error of {quantity}"))).max(4e-7);
        match dtype {
            DType::F64 => single * f64::EPSILON / f64::from(f32::EPSILON),
            _ => single,
        }
    }
}

/// What a rank has, whole, by the fixture's names; of the clip's gradient its term.
fn run(kind: Kind, dtype: DType, device: &SpDevice, vae: &Vae) -> (BTreeMap<String, Vec<f64>>, Vec<f64>) {
    let clip = kind.data().float::<5>("clip", dtype, device.device()).require_grad();
    let split = vae.frame_split(LATENTS, device.mesh().size(Axis::Ulysses));
    let frames = device.distribute(
        clip.clone(),
        &Layout::replicated(clip.dims()).shard(2, Axis::Ulysses, split),
    );
    let latents = vae.encode(frames.clone());
    let decoded = vae.decode(latents.clone());
    let whole = |x: SpTensor<5>| f64s(x.gather().local());
    let mut found = BTreeMap::from([
        ("moments".to_owned(), whole(vae.moments(frames))),
        ("latents".to_owned(), whole(latents.clone())),
        ("decoded".to_owned(), whole(decoded.clone())),
    ]);
    let square = |x: SpTensor<5>| LossShare::mean(x.clone().mul(x));
    let loss = square(decoded).add(square(latents));
    found.insert("loss".to_owned(), vec![loss.value()]);
    let mut grads = loss.backward();
    let of_clip = clip.grad(&grads).expect("a gradient").narrow(2, 4, 1);
    let own = GradientsParams::from_module(&mut grads, vae);
    let grads = sum_gradients(vae, own, &ParamLayouts::replicated(), device.mesh());
    for (path, grad) in gradients_by_path(vae, &grads) {
        let name = format!("grad.{}", kind.config().diffusers_name(&path));
        found.insert(name, grad.elements);
    }
    (found, f64s(&of_clip))
}

#[test]
fn frames_shared_out_give_diffusers_numbers() {
    for kind in Kind::ALL {
        let (data, model) = (kind.data(), kind.load());
        for dtype in [DType::F64, DType::F32] {
            for size in 1..=4 {
                let context = format!("{kind:?} in {} on {size}", dtype.name());
                let body = |device: SpDevice, vae: Vae| run(kind, dtype, &device, &vae);
                let model = cast(model.clone(), dtype).train();
                let mesh = MeshShape::ulysses(size);
                let mut ranks = launch_module(&config(mesh), &Device::flex().autodiff(), model, body)
                    .unwrap_or_else(|error| panic!("{context}: {error}"));
                let sum = |sum: Vec<f64>, term: &Vec<f64>| sum.iter().zip(term).map(|(a, b)| a + b).collect();
                let zeros = vec![0.0; ranks[0].1.len()];
                let of_clip = ranks.iter().map(|rank| &rank.1).fold(zeros, sum);
                ranks[0].0.insert("d_clip".to_owned(), of_clip);
                for (rank, (found, _)) in ranks.iter().enumerate() {
                    // The fixture has the gradients of some parameters, and rank 0 that of the clip.
                    let names = data.names().into_iter().filter(|name| *name != "clip");
                    for name in names.filter(|name| rank == 0 || *name != "d_clip") {
                        let expected = Values::from(data.data(name));
                        let found = found.get(name).unwrap_or_else(|| panic!("{context}: no {name}"));
                        let allowed = kind.allowed(name, dtype) * expected.peak();
                        near(
                            found,
                            &expected.elements,
                            allowed,
                            &format!("{context}, rank {rank}: {name}"),
                        );
                    }
                }
            }
        }
    }
}

/// Each rank reads the raw frames that its latents depend on.
#[test]
fn slices_of_frames_give_diffusers_numbers() {
    for kind in Kind::ALL {
        let (data, model) = (kind.data(), kind.load());
        for dtype in [DType::F64, DType::F32] {
            for size in 1..=4 {
                let context = format!("{kind:?} in {} on {size}", dtype.name());
                let body = |device: SpDevice, vae: Vae| {
                    let parts = Split::Contiguous.parts(LATENTS, size);
                    let own = parts.of(device.rank()).first().cloned().unwrap_or(0..0);
                    let slice = vae.slice(own.clone(), vae.least_halo()).expect("a halo that will do");
                    let clip = kind.data().float::<5>("clip", dtype, device.device());
                    let clip = clip.slice_dim(2, slice.frames.clone());
                    (own, vae.encode_slice(clip, &slice, &device).to_data())
                };
                let model = cast(model.clone(), dtype);
                let mesh = MeshShape::ulysses(size);
                let ranks = launch_module(&config(mesh), &Device::flex(), model, body)
                    .unwrap_or_else(|error| panic!("{context}: {error}"));
                let latents = data.float::<5>("latents", DType::F64, &Device::flex());
                let allowed = kind.allowed("latents", dtype) * Values::of(&latents).peak();
                for (rank, (own, found)) in ranks.into_iter().enumerate() {
                    let expected = f64s(&latents.clone().slice_dim(2, own));
                    let found: Vec<f64> = found.iter().collect();
                    near(&found, &expected, allowed, &format!("{context}, rank {rank}"));
                }
            }
        }
    }
}

fn load(config: &VaeConfig, file: SafeTensors<'_>) -> Result<Vae, ImportError> {
    config.init(&Device::flex()).load(&[file])
}

/// [`load`] of tensors under other names, or with other views; without those for which there is none.
fn load_changed(
    config: &VaeConfig,
    weights: &SafeTensors<'static>,
    change: impl Fn(&str, TensorView<'static>) -> Option<TensorView<'static>>,
    more: &[&str],
) -> Result<Vae, ImportError> {
    let tensors = weights
        .iter()
        .filter_map(|(name, view)| Some((name.to_owned(), change(name, view)?)));
    let mut tensors: HashMap<String, TensorView<'_>> = tensors.collect();
    for name in more {
        let any = weights.tensor("quant_conv.bias").expect("a tensor");
        tensors.insert((*name).to_owned(), any);
    }
    let bytes = serialize(tensors, None).expect("views of a file");
    load(config, SafeTensors::deserialize(&bytes).expect("a safetensors file"))
}

fn view<'a>(dtype: Dtype, shape: &[usize], bytes: &'a [u8]) -> TensorView<'a> {
    TensorView::new(dtype, shape.to_vec(), bytes).expect("as many elements")
}

/// Each parameter is its tensor, as it lies there; weights of norms may have fewer dimensions there.
#[test]
fn weights_lie_as_in_the_model() {
    for kind in Kind::ALL {
        let (weights, config) = (kind.weights(), kind.config());
        let parameters = |vae| parameters_by_path(&cast(vae, DType::F16));
        let found = parameters(kind.load());
        assert_eq!(found.len(), weights.len());
        for (path, found) in &found {
            let view = weights.tensor(&config.diffusers_name(path)).expect("a tensor");
            assert_eq!(found.shape, view.shape(), "{path}");
            let data = TensorData::from_bytes_vec(view.data().to_vec(), found.shape.clone(), DType::F16);
            assert_eq!(*found, Values::from(data), "{path}");
        }
        let flat = |name: &str, old: TensorView<'static>| match name.ends_with("gamma") {
            true => Some(view(old.dtype(), &[old.shape()[0], 1], old.data())),
            false => Some(old),
        };
        let flat = load_changed(&config, &weights, flat, &[]).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(parameters(flat), found);
    }
}

#[test]
fn what_is_no_checkpoint_of_the_model_is_refused() {
    for kind in Kind::ALL {
        let (weights, config) = (kind.weights(), kind.config());
        let path = "encoder.down_blocks.1.downsampler.time_conv.bias".to_owned();
        let name = config.diffusers_name(&path);
        // With another tensor in place of that one.
        let with = |new: Option<TensorView<'static>>| {
            let change = |other: &str, old| if other == name { new.clone() } else { Some(old) };
            load_changed(&config, &weights, change, &[]).unwrap_err()
        };
        let missing = ImportError::Missing {
            name: name.clone(),
            path: path.clone(),
        };
        assert_eq!(with(None), missing);
        let shape = ImportError::Shape {
            name: name.clone(),
            path: path.clone(),
            found: vec![1, 4],
            expected: vec![4],
        };
        assert_eq!(with(Some(view(Dtype::F16, &[1, 4], &[0; 8]))), shape);
        let dtype = ImportError::Dtype {
            name: name.clone(),
            dtype: "I16".to_owned(),
        };
        assert_eq!(with(Some(view(Dtype::I16, &[4], &[0; 8]))), dtype);
        let more = load_changed(&config, &weights, |_, old| Some(old), &["decoder.extra"]);
        assert_eq!(more.unwrap_err(), ImportError::Unused("decoder.extra".to_owned()));

        let deeper = VaeConfig {
            res_blocks: config.res_blocks + 1,
            ..config
        };
        let error = load(&deeper, weights).unwrap_err();
        assert!(matches!(error, ImportError::Missing { .. }), "{error}");
    }
    // The two kinds have other names.
    let other = VaeConfig {
        shortcuts: true,
        ..Kind::Wan21.config()
    };
    let name = "encoder.down_blocks.0.resnets.0.norm1.gamma".to_owned();
    let path = name.clone();
    assert_eq!(
        load(&other, Kind::Wan21.weights()).unwrap_err(),
        ImportError::Missing { name, path }
    );
}

/// The configurations that diffusers was given.
#[test]
fn configurations_are_read() {
    let facts: serde_json::Value =
        serde_json::from_str(include_str!("../../fixtures/vae/vae.json")).expect("a JSON file");
    for (kind, name) in [(Kind::Wan21, "wan21"), (Kind::Wan22, "wan22")] {
        let json = facts["models"][name]["config"].to_string();
        assert_eq!(VaeConfig::from_diffusers(&json), Ok(kind.config()));
    }
    assert_eq!(VaeConfig::from_diffusers("{}"), Ok(VaeConfig::wan21()));
    for (json, expected) in [
        ("[", "the configuration: "),
        (r#"{"z_dim": "many"}"#, "invalid type"),
        (r#"{"attn_scales": [0.5]}"#, "attention in its stages"),
        (
            r#"{"in_channels": 5, "out_channels": 5, "patch_size": 2}"#,
            "in_channels 5",
        ),
        (r#"{"z_dim": 3}"#, "latent channels; give those of 3"),
    ] {
        let error = VaeConfig::from_diffusers(json).expect_err(json).to_string();
        assert!(error.contains(expected), "{json}: {error}");
    }
}
