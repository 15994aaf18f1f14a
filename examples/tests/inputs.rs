//! Input that cannot work is refused in one line, before any rank starts; flags win over the configuration file.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use burn_sp::attention::KvMove;
use burn_sp_examples::config::TrainConfig;
use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::progress::Progress;
use burn_sp_examples::{InputError, RunError, train::train};

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("inputs").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn resolve(line: &str) -> Result<TrainConfig, InputError> {
    let arguments = std::iter::once("train-transformer").chain(line.split_whitespace());
    let flags: TrainFlags = flags::parse(arguments.map(OsString::from))?;
    let file = flags.run.config.clone();
    flags::with_file(flags, file.as_deref())?.resolve()
}

/// What the program says about a command line that cannot work.
fn refusal(line: &str) -> String {
    let error = resolve(line).expect_err(line).to_string();
    assert!(!error.contains('\n'), "{line}: more than one line: {error}");
    error
}

fn refusal_of_file(content: &str) -> String {
    let file = folder("file").join("run.json");
    fs::write(&file, content).unwrap();
    let error = refusal(&format!("--config {}", file.display()));
    assert!(error.contains("run.json"), "{error}");
    error
}

#[test]
fn what_flags_cannot_say() {
    for (line, expected) in [
        ("--seq-len 0", "--seq-len 0: give it at least 1"),
        ("--batch 0", "--batch 0"),
        ("--steps 0", "--steps 0"),
        ("--accumulate 0", "--accumulate 0"),
        ("--ranks 0", "--ranks 0"),
        ("--ulysses 0", "--ulysses 0"),
        ("--ranks 1000", "at most 256"),
        ("--timeout 0", "--timeout 0"),
        ("--lr 0", "--lr 0"),
        ("--lr NaN", "--lr NaN"),
        ("--clip -1", "--clip"),
        ("--kv all", "possible values: ring, gather"),
        ("--engine pigeons", "possible values: threads, mpi, nccl"),
        ("--device gpu", "possible values: flex, wgpu, cuda"),
        #[cfg(not(feature = "wgpu"))]
        (
            "--device wgpu",
            "--device wgpu: this program was built without it; build it with --features wgpu",
        ),
        #[cfg(not(feature = "cuda"))]
        (
            "--device cuda",
            "--device cuda: this program was built without it; build it with --features cuda",
        ),
        (
            "--ranks 3 --ulysses 2",
            "mesh: ulysses 2 needs 2 ranks, but 3 were given",
        ),
        ("--ranks 2 --dp 2 --ulysses 2", "dp 2 x ulysses 2 needs 4 ranks"),
        ("--dp 20 --ulysses 20", "at most 256"),
        ("--dp 3", "--batch 2 --dp 3: a rank would have no sequence"),
        (
            "--ulysses 4 --seq-len 3",
            "--seq-len 3 on 4 ranks (ulysses 4): a rank would have no token; use --seq-len 4",
        ),
        ("--ranks 4 --seq-len 3", "a rank would have no token"),
        (
            "--ring 2 --ulysses 2 --tp 2 --seq-len 7",
            "--seq-len 7 on 8 ranks (ring 2 x ulysses 2 x tp 2): a rank would have no token; use --seq-len 8",
        ),
        ("--hidden 256 --heads 6", "use --hidden 252 or 258"),
        ("--hidden 4 --heads 8", "use --hidden 8"),
        ("--heads 8 --kv-heads 3", "use one of [1, 2, 4, 8]"),
        ("--hidden 24 --heads 8", "head_dim 3 is odd"),
        ("--dropout 1", "dropout 1"),
        ("--seq-len many", "--seq-len"),
        (
            "--seq-len 10000000000",
            "--seq-len 10000000000: use at most 134,217,728 tokens",
        ),
        ("--seq-len 134217729 --ulysses 2", "at most 134,217,728 tokens"),
        ("--seq-length 5", "--seq-len"),
        ("--report /no/such/folder/report.json", "/no/such/folder is no folder"),
        (
            "--trace /no/such/folder/trace.json",
            "--trace /no/such/folder/trace.json: /no/such/folder is no folder",
        ),
        ("--trace /", "--trace /: that is a folder; name a file in it"),
        (
            "--trace a.json --report a.json",
            "--trace and --report name the same file; use two",
        ),
        ("--config /no/such/file.json", "/no/such/file.json"),
        (
            "--tokenizer /no/such.json",
            "--tokenizer /no/such.json: No such file or directory",
        ),
        ("--tokens /no/such", "--tokens /no/such could not be read: No such file"),
        ("--pack", "--pack: give --tokenizer or --tokens too, or leave it out"),
        ("--held-out a", "--held-out: give --tokenizer or --tokens too"),
        ("--eos </s>", "--eos: give --tokenizer too, or leave it out"),
        ("--document-separator --", "--document-separator: give --tokenizer too"),
    ] {
        let error = refusal(line);
        assert!(error.contains(expected), "{line}: {error}");
    }
}

