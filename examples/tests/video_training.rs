//! A few steps of a tiny video model: the same losses and samples on every mesh, from the rendered scene and from files, and
//! a report that says all it should.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use burn_sp_examples::flags;
use burn_sp_examples::memory::Tracking;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::Report;
use burn_sp_examples::summary::summary;
use burn_sp_examples::train_video::{VideoTrainFlags, train};
use burn_sp_examples::video::{Footage, Picture, write_video};
use image::RgbImage;

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

/// The allocator's account of a rank belongs to the process: runs come one after another.
static ALONE: Mutex<()> = Mutex::new(());

/// 5 frames of 4 tokens, no multiple of a block, nor of 2 or 4 ranks; 3 samples.
const TINY: &str = "--hidden 32 --layers 2 --heads 2 --height 16 --patch 8 --frames 5 --steps 20 --lr 0.01 --batch 2 \
                    --samples 3 --sample-steps 4 --timeout 60";

const MESHES: [&str; 6] = [
    "--ulysses 2",
    "--ring 2",
    "--ring 4",
    "--ring 2 --ulysses 2",
    "--dp 2",
    "--tp 2",
];

fn run(line: &str) -> Report {
    let line = format!("train-video-dit {TINY} {line}");
    let flags: VideoTrainFlags = flags::parse(line.split_whitespace().map(OsString::from)).unwrap();
    let file = flags.run.config.clone();
    let config = flags::with_file(flags, file.as_deref()).unwrap().resolve().unwrap();
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    train(&config, &Progress::quiet()).unwrap()
}

fn losses(report: &Report) -> Vec<f64> {
    report.steps.iter().map(|step| step.loss).collect()
}

#[track_caller]
fn agree(one: &Report, other: &Report, what: &str) {
    assert_eq!(one.steps.len(), other.steps.len(), "{what}");
    for (one, other) in one.steps.iter().zip(&other.steps) {
        for (one, other) in [(one.loss, other.loss), (one.grad_norm, other.grad_norm)] {
            assert!((one - other).abs() <= 1e-4 * one.abs(), "{what}: {one} and {other}");
        }
    }
}

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("video_training").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn losses_do_not_depend_on_the_mesh() {
    for mode in ["--forcing teacher", "--forcing diffusion", "--image-to-video"] {
        let one = run(&format!("{mode} --ranks 1"));
        let all = losses(&one);
        // Targets are noise minus pixels, and the first velocity is 0.
        assert!(all[0] > 0.5, "{mode}: {all:?}");
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(mean(&all[15..]) < mean(&all[..5]), "{mode}: {all:?}");
        for mesh in MESHES {
            let other = run(&format!("{mode} {mesh}"));
            agree(&one, &other, &format!("{mode} {mesh}"));
            let [whole, part] = [&one, &other].map(|report| report.memory.parameter_bytes_per_rank[0]);
            assert_eq!(part < whole, mesh.contains("--tp"), "{mesh}: {part} of {whole} bytes");
        }
    }
}

/// What saves memory changes no loss; micro-steps are the same on every mesh.
#[test]
fn losses_do_not_depend_on_memory() {
    let one = run("--steps 10 --ranks 1");
    for memory in [
        "--recompute blocks",
        "--recompute all-but-attention --mlp-tiles 3",
        "--shard parameters",
        "--shard optimizer",
    ] {
        for mesh in ["--ulysses 2", "--ring 2 --ulysses 2", "--dp 2", "--tp 2"] {
            let line = format!("--steps 10 {memory} {mesh}");
            agree(&one, &run(&line), &line);
        }
    }
    let one = run("--steps 10 --accumulate 2 --ranks 1");
    for mesh in MESHES {
        let line = format!("--steps 10 --accumulate 2 {mesh}");
        let other = run(&line);
        agree(&one, &other, &line);
        assert_eq!(one.steps[0].tokens, other.steps[0].tokens);
    }
}

/// What a run writes, and its report.
fn sampled(name: &str, line: &str) -> (PathBuf, Report) {
    let folder = folder(name).join("samples");
    let report = run(&format!("{line} --sample {}", folder.display()));
    (folder, report)
}

/// The contact sheet of a step: 3 clips and their samples, each picture of 16 x 16 pixels, 8 times enlarged, with gaps of 2.
fn sheet(folder: &Path, step: usize, columns: u32) -> RgbImage {
    let sheet = image::open(folder.join(format!("step-{step:06}.png"))).unwrap();
    let size = (columns * 130 - 2, 6 * 130 - 2);
    assert_eq!((sheet.width(), sheet.height()), size);
    sheet.into_rgb8()
}

