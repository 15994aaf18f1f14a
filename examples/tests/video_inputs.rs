//! Input that the video program cannot work with is refused in one line, before any rank starts.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use burn_sp_examples::flags;
use burn_sp_examples::progress::Progress;
use burn_sp_examples::train_video::{VideoTrainConfig, VideoTrainFlags, train};
use burn_sp_examples::video::Picture;
use burn_sp_examples::{InputError, RunError};
use image::RgbImage;

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("video_inputs").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn resolve(line: &str) -> Result<VideoTrainConfig, InputError> {
    let arguments = std::iter::once("train-video-dit").chain(line.split_whitespace());
    let flags: VideoTrainFlags = flags::parse(arguments.map(OsString::from))?;
    let file = flags.run.config.clone();
    flags::with_file(flags, file.as_deref())?.resolve()
}

/// What the program says about a command line that cannot work.
#[track_caller]
fn refusal(line: &str) -> String {
    let error = resolve(line).expect_err(line).to_string();
    assert!(!error.contains('\n'), "{line}: more than one line: {error}");
    error
}

#[test]
fn what_flags_cannot_say() {
    let folder = folder("flags");
    let file = folder.join("file");
    fs::write(&file, "no folder").unwrap();
    let file = format!("--sample {}", file.display());
    let missing = format!("--sample {}", folder.join("no/samples").display());
    let sample = format!("--sample {}", folder.join("samples").display());
    let too_few = format!("{sample} --dp 2 --samples 1");
    for (line, expected) in [
        ("--frames 0", "--frames 0: give it at least 1"),
        ("--block 0", "--block 0: give it at least 1"),
        ("--patch 0", "--patch 0: give it at least 1"),
        ("--height 0", "--height 0: give it at least 1"),
        ("--width 0", "--width 0: give it at least 1"),
        ("--hidden 0", "--hidden 0"),
        ("--layers 0", "--layers 0"),
        ("--heads 0", "--heads 0"),
        ("--ffn 0", "--ffn 0"),
        ("--text-tokens 0", "--text-tokens 0"),
        ("--text-dim 0", "--text-dim 0"),
        ("--samples 0", "--samples 0"),
        ("--sample-frames 0", "--sample-frames 0"),
        ("--sample-steps 0", "--sample-steps 0"),
        ("--fps 0", "--fps 0"),
        ("--steps 0", "--steps 0"),
        ("--lr 0", "--lr 0"),
        (
            "--height 33",
            "--height 33: tokens are squares of 4 pixels (--patch); use --height 36",
        ),
        ("--width 30 --patch 8", "squares of 8 pixels (--patch); use --width 32"),
        (
            "--heads 3",
            "--hidden 128 --heads 3: a head must have an even number of elements; use --hidden 132",
        ),
        ("--heads 128", "use --hidden 256"),
        (
            "--forcing diffusion --window 1",
            "--window 1 --sink 0 --block 2: a block and the sink do not fit into the window; use --window 2",
        ),
        ("--forcing diffusion --window 3 --sink 2", "use --window 4"),
        // In training it is not asked, but in sampling.
        ("--window 1", "use --window 2"),
        ("--window 0 --block 1", "use --window 1"),
        ("--shift 0", "--shift 0: use one above 0"),
        ("--shift -1", "--shift -1: use one above 0"),
        ("--shift inf", "--shift inf"),
        ("--text-dropout 2", "--text-dropout 2: use 0 to 1"),
        ("--text-dropout -0.1", "use 0 to 1"),
        ("--text-dropout NaN", "use 0 to 1"),
        ("--guidance NaN", "--guidance NaN: use 1, or above"),
        ("--guidance inf", "--guidance inf"),
        ("--forcing student", "possible values: teacher, diffusion"),
        ("--solver heun", "possible values: euler, unipc"),
        ("--sample-every 0", "--sample-every 0: use at least 1, or leave it out"),
        (&file, "that is a file; name a folder"),
        (&missing, "is no folder; make it first"),
        (
            &too_few,
            "--samples 1 --dp 2: a rank would have no sample; use --samples 2",
        ),
        (
            "--seq-len 100",
            "--seq-len 100: what is trained on has 1024 tokens, by --frames, --height, --width, --patch and --forcing; \
             leave it out",
        ),
        (
            "--forcing diffusion --seq-len 1024",
            "what is trained on has 512 tokens",
        ),
        ("--batch 1 --dp 2", "--batch 1 --dp 2: a rank would have no sequence"),
        ("--dp 0", "--dp 0"),
        ("--ranks 3 --ulysses 2", "needs 2 ranks, but 3 were given"),
        (
            "--frames 1 --height 4 --forcing diffusion --ulysses 2",
            "2 ranks share 1 tokens (ulysses 2): a rank would have none; use fewer ranks",
        ),
        (
            "--frames 1048576 --height 64",
            "at most work, so use fewer frames or a larger --patch",
        ),
        ("--frames 100000000", "--frames 100000000: use at most 1048576"),
        ("--frames 18446744073709551615", "use at most 1048576"),
        ("--hidden 18446744073709551615", "use at most 1048576"),
        ("--sink 2", "--sink 2: without a window all frames stay visible"),
        (
            "--image-to-video --frames 1",
            "--image-to-video --frames 1: the only frame is given",
        ),
        ("--frame 5", "--frame"),
        ("--report /no/such/folder/report.json", "/no/such/folder is no folder"),
        ("--config /no/such/file.json", "/no/such/file.json"),
    ] {
        let error = refusal(line);
        assert!(error.contains(expected), "{line}: {error}");
    }
    assert!(resolve(&sample).is_ok());
    assert!(resolve("--seq-len 1024").is_ok());
}

