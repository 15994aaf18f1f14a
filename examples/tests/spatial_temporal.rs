//! The spatial/temporal example: the same numbers as on one rank, and one all-to-all between two attentions.

use std::ffi::OsString;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_sp::layout::{Axis, Layout, MeshShape, Split};
use burn_sp::train::LossShare;
use burn_sp::{LaunchConfig, SpDevice, SpTensor, launch, launch_module};
use burn_sp_examples::InputError;
use burn_sp_examples::flags;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::spatial_temporal::{
    SpatialTemporalConfig, SpatialTemporalFlags, SpatialTemporalModel, SpatialTemporalModelConfig, clips, train,
};
use burn_sp_tests::{Comparison, Outcome, cast};

const HIDDEN: usize = 8;
const LAYERS: usize = 2;

fn model(dtype: DType) -> SpatialTemporalModel {
    let config = SpatialTemporalModelConfig::new(HIDDEN, 2).with_layers(LAYERS);
    let device = Device::flex().autodiff();
    cast(burn_sp::seeded(&device, 3, |device| config.init(device)), dtype).train()
}

fn layout(shape: [usize; 4]) -> Layout {
    Layout::replicated(shape)
        .shard(0, Axis::Dp, Split::Contiguous)
        .shard(1, Axis::Ulysses, Split::Contiguous)
}

/// Frames and pixels need not divide, and a rank may have none: 3 frames of 2 x 2 pixels on 4 ranks.
#[test]
fn outputs_and_gradients_are_those_of_one_rank() {
    for (frames, pixels) in [(4, 8), (3, 4), (7, 3), (1, 5)] {
        let shape = [2, frames, pixels, HIDDEN];
        let data = |seed: u64| -> TensorData { clips(seed, 0, shape, &Device::flex()).into_data() };
        for dtype in [DType::F64, DType::F32] {
            let report = Comparison::new(model(dtype))
                .input("frames", data(1))
                .input("next", data(2))
                .on([
                    MeshShape::ulysses(2),
                    MeshShape::ulysses(3),
                    MeshShape::ulysses(4),
                    MeshShape::ulysses(2).with_dp(2),
                ])
                .run(|rank, model| {
                    let part = |name| rank.device().distribute(rank.input::<4>(name), &layout(shape));
                    let y = model.forward(part("frames"));
                    let error = y.clone() - part("next");
                    Outcome::new(LossShare::mean(error.clone() * error)).output("y", &y)
                });
            let report = report.unwrap_or_else(|error| panic!("{frames} x {pixels}, {dtype:?}: {error}"));
            assert_eq!(report.meshes.len(), 4);
        }
    }
}

/// `2 (s h / P) (P - 1) / P` elements for there and back, in two all-to-all forward and two backward, and nothing else.
#[test]
fn tokens_change_hands_once_between_the_attentions() {
    for (frames, pixels) in [(4, 8), (7, 3), (3, 4)] {
        for ranks in [2, 4] {
            let shape = [2, frames, pixels, HIDDEN];
            let config = LaunchConfig::new(MeshShape::ulysses(ranks)).with_timeout(Duration::from_secs(20));
            let counters = launch_module(
                &config,
                &Device::flex().autodiff(),
                model(DType::F64),
                |device, model| {
                    let clip = clips(1, 0, shape, device.device()).cast(DType::F64);
                    let part = || device.distribute(clip.clone(), &layout(shape));
                    let world = device.mesh().world();
                    world.reset_statistics();
                    model.loss(part(), part()).backward();
                    let counters = world.statistics().into_iter().filter(|counter| counter.calls > 0);
                    counters.collect::<Vec<_>>()
                },
            )
            .unwrap();
            let parts = |len| Split::Contiguous.parts(len, ranks);
            let mut sent = 0;
            for (rank, counters) in counters.iter().enumerate() {
                let [counter] = counters.as_slice() else {
                    panic!("{counters:?}");
                };
                assert_eq!((counter.op.as_str(), counter.axis.as_str()), ("all_to_all", "ulysses"));
                assert_eq!(counter.calls as usize, 4 * LAYERS);
                let (own_frames, own_pixels) = (parts(frames).len_of(rank), parts(pixels).len_of(rank));
                // There and back, forward and backward, all blocks.
                let tokens = own_frames * (pixels - own_pixels) + own_pixels * (frames - own_frames);
                let bytes = 2 * tokens * LAYERS * 2 * HIDDEN * 8;
                assert_eq!(
                    counter.bytes_sent as usize, bytes,
                    "{frames} x {pixels}, rank {rank} of {ranks}"
                );
                sent += bytes;
            }
            if frames.is_multiple_of(ranks) && pixels.is_multiple_of(ranks) {
                let sh = shape.iter().product::<usize>();
                assert_eq!(sent / ranks, 2 * LAYERS * (2 * sh / ranks * (ranks - 1) / ranks) * 8);
            }
        }
    }
}

