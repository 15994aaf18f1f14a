//! The programs on a GPU through wgpu (in CI, Mesa's software Vulkan): the losses of the CPU, on one rank and on many.

use std::ffi::OsString;
use std::process::Command;

use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::Report;
use burn_sp_examples::spatial_temporal::{self, SpatialTemporalFlags};
use burn_sp_examples::train::train;
use burn_sp_examples::train_video::{self, VideoTrainFlags};

fn run(line: &str) -> Report {
    let tiny =
        "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 61 --steps 10 --lr 0.01 --dropout 0.1 --timeout 60";
    let line = format!("train-transformer {tiny} {line}");
    let flags: TrainFlags = flags::parse(line.split_whitespace().map(OsString::from)).unwrap();
    train(&flags.resolve().unwrap(), &Progress::quiet()).unwrap()
}

#[test]
fn a_transformer_trains_as_on_the_cpu() {
    for (shape, meshes) in [
        ("--shape llama", ["--ranks 2", "--tp 2"]),
        (
            "--shape gpt2 --attention-dropout 0.1",
            ["--ring 2", "--dp 2 --ring 2 --kv gather"],
        ),
    ] {
        let cpu = run(&format!("{shape} --device flex --ranks 1 --batch 2"));
        for mesh in meshes {
            let gpu = run(&format!("{shape} --device wgpu --batch 2 {mesh}"));
            let pairs = cpu.steps.iter().zip(&gpu.steps).map(|(a, b)| (a.loss, b.loss));
            for (step, (a, b)) in pairs.chain(cpu.validation_loss.zip(gpu.validation_loss)).enumerate() {
                assert!(
                    (a - b).abs() <= 1e-3 * a.abs(),
                    "{shape} {mesh}, step {}: {a} and {b}",
                    step + 1
                );
            }
            let memory = &gpu.memory;
            assert!(
                memory.peak_activation_bytes_per_rank.iter().all(|bytes| *bytes > 0),
                "{memory:?}"
            );
        }
    }
}

/// Tensors of the device go through host memory where ranks are processes.
#[cfg(feature = "mpi")]
#[test]
fn processes_train_as_on_the_cpu() {
    let cpu = run("--device flex --ranks 1 --batch 2");
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-processes.json");
    let line = "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 61 --steps 10 --lr 0.01 --dropout 0.1 --timeout 60 \
                --engine mpi --device wgpu --ulysses 2 --batch 2 --report";
    let output = Command::new("mpirun")
        .args(["--oversubscribe", "--bind-to", "none", "-n", "2"])
        // Open MPI refuses root, as whom containers run, unless both are set.
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .arg(env!("CARGO_BIN_EXE_train-transformer"))
        .args(line.split_whitespace())
        .arg(&file)
        .output()
        .expect("mpirun is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let gpu: Report = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    for (a, b) in cpu.steps.iter().zip(&gpu.steps) {
        assert!(
            (a.loss - b.loss).abs() <= 1e-3 * a.loss,
            "step {}: {a:?} and {b:?}",
            a.step
        );
    }
    assert_eq!(gpu.memory.peak_bytes_per_rank.len(), 2);
}

#[test]
fn a_missing_driver_is_one_line() {
    let output = Command::new(env!("CARGO_BIN_EXE_train-transformer"))
        .args(["--device", "wgpu", "--steps", "1"])
        .env("VK_DRIVER_FILES", "/nowhere.json")
        .env("VK_ICD_FILENAMES", "/nowhere.json")
        // Nor OpenGL, which wgpu would take next.
        .env("__EGL_VENDOR_LIBRARY_FILENAMES", "/nowhere.json")
        .output()
        .unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert!(line.starts_with("error: --device wgpu: no adapter"), "{line}");
    assert_eq!(line.trim_end().lines().count(), 1, "{line}");
}

#[test]
fn space_and_time_on_the_device() {
    let run = |device: &str| {
        let line =
            format!("spatial-temporal --seq-len 48 --frames 6 --hidden 16 --heads 2 --steps 3 --ulysses 2 {device}");
        let flags: SpatialTemporalFlags = flags::parse(line.split_whitespace().map(OsString::from)).unwrap();
        let outcome = spatial_temporal::train(&flags.resolve().unwrap(), &Progress::quiet()).unwrap();
        outcome.report.steps.iter().map(|step| step.loss).collect::<Vec<_>>()
    };
    for (a, b) in run("--device flex").into_iter().zip(run("--device wgpu")) {
        assert!((a - b).abs() <= 1e-3 * a.abs(), "{a} and {b}");
    }
}

/// Trains, and samples with and without a window: the same pictures, up to what other kernels round.
#[test]
fn a_video_model_trains_as_on_the_cpu() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-video");
    std::fs::create_dir_all(&folder).unwrap();
    let run = |line: &str| {
        let tiny = "--hidden 32 --layers 2 --heads 2 --height 16 --frames 5 --steps 3 --sample-steps 2 --timeout 60";
        let samples = folder.join("samples");
        let line = format!("train-video-dit {tiny} --sample {} {line}", samples.display());
        let flags: VideoTrainFlags = flags::parse(line.split_whitespace().map(OsString::from)).unwrap();
        let report = train_video::train(&flags.resolve().unwrap(), &Progress::quiet()).unwrap();
        let losses = report.steps.iter().map(|step| step.loss).collect::<Vec<_>>();
        let sheet = image::open(samples.join("step-000003.png")).unwrap().into_rgb8();
        (losses, sheet.into_raw())
    };
    for (mode, mesh) in [
        ("--image-to-video --recompute blocks", "--ring 2"),
        ("--forcing diffusion --window 3 --sink 1", "--ulysses 2"),
    ] {
        let (cpu_losses, cpu_sheet) = run(&format!("{mode} --ranks 1"));
        let (losses, sheet) = run(&format!("{mode} --device wgpu {mesh}"));
        for (a, b) in cpu_losses.into_iter().zip(losses) {
            assert!((a - b).abs() <= 1e-3 * a.abs(), "{mode} {mesh}: {a} and {b}");
        }
        assert_eq!(cpu_sheet.len(), sheet.len());
        let worst = cpu_sheet.iter().zip(&sheet).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(worst <= Some(2), "{mode} {mesh}: the sheets differ by {worst:?} levels");
    }
}
