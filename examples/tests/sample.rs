//! Going on from a prompt: the same text on every mesh, from a state that any mesh has saved and from Hugging Face folders.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn_sp::layout::MeshShape;
use burn_sp::train::{SavedState, StateInfo, StateStore};
use burn_sp::{LaunchConfig, launch_module};
use burn_sp_examples::RunError;
use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::progress::Progress;
use burn_sp_examples::sample::{SampleFlags, SampleReport, sample};
use burn_sp_examples::train::train;
use burn_sp_models::transformer::{HuggingFace, PositionKind, TransformerConfig};
use serde_json::Value;

const MESHES: [&str; 7] = [
    "--ranks 1",
    "--ulysses 2",
    "--ring 2",
    "--ring 2 --kv gather",
    "--tp 2",
    "--ring 2 --ulysses 2",
    "--ranks 3",
];

/// Bytes of a token's keys and values: 2 heads of 8 elements, 2 layers, f32.
const TOKEN: u64 = 2 * 2 * 8 * 2 * 4;

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sample").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn words() -> String {
    let words = (0..4000u64).map(|i| ["sun ", "moon ", "star ", "sky\n"][(i * i % 11 % 4) as usize]);
    words.collect()
}

/// Trains a tiny model and saves its state; returns the folder of the states.
fn trained(folder: &Path, line: &str) -> PathBuf {
    let (text, states) = (folder.join("text.txt"), folder.join("states"));
    fs::write(&text, words()).unwrap();
    let line = format!(
        "train-transformer --hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 40 --batch 2 --lr 0.01 --text {} --save {} \
         {line}",
        text.display(),
        states.display()
    );
    let flags: TrainFlags = flags::parse(line.split_whitespace().map(OsString::from)).unwrap();
    train(&flags.resolve().unwrap(), &Progress::quiet()).unwrap_or_else(|error| panic!("{error}"));
    states
}

/// What the program writes, and says of it. The prompt is the last flag, spaces and all.
fn written(line: &str, prompt: &str) -> Result<SampleReport, RunError> {
    let arguments = ["sample"].into_iter().chain(line.split_whitespace());
    let prompt = ["--prompt", prompt].map(OsString::from);
    let flags: SampleFlags = flags::parse(arguments.map(OsString::from).chain(prompt))?;
    let mut out = Vec::new();
    let report = sample(flags.resolve(&flags.run())?, &mut out)?;
    assert_eq!(String::from_utf8(out).unwrap(), report.text, "{line}");
    Ok(report)
}

/// The same on all meshes, and no more in any cache; returns that of one rank.
fn everywhere(line: &str, prompt: &str) -> SampleReport {
    let all = MESHES.map(|mesh| {
        let line = format!("{line} {mesh}");
        written(&line, prompt).unwrap_or_else(|error| panic!("{line}: {error}"))
    });
    for (other, mesh) in all[1..].iter().zip(&MESHES[1..]) {
        let same = |report: &SampleReport| (report.text.clone(), report.tokens.clone(), report.stopped);
        assert_eq!(same(other), same(&all[0]), "{line} {mesh}");
        assert_eq!(other.cache_bytes_per_rank.len(), other.mesh.ranks());
        let (one, most) = (all[0].cache_bytes_per_rank[0], other.cache_bytes_per_rank.iter().max());
        assert!(*most.unwrap() <= one, "{mesh}: {most:?}, {one} on one rank");
    }
    let [first, ..] = all;
    first
}