#[test]
fn tokens_that_an_attention_would_miss_are_refused() {
    let shape = [1, 4, 4, HIDDEN];
    for (dim, axis, words) in [(2, Axis::Ulysses, "dimension 2 of"), (1, Axis::Ring, "dimension 1 of")] {
        let mesh = match axis {
            Axis::Ring => MeshShape::ring(2),
            _ => MeshShape::ulysses(2),
        };
        let config = LaunchConfig::new(mesh).with_timeout(Duration::from_secs(20));
        let error = launch(&config, &Device::flex(), |device: SpDevice| {
            let model = device.seeded(3, |device| SpatialTemporalModelConfig::new(HIDDEN, 2).init(device));
            let layout = Layout::replicated(shape).shard(dim, axis, Split::Contiguous);
            let x: SpTensor<4> = device.distribute(Tensor::ones(shape, device.device()), &layout);
            model.forward(x);
        });
        let error = error.expect_err("refused").to_string();
        assert!(
            error.contains(words) && error.contains("shard frames over Ulysses"),
            "{error}"
        );
    }
}

fn resolve(line: &str) -> Result<SpatialTemporalConfig, InputError> {
    let arguments = std::iter::once("spatial-temporal").chain(line.split_whitespace());
    let flags: SpatialTemporalFlags = flags::parse(arguments.map(OsString::from))?;
    flags.resolve()
}

#[test]
fn what_the_program_cannot_do() {
    for (line, expected) in [
        ("--ring 2", "use --ulysses 2"),
        ("--tp 2", "use --ulysses 2"),
        ("--kv gather", "no keys and values travel here"),
        ("--accumulate 2", "use --batch"),
        ("--seq-len 100 --frames 16", "use --seq-len 112"),
        ("--frames 0", "--frames 0"),
        ("--hidden 10 --heads 4", "use --hidden 12"),
        ("--layers 0", "--layers 0"),
        ("--lr 0", "--lr 0"),
        ("--ranks 9 --seq-len 8 --frames 2", "a rank would have no token"),
    ] {
        let error = resolve(line).expect_err(line).to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{line}: {error}");
    }
}

#[test]
fn the_configuration_of_a_report_can_be_given() {
    let mut config = resolve("--ranks 2 --frames 4 --seq-len 32").unwrap();
    let flags: SpatialTemporalFlags = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
    config.run.chosen = None;
    assert_eq!(flags.resolve(), Ok(config));
}

#[test]
fn the_reason_of_the_mesh_is_true() {
    let line = |line| resolve(line).unwrap().run.mesh_line();
    assert_eq!(line("--ranks 1"), "mesh: one rank (chosen: nothing to split)");
    assert_eq!(
        line("--ranks 2"),
        "mesh: ulysses 2 (chosen: the axis over which tokens change hands)"
    );
}

#[test]
fn a_run_that_diverges_says_by_what() {
    let config = resolve("--frames 4 --seq-len 32 --hidden 16 --heads 2 --lr 1e30 --timeout 20").unwrap();
    let error = train(&config, &Progress::quiet()).unwrap_err().to_string();
    for words in ["step 2: the loss is", "and the gradient norm", "--lr (now 1e30)"] {
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn the_program_compares_one_rank_with_several() {
    let tiny = "--frames 4 --seq-len 32 --hidden 16 --heads 2 --steps 8 --lr 0.01 --timeout 20";
    for (mesh, divides) in [
        ("--ranks 2", true),
        ("--ulysses 4", true),
        ("--dp 2 --ulysses 3", false),
    ] {
        let outcome = train(&resolve(&format!("{tiny} {mesh}")).unwrap(), &Progress::quiet()).unwrap();
        let steps = &outcome.report.steps;
        assert_eq!((outcome.one.len(), steps.len()), (8, 8));
        for (one, many) in outcome.one.iter().zip(steps) {
            assert!((one - many.loss).abs() <= 1e-4 * one, "{mesh}: {one} and {}", many.loss);
        }
        assert!(steps[7].loss < steps[0].loss, "{steps:?}");
        let ((calls, bytes), (more_calls, more_bytes)) = (outcome.exchanged(), outcome.around_each_attention());
        assert_eq!((calls, more_calls), (8.0, 16.0));
        assert!(!divides || 4.0 * bytes == more_bytes, "{bytes} and {more_bytes}");
        let summary = outcome.summary();
        for words in [
            "loss on one rank",
            "one between them, as counted",
            "two around each, as computed",
        ] {
            assert!(summary.contains(words), "{words}: {summary}");
        }
    }
    let alone = train(&resolve(&format!("{tiny} --ranks 1")).unwrap(), &Progress::quiet()).unwrap();
    assert_eq!(
        (alone.exchanged(), alone.around_each_attention()),
        ((0.0, 0.0), (0.0, 0.0))
    );
}