/// The picture in a row and a column of a sheet.
fn cell(sheet: &RgbImage, row: u32, column: u32) -> Vec<u8> {
    let cell = image::imageops::crop_imm(sheet, column * 130, row * 130, 128, 128);
    cell.to_image().into_raw()
}

#[test]
fn samples_are_written_when_they_are_due() {
    let (folder, _) = sampled("due", "--ulysses 2 --steps 5 --sample-every 2");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let video = names[0].rsplit_once('.').unwrap().1;
    assert!(["mp4", "y4m"].contains(&video), "{names:?}");
    // After every other step, and the last.
    let expected = [2, 4, 5].map(|step| {
        let clips = [1, 2, 3].map(|clip| format!("step-{step:06}-{clip}.{video}"));
        clips.into_iter().chain([format!("step-{step:06}.png")])
    });
    assert_eq!(names, expected.into_iter().flatten().collect::<Vec<_>>());
    let clip = Footage::open(&folder.join(&names[0])).unwrap();
    assert_eq!(clip.frames(), 5);

    // Each is another, and changes as the model learns.
    let first = sheet(&folder, 2, 5);
    assert_ne!(cell(&first, 1, 1), cell(&first, 3, 1));
    assert_ne!(cell(&first, 1, 1), cell(&sheet(&folder, 5, 5), 1, 1));
    // Above them are clips of the data, always the same.
    assert_eq!(cell(&first, 0, 1), cell(&sheet(&folder, 5, 5), 0, 1));
}

#[test]
fn samples_do_not_depend_on_the_mesh() {
    for (mode, frames) in [
        ("--forcing teacher", 5),
        ("--forcing diffusion --window 4 --sink 1 --sample-frames 7", 7),
        ("--image-to-video", 5),
        ("--text-dropout 0.3 --guidance 2", 5),
    ] {
        let at = |name: &str, mesh: &str| sampled(name, &format!("{mode} --steps 5 {mesh}"));
        let (folder, one) = at("one", "--ranks 1");
        let whole = sheet(&folder, 5, frames);
        // A frame that is given is kept to the bit.
        let given = [0, 2, 4].map(|clip| cell(&whole, clip, 0) == cell(&whole, clip + 1, 0));
        assert_eq!(given, [mode == "--image-to-video"; 3], "{mode}");
        for mesh in ["--ring 2 --ulysses 2", "--dp 2", "--tp 2"] {
            let (folder, many) = at("many", mesh);
            agree(&one, &many, &format!("{mode} {mesh}"));
            let many = sheet(&folder, 5, frames).into_raw();
            let off = whole.iter().zip(&many).map(|(one, many)| one.abs_diff(*many)).max();
            assert!(off <= Some(1), "{mode} {mesh}: {off:?} levels");
        }
    }
}

/// Operations, axes, calls and bytes, by rank.
fn traffic(report: &Report) -> Vec<(usize, &str, &str, u64, u64)> {
    let counters = report.communication.iter();
    counters
        .map(|counter| {
            let (op, axis) = (counter.op.as_str(), counter.axis.as_str());
            (counter.rank, op, axis, counter.calls, counter.bytes_sent)
        })
        .collect()
}