#[test]
fn a_trained_model_writes_the_same_on_every_mesh() {
    let folder = folder("bytes");
    let states = trained(&folder, "--steps 30 --ulysses 2");
    let from = format!("--from {}", states.display());
    for choice in [
        "--temperature 0",
        "--seed 5",
        "--seed 6 --temperature 0.8 --top-k 9 --top-p 0.9",
    ] {
        let report = everywhere(&format!("{from} --max-tokens 40 {choice}"), "moon st");
        assert_eq!((report.prompt_tokens, report.tokens.len()), (7, 40));
        // Letters of the four words, if it has learned anything.
        let added = report
            .text
            .strip_prefix("moon st")
            .expect("the prompt comes first")
            .trim_end();
        assert!(
            added.chars().all(|letter| " \nsunmotarky".contains(letter)),
            "{choice}: {added:?}"
        );
        // Room for 64 tokens.
        assert_eq!(report.cache_bytes_per_rank, [64 * TOKEN]);
    }
    let one = |line: &str| written(&format!("{from} --max-tokens 20 {line}"), "moon").unwrap().text;
    assert_eq!(one("--seed 5"), one("--seed 5"));
    let hot = |seed: usize| one(&format!("--temperature 4 --seed {seed}"));
    assert_ne!(hot(5), hot(6));
    assert_eq!(one("--seed 5"), one("--seed 5 --chunk 3 --ulysses 2"));
    assert_eq!(one("--temperature 0"), one("--top-k 1"));
    // A longer prompt is split over the ranks; each makes room for 64 of the tokens that come after it.
    let long = words()[..200].to_string();
    let bytes = |mesh: &str| {
        let report = written(&format!("{from} --max-tokens 3 {mesh}"), &long).unwrap();
        report.cache_bytes_per_rank
    };
    assert_eq!(bytes("--ranks 1"), [264 * TOKEN]);
    assert_eq!(bytes("--ulysses 2"), [100, 164].map(|tokens| tokens * TOKEN));
    assert_eq!(bytes("--ring 2"), [100, 164].map(|tokens| tokens * TOKEN));
    assert_eq!(bytes("--tp 2"), [264 * TOKEN / 2; 2]);
    // A state by its own name.
    let state = states.join("step-000030");
    let named = written(&format!("--from {} --max-tokens 20 --seed 5", state.display()), "moon").unwrap();
    assert_eq!(named.text, one("--seed 5"));
}

/// A window and learned positions, which end.
#[test]
fn a_model_goes_on_as_it_was_trained() {
    let folder = folder("gpt2");
    let states = trained(&folder, "--steps 3 --shape gpt2 --window 9 --tp 2");
    let report = everywhere(&format!("--from {} --temperature 0", states.display()), "sun moon");
    assert_eq!(
        report.tokens.len(),
        33,
        "8 tokens of the prompt, 40 positions, and a token after the last"
    );
    // 40 are too few to drop any.
    assert_eq!(report.cache_bytes_per_rank, [64 * TOKEN]);
    let more = written(&format!("--from {} --max-tokens 34", states.display()), "sun moon").unwrap_err();
    assert!(
        more.to_string().contains("the model knows 40; add 33 at most"),
        "{more}"
    );
}

/// A tokenizer of four words, and one for the end of a text.
fn tokenizer(folder: &Path) -> PathBuf {
    let file = folder.join("tokenizer.json");
    let json = r#"{
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null, "decoder": null,
        "added_tokens": [{"id": 5, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "sun": 1, "moon": 2, "star": 3, "sky": 4, "<end>": 5}}
    }"#;
    fs::write(&file, json).unwrap();
    file
}

#[test]
fn a_model_keeps_the_tokenizer_it_was_trained_with() {
    let folder = folder("tokens");
    let file = tokenizer(&folder);
    let states = trained(
        &folder,
        &format!("--steps 5 --tokenizer {} --eos <end> --ring 2", file.display()),
    );
    let from = format!("--from {} --max-tokens 30 --seed 3", states.display());
    let report = everywhere(&from, "sun moon");
    assert_eq!(report.prompt_tokens, 2);
    for word in report.text.split_whitespace() {
        assert!(
            ["?", "sun", "moon", "star", "sky"].contains(&word),
            "{word:?} in {:?}",
            report.text
        );
    }
    // Words come with the spaces between them.
    assert_eq!(
        report.text.split_whitespace().count(),
        2 + report.tokens.len(),
        "{:?}",
        report.text
    );
    assert!(report.stopped || report.tokens.len() == 30);
    assert!(!report.tokens.contains(&5));
}

