//! PyTorch's numbers for stacks of causal convolutions, by every cut of time that the fixture names.

use burn::module::Param;
use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, Tensor};
use burn_sp::comm::Parts;
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::LossShare;
use burn_sp::{SpDevice, SpTensor};
use burn_sp_models::vae::{CausalConv3d, CausalConv3dConfig, Downsample};
use burn_sp_tests::Fixture;
use serde_json::Value;

use crate::common::{f64s, near, ranks};

fn fixture() -> Fixture<'static> {
    Fixture::new(include_bytes!("../../fixtures/causal_conv3d/causal_conv3d.safetensors"))
}

fn cases() -> Value {
    let text = include_str!("../../fixtures/causal_conv3d/causal_conv3d.json");
    let facts: Value = serde_json::from_str(text).expect("valid JSON");
    facts["cases"].clone()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number")) as usize
}

fn range(value: &Value) -> std::ops::Range<usize> {
    number(&value[0])..number(&value[1])
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

/// f64 on several ranks adds up a few hundred terms in another order.
fn close(found: &[f64], expected: &[f64], rounding: f64, what: &str) {
    let peak = expected.iter().fold(0.0f64, |peak, x| peak.max(x.abs()));
    near(found, expected, rounding * peak, what);
}

fn leaf<const D: usize>(name: &str, dtype: DType, device: &Device) -> Tensor<D> {
    fixture().float::<D>(name, dtype, device).require_grad()
}

fn layers(name: &str, case: &Value, dtype: DType, device: &Device) -> Vec<CausalConv3d> {
    let channels: Vec<usize> = list(&case["channels"]).iter().map(number).collect();
    let layer = |(index, layer): (usize, &Value)| {
        let size = |kind: &str| {
            let space = number(&layer[format!("spatial_{kind}")]);
            [number(&layer[format!("temporal_{kind}")]), space, space]
        };
        let config = CausalConv3dConfig::new([channels[index], channels[index + 1]], size("kernel"));
        let mut conv = config.with_stride(size("stride")).init(device);
        conv.weight = Param::from_tensor(leaf(&format!("{name}.conv{index}.weight"), dtype, device));
        conv.bias = Param::from_tensor(leaf(&format!("{name}.conv{index}.bias"), dtype, device));
        conv
    };
    list(&case["layers"]).iter().enumerate().map(layer).collect()
}

/// By name, what a rank has: outputs of layers, which are gathered already, and its terms of gradients.
fn run(device: &SpDevice, name: &str, case: &Value, cut: &[Value], dtype: DType) -> Vec<(String, Vec<f64>)> {
    let convs = layers(name, case, dtype, device.device());
    let x = leaf::<5>(&format!("{name}.x"), dtype, device.device());
    let frames = cut.iter().map(|bounds| vec![range(bounds)]).collect();
    let split = Split::Explicit(Parts::new(frames));
    let mut h = device.distribute(x.clone(), &Layout::replicated(x.dims()).shard(2, Axis::Ulysses, split));
    let mut found = Vec::new();
    for (index, conv) in convs.iter().enumerate() {
        if index > 0 {
            h = h.tokenwise(silu);
        }
        h = conv.forward(h);
        found.push((format!("conv{index}_out"), h.clone()));
    }
    let dout = fixture().float::<5>(&format!("{name}.dout"), dtype, device.device());
    let dout = SpTensor::replicated(dout, device);
    // In the frames that this rank has come to own.
    let dout = match h.layout().shards(2) {
        [(axis, split)] => dout.shard(*axis, 2, split.clone()),
        _ => unreachable!("time is sharded"),
    };
    let grads = LossShare::new(h.mul(dout), 1).backward();
    let mut found: Vec<_> = found
        .into_iter()
        .map(|(name, h)| (name, f64s(&h.gather().into_local())))
        .collect();
    let mut gradient = |name: String, grad: Vec<f64>| found.push((name, grad));
    gradient("dx".to_owned(), f64s(&x.grad(&grads).expect("of x")));
    for (index, conv) in convs.iter().enumerate() {
        let (weight, bias) = (conv.weight.val(), conv.bias.val());
        gradient(
            format!("d_conv{index}.weight"),
            f64s(&weight.grad(&grads).expect("of a weight")),
        );
        gradient(
            format!("d_conv{index}.bias"),
            f64s(&bias.grad(&grads).expect("of a bias")),
        );
    }
    found
}

#[test]
fn causal_convolutions_are_pytorchs_by_every_cut_of_time() {
    let all = cases();
    let cases = ["stride12", "stride12_spatial2", "stride122"];
    for name in cases {
        let case = &all[name];
        for (cut, partition) in case["partitions"].as_object().expect("partitions by name") {
            let bounds = list(&partition["clip_frames"]);
            // The f32 error that the fixture measured, with its headroom; in f64, of sums of some hundred terms.
            let single = case["tolerances"]["gradients"]["suggested_rel_to_peak"]
                .as_f64()
                .expect("a tolerance");
            for (dtype, rounding) in [(DType::F64, 512.0 * f64::EPSILON), (DType::F32, single)] {
                let found = ranks(MeshShape::ulysses(bounds.len()), |device| {
                    run(&device, name, case, bounds, dtype)
                });
                for (index, (quantity, first)) in found[0].iter().enumerate() {
                    let what = format!("{name}, cut {cut}, {quantity}, {dtype:?}");
                    let expected = fixture().f64s(&format!("{name}.{quantity}_f64"));
                    if quantity.ends_with("_out") {
                        found
                            .iter()
                            .for_each(|rank| close(&rank[index].1, &expected, rounding, &what));
                    } else {
                        let sum = found.iter().skip(1).fold(first.clone(), |sum, rank| {
                            sum.iter().zip(&rank[index].1).map(|(a, b)| a + b).collect()
                        });
                        close(&sum, &expected, rounding, &what);
                    }
                }
            }
        }
    }
}

/// What each rank writes of each layer's output.
#[test]
fn outputs_belong_to_the_owner_of_their_newest_input() {
    let all = cases();
    for name in ["stride12", "stride12_spatial2", "stride122"] {
        let case = &all[name];
        for partition in case["partitions"].as_object().expect("partitions by name").values() {
            for (rank, rows) in list(&partition["ranks"]).iter().enumerate() {
                for (layer, row) in list(rows).iter().enumerate() {
                    let convs = layers(name, case, DType::F32, &Device::flex().autodiff());
                    let window = convs[layer].window();
                    let owns = range(&row["owns_inputs"]);
                    let outputs = window.outputs(owns.clone());
                    let context = format!("{name}, rank {rank}, layer {layer}: {row}");
                    assert_eq!(outputs, range(&row["writes_outputs"]), "{context}");
                    if !outputs.is_empty() {
                        let halo = owns.start.saturating_sub(window.reads(outputs.clone()).start);
                        assert_eq!(halo, number(&row["halo_frames_from_left"]), "{context}");
                        assert_eq!(
                            window.missing(outputs.start),
                            number(&row["zero_frames_on_left"]),
                            "{context}"
                        );
                    }
                }
            }
        }
    }
}

/// The first frame goes past the convolution in time. Height and width are halved by taking every other pixel.
#[test]
fn downsampling_in_time_is_pytorchs() {
    let dtype = DType::F64;
    let expected = fixture().f64s("wan_downsample.y_f64");
    for size in 1..=5 {
        let found = ranks(MeshShape::ulysses(size), |device| {
            let x = fixture().float::<5>("wan_downsample.x", dtype, device.device());
            let [batch, channels, frames, height, width] = x.dims();
            let spread = [batch, channels, frames, 2 * height, 2 * width];
            let x = x
                .reshape([batch, channels, frames, height, 1, width, 1])
                .expand([batch, channels, frames, height, 2, width, 2])
                .reshape(spread);
            let mut layer = Downsample::new(channels, true, device.device());
            let eye = Tensor::<2>::eye(channels, device.device())
                .cast(dtype)
                .reshape([channels, channels, 1, 1]);
            let tap = Tensor::zeros([channels, channels, 3, 3], (device.device(), dtype));
            let tap = tap.slice_assign([0..channels, 0..channels, 0..1, 0..1], eye);
            layer.resample.weight = Param::from_tensor(tap);
            let none = Tensor::zeros([channels], (device.device(), dtype));
            layer.resample.bias = Some(Param::from_tensor(none));
            let conv = layer.time_conv.as_mut().expect("it has one");
            conv.weight = Param::from_tensor(leaf("wan_downsample.time_conv.weight", dtype, device.device()));
            conv.bias = Param::from_tensor(leaf("wan_downsample.time_conv.bias", dtype, device.device()));
            let layout = Layout::replicated(spread).shard(2, Axis::Ulysses, Split::Contiguous);
            let y = layer.forward(device.distribute(x, &layout));
            f64s(&y.gather().into_local())
        });
        for (rank, found) in found.iter().enumerate() {
            close(found, &expected, 64.0 * f64::EPSILON, &format!("rank {rank} of {size}"));
        }
    }
}