#[test]
fn the_report_is_whole() {
    let folder = folder("report");
    let plain = run("--ring 2 --ulysses 2 --steps 5");
    let (_, sampled) = sampled("report_samples", "--ring 2 --ulysses 2 --steps 5 --sample-every 2");
    // Samples change no loss, and their traffic does not count.
    assert_eq!(losses(&plain), losses(&sampled));
    assert_eq!(traffic(&plain), traffic(&sampled));

    assert_eq!((plain.program.as_str(), plain.ranks), ("train-video-dit", 4));
    assert_eq!((plain.mesh.ring, plain.mesh.ulysses), (2, 2));
    assert_eq!(plain.validation_loss, None);
    // Both copies of 20 tokens, of two samples.
    assert!(plain.steps.iter().all(|step| step.tokens == 80 && step.grad_norm > 0.0));
    let memory = &plain.memory;
    let parameters = memory.parameter_bytes_per_rank[0];
    for rank in 0..4 {
        assert!(memory.peak_activation_bytes_per_rank[rank] > 10_000, "{memory:?}");
        // Weights, moments and gradients, beside the activations.
        assert!(memory.peak_bytes_per_rank[rank] > 4 * parameters, "{memory:?}");
        assert!(memory.bucket_bytes_per_rank[rank] > 0, "{memory:?}");
        for (op, axis) in [("all_to_all", "ulysses"), ("shift", "ring")] {
            let mut counters = plain.communication.iter();
            let sent = counters.any(|counter| {
                let name = (counter.rank, counter.op.as_str(), counter.axis.as_str());
                name == (rank, op, axis) && counter.bytes_sent > 0
            });
            assert!(sent, "rank {rank}, {op}: {:?}", plain.communication);
        }
    }
    let text = summary(&plain);
    for words in ["peak memory a rank", "tokens/s", "all_to_all", "loss, step 5"] {
        assert!(text.contains(words), "{words}: {text}");
    }

    // Its configuration is a run of the same numbers, to the bit.
    let file = folder.join("run.json");
    fs::write(&file, serde_json::to_string(&sampled.config).unwrap()).unwrap();
    let flags = flags::parse(["train-video-dit", "--config", file.to_str().unwrap()].map(OsString::from));
    let flags: VideoTrainFlags = flags::with_file(flags.unwrap(), Some(&file)).unwrap();
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let again = train(&flags.resolve().unwrap(), &Progress::quiet()).unwrap();
    assert_eq!(losses(&again), losses(&plain));
    assert_eq!(again.config, sampled.config);
}

/// A clip of one grey a frame, each brighter than the last, as Y4M and as PNG, which are the same pixels; and its captions.
fn greys(folder: &Path) -> [PathBuf; 2] {
    let (file, pictures) = (folder.join("clip.y4m"), folder.join("clip"));
    fs::create_dir(&pictures).unwrap();
    let mut y4m = b"YUV4MPEG2 W24 H16 F8:1 Cmono XCOLORRANGE=FULL\n".to_vec();
    for frame in 0..9u8 {
        let level = 20 + 25 * frame;
        y4m.extend(b"FRAME\n");
        y4m.extend([level; 24 * 16]);
        let picture = RgbImage::from(Picture::draw([16, 24], |_, _| [level; 3]));
        picture.save(pictures.join(format!("{frame}.png"))).unwrap();
    }
    fs::write(&file, y4m).unwrap();
    say(folder, "dark grey\nlight grey\n");
    [file, pictures]
}

fn say(folder: &Path, captions: &str) {
    for file in ["clip.txt", "clip/caption.txt"] {
        fs::write(folder.join(file), captions).unwrap();
    }
}

#[test]
fn files_are_learnt_from() {
    let folder = folder("files");
    let [y4m, pictures] = greys(&folder);
    let on = |video: &Path, mesh: &str| run(&format!("--video {} --steps 10 {mesh}", video.display()));
    let one = on(&y4m, "--ranks 1");
    // The same pixels and words: the same bits.
    assert_eq!(losses(&one), losses(&on(&pictures, "--ranks 1")));
    assert_ne!(losses(&one), losses(&run("--steps 10 --ranks 1")));
    for mesh in ["--ulysses 2", "--ring 4", "--dp 2", "--tp 2"] {
        for video in [&y4m, &pictures] {
            agree(&one, &on(video, mesh), &format!("{} {mesh}", video.display()));
        }
    }
    // Both at once, out of their folder.
    let one = on(&folder, "--ranks 1");
    agree(&one, &on(&folder, "--ring 2"), "a folder of both");

    // Captions are read: the first velocity is 0 whatever they say, later ones depend on them.
    let one = losses(&on(&y4m, "--ranks 1"));
    say(&folder, "something else\n");
    let other = losses(&on(&y4m, "--ranks 1"));
    assert_eq!(one[0], other[0]);
    assert_ne!(one[9], other[9]);
}

/// The writer's own videos: an MP4 where there is ffmpeg, else a Y4M.
#[test]
fn what_was_written_is_learnt_from() {
    let folder = folder("written");
    let scene = Footage::scene(12).read(0..12, [16, 16]).unwrap();
    let file = write_video("--video", &folder.join("scene"), &scene, 8).unwrap();
    let video = format!("--video {} --steps 5", file.display());
    let one = run(&format!("{video} --ranks 1"));
    agree(&one, &run(&format!("{video} --ulysses 2")), &video);
}