#[test]
fn a_hugging_face_folder() {
    let folder = folder("llama");
    let mut config = TransformerConfig::llama(6, 16, 2, 4, 24);
    (config.kv_heads, config.init_std) = (2, 0.3);
    let model = burn_sp::seeded(&Device::flex(), 4, |device| config.init(device));
    let checkpoint = HuggingFace::new(&config).unwrap();
    checkpoint
        .save(&model, &folder)
        .unwrap_or_else(|error| panic!("{error}"));
    let from = format!("--from {}", folder.display());
    let error = written(&from, "sun").unwrap_err().to_string();
    assert!(
        error.contains("no tokenizer.json with the model; give --tokenizer FILE"),
        "{error}"
    );

    tokenizer(&folder);
    let long = everywhere(&format!("{from} --temperature 0 --max-tokens 12"), "sun sky moon");
    assert_eq!((long.prompt_tokens, long.tokens.len(), long.stopped), (3, 12, false));
    // The third token ends the text.
    let end = long.tokens[2];
    fs::write(
        folder.join("generation_config.json"),
        format!("{{\"eos_token_id\": [77, {end}]}}"),
    )
    .unwrap();
    let short = everywhere(&format!("{from} --temperature 0 --max-tokens 12"), "sun sky moon");
    let first = long.tokens.iter().position(|token| *token == end).unwrap();
    assert_eq!((short.tokens.as_slice(), short.stopped), (&long.tokens[..first], true));
}

/// Without a tokenizer, 256 entries are bytes: `train-transformer --export` writes such a folder. A state of that model, which
/// no flags make, says which it is, and writes the same.
#[test]
fn bytes_of_a_model_that_was_loaded() {
    let folder = folder("loaded");
    let mut config = TransformerConfig::llama(256, 32, 2, 4, 48);
    (config.kv_heads, config.init_std, config.epsilon) = (2, 0.3, 1e-3);
    config.positions = PositionKind::Rotary { theta: 50.0 };
    let model = burn_sp::seeded(&Device::flex(), 4, |device| config.init(device));
    let exported = folder.join("exported");
    let checkpoint = HuggingFace::new(&config).unwrap();
    checkpoint.save(&model, &exported).unwrap();
    let text = |folder: &Path| {
        let line = format!("--from {} --temperature 0 --max-tokens 30", folder.display());
        everywhere(&line, "sün").tokens
    };
    let expected = text(&exported);
    assert_eq!(expected.len(), 30);

    // States whose flags are those of another.
    let states = trained(&folder, "--steps 1 --ffn 48");
    let flags = SavedState::open(&states).unwrap().info().config.clone();
    let saved = |name: &str, own: Option<Value>| {
        let (states, mut info) = (folder.join(name), flags.clone());
        if let Some(own) = own {
            info["transformer"] = own;
        }
        save(&states, info, &model);
        states
    };
    let own = serde_json::to_value(&config).unwrap();
    assert_eq!(text(&saved("own", Some(own))), expected);
    assert_ne!(text(&saved("flags", None)), expected);
    let wrong = saved("wrong", Some("llama".into()));
    let error = refusal(&format!("--from {}", wrong.display()), "sun");
    assert!(
        error.contains("its configuration is none that this version reads"),
        "{error}"
    );
}

/// What the program says to these flags, in one line.
fn refusal(line: &str, prompt: &str) -> String {
    let error = written(line, prompt).expect_err(line);
    assert_eq!(error.exit_code(), 2, "{line}: {error}");
    let error = error.to_string();
    assert!(!error.contains('\n'), "{line}: {error}");
    error
}

/// Saves a state with this configuration.
fn save<M: Module>(states: &Path, config: Value, module: &M) {
    let launch = LaunchConfig::new(MeshShape::default());
    let launched = launch_module(&launch, &Device::flex(), module.clone(), |device, module| {
        let (step, seed, config) = (1, 1, config.clone());
        let store = StateStore::new(states, &device);
        store
            .save(&StateInfo { step, seed, config }, &module, &AdamWConfig::new().init())
            .unwrap();
    });
    launched.unwrap();
}

/// A state that some other program saved.
fn another_programs(folder: &Path) -> PathBuf {
    let states = folder.join("another");
    let linear = LinearConfig::new(2, 3).init(&Device::flex());
    save(&states, serde_json::json!({ "program": "another-program" }), &linear);
    states
}