#[test]
fn what_a_configuration_file_cannot_say() {
    let error = refusal_of_file(r#"{"seq_length": 5}"#);
    assert!(
        error.contains("unknown field \"seq_length\"") && error.contains("seq_len"),
        "{error}"
    );
    let error = refusal_of_file(r#"{"steps": "many"}"#);
    assert!(error.contains("steps") && error.contains("many"), "{error}");
    let error = refusal_of_file(r#"{"shape": "bert"}"#);
    assert!(error.contains("shape") && error.contains("gpt2"), "{error}");
    assert!(refusal_of_file("[1]").contains("not a JSON object"));
    assert!(refusal_of_file("{").contains("not a JSON object"));
    // A field of the report, no flag.
    assert!(refusal_of_file(r#"{"report": "a.json"}"#).contains("unknown field"));
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let file = folder("precedence").join("run.json");
    fs::write(
        &file,
        r#"{"seq_len": 100, "steps": 3, "lr": 0.5, "shape": "gpt2", "text": ["a", "b"], "ring": 2, "kv": "gather"}"#,
    )
    .unwrap();
    let config = resolve(&format!("--config {} --steps 5 --text c", file.display())).unwrap();
    assert_eq!((config.run.seq_len, config.run.steps, config.run.batch), (100, 5, 2));
    assert_eq!(config.text, Some(vec![PathBuf::from("c")]));
    assert_eq!((config.learning.lr, config.run.ring, config.run.ranks), (0.5, 2, 2));
    assert_eq!((config.hidden, config.ffn), (256, 1024));
}

#[test]
fn a_configuration_survives_the_way_through_a_file() {
    let config = resolve("--ranks 4 --hidden 64 --heads 4 --dropout 0.1 --seed 18446744073709551615").unwrap();
    assert!(config.run.chosen.is_some());
    let file = folder("again").join("run.json");
    fs::write(&file, serde_json::to_string(&config).unwrap()).unwrap();
    let mut again = resolve(&format!("--config {}", file.display())).unwrap();
    // A mesh from a file is given, not chosen.
    assert_eq!(again.run.chosen, None);
    again.run.chosen = config.run.chosen.clone();
    assert_eq!(again, config);
}

#[test]
fn with_no_flags_two_ranks_share_the_tokens() {
    let config = resolve("").unwrap();
    assert_eq!((config.run.ranks, config.run.ulysses), (2, 2));
    assert_eq!(
        resolve("--ulysses 2").unwrap().run.mesh_line(),
        "mesh: ulysses 2 (as given)"
    );
}

#[test]
fn a_mesh_for_the_ranks_is_chosen_and_explained() {
    for (line, expected) in [
        ("--ranks 1", "mesh: one rank (chosen: nothing to split)"),
        (
            "--ranks 4",
            "mesh: ulysses 4 (chosen: 8 heads split evenly; it sends 3.0 MiB a layer, rank and step, the next best, \
             ring 2 x ulysses 2, 5.0 MiB)",
        ),
        // Of a step, so of all its micro-steps.
        (
            "--ranks 4 --batch 1 --accumulate 4",
            "mesh: ulysses 4 (chosen: 8 heads split evenly; it sends 6.0 MiB a layer, rank and step",
        ),
        ("--ranks 5", "mesh: ring 5 (chosen: it sends"),
        (
            "--ranks 4 --hidden 96 --heads 6",
            "mesh: ring 2 x ulysses 2 (chosen: 6 heads split evenly",
        ),
        ("--ranks 8 --kv-heads 1", "mesh: ring 8 (chosen: it sends"),
    ] {
        let config = resolve(line).unwrap().run;
        assert!(
            config.mesh_line().starts_with(expected),
            "{line}: {}",
            config.mesh_line()
        );
        assert_eq!(config.mesh().ranks(), config.ranks);
    }
}

#[test]
fn keys_and_values_travel_unless_they_are_gathered() {
    for (line, expected) in [
        ("--ring 2", KvMove::Ring),
        ("--ring 2 --kv ring", KvMove::Ring),
        ("--ring 2 --kv gather", KvMove::Gather),
        // It is there for a ring that may be chosen.
        ("--ranks 5 --kv gather", KvMove::Gather),
    ] {
        assert_eq!(resolve(line).unwrap().run.kv_move(), expected, "{line}");
    }
}

/// What training says about a text.
fn refusal_of_text(paths: &[&Path], seq_len: usize) -> String {
    let mut config = resolve(&format!("--seq-len {seq_len}")).unwrap();
    config.text = Some(paths.iter().map(|path| path.to_path_buf()).collect());
    let error = train(&config, &Progress::quiet()).unwrap_err();
    assert!(matches!(error, RunError::Input(_)) && error.exit_code() == 2);
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn texts_that_cannot_be_learned_from() {
    let folder = folder("texts");
    let file = |name: &str, content: &[u8]| {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    };
    assert!(refusal_of_text(&[&folder.join("missing.txt")], 10).contains("missing.txt"));
    assert!(refusal_of_text(&[&file("binary", &[0xff, 0xfe])], 10).contains("not UTF-8"));
    assert!(refusal_of_text(&[&file("empty", b"")], 10).contains("there is none"));
    file("hidden/.git/config", b"hidden");
    file("hidden/target/out", b"built");
    assert!(refusal_of_text(&[&folder.join("hidden")], 10).contains("there is none"));
    let short = file("short", &[b'x'; 100]);
    let error = refusal_of_text(&[&short], 90);
    assert!(error.contains("--seq-len 89 at most"), "{error}");
}