/// What training says before any rank starts.
#[track_caller]
fn refusal_of_training(line: &str) -> String {
    let config = resolve(line).unwrap();
    let error = train(&config, &Progress::quiet()).unwrap_err();
    assert!(
        matches!(error, RunError::Input(_)) && error.exit_code() == 2,
        "{line}: {error}"
    );
    let error = error.to_string();
    assert!(!error.contains('\n'), "{line}: {error}");
    error
}

#[test]
fn videos_that_cannot_be_learned_from() {
    let folder = folder("videos");
    let path = |name: &str| folder.join(name).display().to_string();
    fs::create_dir(folder.join("empty")).unwrap();
    let clip = folder.join("short");
    fs::create_dir(&clip).unwrap();
    for frame in 0..5 {
        let picture = RgbImage::from(Picture::draw([8, 8], |_, _| [9; 3]));
        picture.save(clip.join(format!("{frame}.png"))).unwrap();
    }
    for (line, words) in [
        (
            format!("--video {}", path("missing.y4m")),
            ["missing.y4m", "No such file"],
        ),
        (
            format!("--video {}", path("empty")),
            ["empty", "no videos and no pictures are in it"],
        ),
        (
            format!("--video {} --frames 6", path("short")),
            [
                "no clip has a window of 6 frames",
                "the longest of 1 has 5; ask for 1 to 5",
            ],
        ),
        (
            "--frames 10001 --height 4".into(),
            ["the longest of 1 has 10000", "ask for 1 to 10000"],
        ),
    ] {
        let error = refusal_of_training(&line);
        assert!(words.iter().all(|words| error.contains(words)), "{line}: {error}");
    }
}

#[test]
fn weights_that_cannot_be_started_from() {
    let folder = folder("weights");
    let file = |name: &str, content: &[u8]| {
        let file = folder.join(name);
        fs::write(&file, content).unwrap();
        format!("--weights {}", file.display())
    };
    let missing = format!("--weights {}", folder.join("missing.safetensors").display());
    let none = safetensors::serialize(Vec::<(&str, safetensors::tensor::TensorView)>::new(), None).unwrap();
    for (line, words) in [
        (missing, ["--weights", "missing.safetensors: No such file"]),
        (
            file("text.safetensors", b"no weights"),
            ["--weights", "text.safetensors: "],
        ),
        (file("none.safetensors", &none), ["--weights: ", "weight"]),
    ] {
        let error = refusal_of_training(&line);
        assert!(words.iter().all(|words| error.contains(words)), "{line}: {error}");
    }
}

#[test]
fn what_a_configuration_file_cannot_say() {
    let file = folder("file").join("run.json");
    let refusal = |content: &str| {
        fs::write(&file, content).unwrap();
        let error = refusal(&format!("--config {}", file.display()));
        assert!(error.contains("run.json"), "{error}");
        error
    };
    let error = refusal(r#"{"frame": 5}"#);
    assert!(
        error.contains("unknown field \"frame\"") && error.contains("frames"),
        "{error}"
    );
    let error = refusal(r#"{"frames": "many"}"#);
    assert!(error.contains("frames") && error.contains("many"), "{error}");
    let error = refusal(r#"{"forcing": "student"}"#);
    assert!(error.contains("forcing") && error.contains("diffusion"), "{error}");
}

#[test]
fn a_configuration_survives_the_way_through_a_file() {
    for line in [
        "",
        "--ranks 4 --forcing diffusion --window 5 --sink 1 --block 3 --shift 3.5 --text-dropout 0.1 --guidance 2.5 \
         --video a.mp4 b --frames 7 --height 24 --width 40 --patch 8 --solver euler --sample-every 3 --sample-frames 9 \
         --weights c d --seed 18446744073709551615",
        "--dp 2 --ring 2 --image-to-video --accumulate 3 --shard parameters --samples 5 --fps 24",
    ] {
        let config = resolve(line).unwrap();
        let file = folder("again").join("run.json");
        fs::write(&file, serde_json::to_string(&config).unwrap()).unwrap();
        let mut again = resolve(&format!("--config {}", file.display())).unwrap();
        // A mesh from a file is given, not chosen.
        assert_eq!(again.run.chosen, None);
        again.run.chosen = config.run.chosen.clone();
        assert_eq!(again, config, "{line}");
    }
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let file = folder("precedence").join("run.json");
    fs::write(
        &file,
        r#"{"frames": 6, "height": 16, "forcing": "diffusion", "samples": 3}"#,
    )
    .unwrap();
    let config = resolve(&format!("--config {} --frames 4", file.display())).unwrap();
    assert_eq!((config.frames, config.height, config.width), (4, 16, 16));
    assert_eq!((config.samples, config.sample_frames, config.patch), (3, 4, 4));
    assert_eq!(config.run.seq_len, 4 * 16);
}

#[test]
fn with_no_flags_two_ranks_share_the_tokens() {
    let config = resolve("").unwrap();
    assert_eq!((config.run.ranks, config.run.batch, config.samples), (2, 1, 2));
    // Clean and noisy: 8 frames of 8 x 8 tokens.
    assert_eq!(config.run.seq_len, 2 * 8 * 64);
    assert_eq!(config.run.dp, 1);
    // One sample for each rank of dp at least.
    let config = resolve("--dp 3").unwrap();
    assert_eq!((config.run.batch, config.samples), (3, 3));
}