#[test]
fn what_cannot_work_is_refused() {
    let folder = folder("refusals");
    let states = trained(&folder, "--steps 1 --ranks 1");
    let from = format!("--from {}", states.display());
    for (flags, expected) in [
        ("--max-tokens 0", "--max-tokens 0: give it at least 1"),
        ("--temperature -1", "temperature -1: use 0"),
        ("--temperature NaN", "temperature NaN: use 0"),
        ("--top-k 0", "top_k 0"),
        ("--top-p 0", "top_p 0: use a number above 0"),
        ("--top-p 1.5", "top_p 1.5"),
        ("--chunk 0", "chunk 0"),
        ("--ranks 0", "--ranks 0"),
        (
            "--ulysses 2 --ranks 3",
            "mesh: ulysses 2 needs 2 ranks, but 3 were given",
        ),
        ("--ranks 1000", "at most 256 ranks run"),
        ("--dp 2", "unexpected argument '--dp'"),
        ("--timeout 0", "--timeout 0"),
        ("--report /no/such/folder/report.json", "--report"),
        ("--prompt-file text", "--prompt and --prompt-file are both given"),
        (
            "--tokenizer /no/such/tokenizer.json",
            "--tokenizer /no/such/tokenizer.json",
        ),
    ] {
        let error = refusal(&format!("{from} {flags}"), "sun");
        assert!(error.contains(expected), "{flags}: {error}");
    }
    let error = refusal(&from, "");
    assert!(error.contains("a prompt of no tokens"), "{error}");
    let error = refusal("--from /no/such/folder", "sun");
    assert!(error.contains("--from /no/such/folder does not exist"), "{error}");
    let error = refusal(&format!("--from {}", folder.display()), "sun");
    assert!(error.contains("holds no training state"), "{error}");
    let error = refusal("--ranks 2", "sun");
    assert!(error.contains("--from <DIR>"), "{error}");

    // Another model, a state of another program, and one that is damaged.
    let other = folder.join("other");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("config.json"), r#"{"model_type": "bert"}"#).unwrap();
    let error = refusal(&format!("--from {}", other.display()), "sun");
    assert!(error.starts_with("--from ") && error.contains("bert"), "{error}");
    let error = refusal(&format!("--from {}", another_programs(&folder).display()), "sun");
    assert!(
        error.contains("another-program saved it; give a state of train-transformer"),
        "{error}"
    );
    let file = states.join("step-000001/state.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let error = refusal(&from, "sun");
    assert!(error.contains("step-000001 is damaged"), "{error}");
}

/// The program itself: text on stdout, all else on stderr.
#[test]
fn the_program_writes_to_stdout() {
    let folder = folder("program");
    let states = trained(&folder, "--steps 1 --ranks 1");
    let prompt = folder.join("prompt.txt");
    fs::write(&prompt, "sün").unwrap();
    let program = || {
        let mut program = Command::new(env!("CARGO_BIN_EXE_sample"));
        program
            .arg("--from")
            .arg(&states)
            .args(["--max-tokens", "5", "--timeout", "60"]);
        program
    };
    let report = folder.join("report.json");
    let run = program()
        .arg("--prompt-file")
        .arg(&prompt)
        .args(["--ulysses", "2", "--report"])
        .arg(&report)
        .output()
        .unwrap();
    let [stdout, stderr] = [run.stdout, run.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(run.status.success(), "{stderr}");
    let report: SampleReport = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!((report.text.as_str(), report.prompt_tokens), (stdout.as_str(), 4));
    assert!(stdout.starts_with("sün"));
    for words in [
        "mesh: ulysses 2",
        "prompt: 4 at ",
        "after the first: 4 at ",
        "cache a rank: ",
    ] {
        assert!(stderr.contains(words), "{words:?} is missing in {stderr}");
    }

    let run = program().args(["--prompt", "a", "--top-p", "2"]).output().unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert_eq!(
        (run.status.code(), run.stdout.len(), stderr.lines().count()),
        (Some(2), 0, 1),
        "{stderr}"
    );
}