#[test]
fn ffmpegs_test_pictures_are_learnt_from() {
    let file = folder("ffmpeg").join("test.mkv");
    let source = "testsrc=size=40x32:rate=8:duration=2";
    let made = Command::new("ffmpeg")
        .args(["-v", "error", "-f", "lavfi", "-i", source])
        .arg(&file)
        .status();
    match made {
        Ok(status) => assert!(status.success()),
        Err(error) => return println!("skipped: no ffmpeg ({error})"),
    }
    fs::write(file.with_extension("txt"), "a test picture").unwrap();
    let video = format!("--video {} --steps 5", file.display());
    let one = run(&format!("{video} --ranks 1"));
    for mesh in ["--ulysses 2", "--ring 2 --ulysses 2"] {
        agree(&one, &run(&format!("{video} {mesh}")), &format!("testsrc {mesh}"));
    }
}

/// A folder as diffusers writes it, of a tiny VAE: 5 latent frames are 17 of the video, read and encoded by slices.
#[test]
fn latents_of_a_vae_do_not_depend_on_the_mesh() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/vae");
    let facts: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(fixtures.join("vae.json")).unwrap()).unwrap();
    let folder = folder("vae");
    let vae = folder.join("vae");
    fs::create_dir(&vae).unwrap();
    fs::write(vae.join("config.json"), facts["models"]["wan21"]["config"].to_string()).unwrap();
    let weights = "diffusion_pytorch_model.safetensors";
    fs::copy(fixtures.join("wan21.weights.safetensors"), vae.join(weights)).unwrap();

    let run = |mesh: &str, samples: &Path| {
        let line = format!(
            "--vae {} --width 32 --patch 2 --image-to-video --steps 4 --sample {} --sample-every 2 {mesh}",
            vae.display(),
            samples.display()
        );
        let report = run(&line);
        let sheet = image::open(samples.join("step-000004.png")).unwrap();
        (report, sheet.into_rgb8())
    };
    let (one, sheet) = run("--ranks 1", &folder.join("one"));
    for mesh in ["--ulysses 2", "--ring 2", "--ulysses 4", "--dp 2 --ulysses 2", "--tp 2"] {
        let (other, other_sheet) = run(mesh, &folder.join("other"));
        agree(&one, &other, mesh);
        assert_eq!(sheet.dimensions(), other_sheet.dimensions());
        let mut bytes = sheet.as_raw().iter().zip(other_sheet.as_raw());
        assert!(bytes.all(|(one, other)| one.abs_diff(*other) <= 1), "{mesh}");
    }
    // The sheet shows 8 of 17 frames, of 3 clips and 3 samples, in pictures of 16 x 32 pixels made 8 times as large.
    let (columns, rows) = (8, 6);
    assert_eq!(
        sheet.dimensions(),
        (columns * 256 + (columns - 1) * 2, rows * 128 + (rows - 1) * 2)
    );
}

/// Parameters are gathered for the cached model too.
#[test]
fn shared_out_parameters_make_the_same_samples() {
    let folder = folder("shared_samples");
    let sheet = |name: &str, line: &str| {
        let samples = folder.join(name);
        run(&format!("--steps 4 --sample {} {line}", samples.display()));
        image::open(samples.join("step-000004.png")).unwrap().into_rgb8()
    };
    let one = sheet("one", "--ranks 1");
    let shared = sheet("shared", "--ulysses 2 --shard parameters");
    let mut bytes = one.as_raw().iter().zip(shared.as_raw());
    assert!(bytes.all(|(one, other)| one.abs_diff(*other) <= 1));
}

/// A picture that is damaged behind its header: whoever meets it ends all ranks, with the reason.
#[test]
fn a_clip_that_goes_bad_ends_all_ranks() {
    let folder = folder("damaged");
    let clip = folder.join("clip");
    fs::create_dir(&clip).unwrap();
    for frame in 0..5 {
        let picture = RgbImage::from(Picture::draw([16, 16], |row, column| [row as u8, column as u8, frame]));
        picture.save(clip.join(format!("{frame}.png"))).unwrap();
    }
    // The last frame, which the first of two ranks does not read.
    let last = clip.join("4.png");
    let bytes = fs::read(&last).unwrap();
    fs::write(&last, &bytes[..bytes.len() / 2]).unwrap();
    let line = format!(
        "train-video-dit {TINY} --forcing diffusion --ulysses 2 --video {}",
        clip.display()
    );
    let flags: VideoTrainFlags = flags::parse(line.split_whitespace().map(OsString::from)).unwrap();
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let error = train(&flags.resolve().unwrap(), &Progress::quiet()).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    let error = error.to_string();
    assert!(error.contains("4.png") && error.contains("rank 1"), "{error}");
}
