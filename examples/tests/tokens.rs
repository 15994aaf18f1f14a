//! Text in the tokens of a tokenizer: made once, kept, read again, and trained on; what cannot work is refused in one line.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use burn_sp::data::{TokenFile, TokenWriter};
use burn_sp_examples::RunError;
use burn_sp_examples::flags::{self, TrainFlags};
use burn_sp_examples::progress::Progress;
use burn_sp_examples::report::Report;
use burn_sp_examples::tokens::{load_tokenizer, vocabulary};
use burn_sp_examples::train::train;

/// The account of memory belongs to the process: runs come one after another.
static ALONE: Mutex<()> = Mutex::new(());

const TINY: &str = "--hidden 32 --layers 1 --heads 4 --seq-len 16 --batch 4 --steps 3 --lr 0.01 --dropout 0.1";

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tokens").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Letters, and pairs of them by byte-pair encoding; ids with a gap, and an end of text.
fn tokenizer(folder: &Path) -> PathBuf {
    let file = folder.join("tokenizer.json");
    let content = r#"{
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [{"id": 11, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "BPEDecoder", "suffix": "_"},
        "model": {"type": "BPE", "unk_token": "?", "fuse_unk": false, "byte_fallback": false, "end_of_word_suffix": "_",
                  "vocab": {"?": 0, "a": 1, "b": 2, "a_": 3, "b_": 4, "ab": 5, "ab_": 6, "abb_": 9, "<end>": 11},
                  "merges": ["a b", "a b_", "ab b_"]}
    }"#;
    fs::write(&file, content).unwrap();
    file
}

/// A line for each document; documents of 3 to 12 tokens.
fn text(folder: &Path) -> PathBuf {
    let file = folder.join("text.txt");
    let lines = (0..60usize).map(|line| ["ab abb a b ", "b ab ", "abb "].repeat(1 + line % 2)[line % 3..].concat());
    fs::write(&file, lines.collect::<Vec<_>>().join("|")).unwrap();
    file
}

fn run(line: &str) -> Result<Report, RunError> {
    let line = format!("train-transformer {TINY} {line}");
    let flags: TrainFlags = flags::parse(line.split_whitespace().map(OsString::from))?;
    let config = flags.resolve()?;
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    train(&config, &Progress::quiet())
}

#[track_caller]
fn refusal(folder: &Path, line: &str) -> String {
    let Err(error) = run(line) else {
        panic!("it is not refused: {line}");
    };
    assert!(matches!(error, RunError::Input(_)), "{error}");
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    error.replace(&folder.display().to_string(), "FOLDER")
}

fn losses(report: &Report) -> Vec<f64> {
    let steps = report.steps.iter().map(|step| step.loss);
    steps.chain(report.validation_loss).collect()
}

fn all(file: &Path) -> (Vec<u32>, Vec<usize>) {
    let file = TokenFile::open(file).unwrap();
    file.verify().unwrap();
    (file.tokens(0..file.len()).unwrap(), file.ends(0..file.len()).unwrap())
}

#[test]
fn text_goes_through_a_tokenizer_and_back() {
    let folder = folder("round");
    let file = tokenizer(&folder);
    let tokenizer = load_tokenizer(&file).unwrap();
    assert_eq!(vocabulary(&tokenizer), 12);
    fs::write(folder.join("a.txt"), "ab abb|b|").unwrap();
    fs::write(
        folder.join("b.jsonl"),
        "{\"text\": \"a|b\"}\n{\"text\": \"\"}\n{\"text\": \"x ab\"}\n",
    )
    .unwrap();
    let line = format!(
        "--text {0}/a.txt {0}/b.jsonl --tokenizer {0}/tokenizer.json --seq-len 2 --ranks 1",
        folder.display()
    );
    run(&line).unwrap();
    // An unknown token for "|", as for "x".
    let (tokens, ends) = all(&folder.join("a.txt.tokens"));
    assert_eq!(ends, [6, 9, 11]);
    assert_eq!(tokens, [6, 5, 2, 0, 2, 0, 1, 0, 4, 0, 6]);
    run(&format!(
        "{line} --document-separator | --eos <end> --tokens {}/kept",
        folder.display()
    ))
    .unwrap();
    let (tokens, ends) = all(&folder.join("kept"));
    assert_eq!(tokens, [6, 9, 11, 4, 11, 1, 0, 4, 11, 0, 6, 11]);
    assert_eq!(ends, [3, 5, 9, 12]);
    assert_eq!(tokenizer.decode(&tokens[..2], true).unwrap(), "ab abb");
}

/// What is said of a file of tokens that is there, whose bytes stay.
#[track_caller]
fn refused_and_kept(folder: &Path, file: &Path, line: &str) -> String {
    let bytes = fs::read(file).unwrap();
    let said = refusal(folder, line);
    assert!(fs::read(file).unwrap() == bytes, "{line}: it was written over");
    said
}

/// Made once, and never written over, whatever the flags ask for.
#[test]
fn tokens_are_kept_and_used_as_long_as_they_belong_to_the_text() {
    let folder = folder("kept");
    let (tokenizer, text) = (tokenizer(&folder), text(&folder));
    let kept = folder.join("kept");
    let given = format!(
        "--ranks 1 --tokens {} --tokenizer {}",
        kept.display(),
        tokenizer.display()
    );
    let line = format!("{given} --text {} --eos <end>", text.display());
    let first = losses(&run(&line).unwrap());
    let bytes = fs::read(&kept).unwrap();
    let changed = fs::metadata(&text).unwrap().modified().unwrap();
    let touch = |time| {
        File::options()
            .write(true)
            .open(&text)
            .unwrap()
            .set_modified(time)
            .unwrap()
    };
    let again = |line: &str| {
        let made = fs::metadata(&kept).unwrap().modified().unwrap();
        assert_eq!(losses(&run(line).unwrap()), first, "{line}");
        assert_eq!(fs::metadata(&kept).unwrap().modified().unwrap(), made, "{line}");
    };
    again(&line);
    // Without its text, with or without its tokenizer and end, the same data and the model as large.
    again(&given);
    again(&format!("{given} --eos <end>"));
    again(&format!("--ranks 1 --tokens {}", kept.display()));

    let said = |line: &str| refused_and_kept(&folder, &kept, line);
    let made =
        |how: &str| format!("--tokens FOLDER/kept: it was made {how}; give the same, delete it, or name another file");
    assert_eq!(said(&line.replace("--eos <end>", "")), made("with --eos <end>"));
    let separated = format!("{line} --document-separator |");
    assert_eq!(said(&separated), made("without --document-separator"));
    let parted = format!("{given} --document-separator |");
    assert_eq!(said(&parted), made("without --document-separator"));
    let other = folder.join("other.json");
    fs::write(&other, fs::read_to_string(&tokenizer).unwrap() + "\n").unwrap();
    let [with_text, without] = [&line, &given].map(|line| line.replace("tokenizer.json", "other.json"));
    assert_eq!(said(&with_text), made("by another tokenizer"));
    assert_eq!(said(&without), made("by another tokenizer"));
    // There is no text to be made, and none is taken instead.
    assert_eq!(
        refusal(&folder, &given.replace("kept/kept", "kept/none")),
        "--tokens FOLDER/none: it is not there; give --text to make it of"
    );
    assert!(!folder.join("none").exists());

    // Of other text of the same length, and touched: compared by all that is in it.
    let whole = fs::read_to_string(&text).unwrap();
    let (later, swapped) = (changed + Duration::from_secs(10), whole.replacen("ab", "ba", 1));
    fs::write(&text, &swapped).unwrap();
    touch(later);
    let error = said(&line);
    let start = format!(
        "--tokens FOLDER/kept: it was made of another text ({} bytes in 1 files, hash ",
        whole.len()
    );
    let end = "; leave --text out to train on it as it is, or delete it, or name another file";
    assert!(error.starts_with(&start) && error.ends_with(end), "{error}");
    again(&given);
    fs::write(&text, &whole).unwrap();
    touch(later);
    again(&line);
    // Where names, lengths and times are the same, no text is read.
    fs::write(&text, &swapped).unwrap();
    touch(changed);
    again(&line);

    // What is not whole, of another version, or something else.
    let restored = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        fs::write(&kept, bytes).unwrap();
        [&line, &given].map(|line| said(line))
    };
    let length = bytes.len();
    let damaged = format!(
        "is damaged: it has {} bytes, not {length}; make it again from its text",
        length - 1
    );
    let version = "is of format version 2, this program reads version 1; make it again from its text";
    let none = "is no file of tokens; name one that TokenWriter wrote";
    let cut = restored(&|bytes| bytes.truncate(length - 1));
    for (found, what, how) in [
        (cut, damaged.as_str(), ": delete it, or name a file that is not there"),
        (
            restored(&|bytes| bytes[8] = 2),
            version,
            ": delete it, or name a file that is not there",
        ),
        (
            restored(&|bytes| bytes[0] = b'b'),
            none,
            ", or a file that is not there",
        ),
    ] {
        let file = "--tokens FOLDER/kept";
        assert_eq!(found, [format!("{file} {what}{how}"), format!("{file} {what}")]);
    }
    // Tokens of a user's own: the program knows no text of them, but that its tokenizer may have made them.
    let write = |vocabulary: usize| {
        let mut writer = TokenWriter::create(&kept, vocabulary, "mine").unwrap();
        writer
            .write(&(0..200).map(|token| token % 9).collect::<Vec<u32>>())
            .unwrap();
        writer.finish().unwrap();
    };
    write(12);
    assert_eq!(
        said(&line),
        "--tokens FOLDER/kept: it does not say which text it was made of; leave --text out to train on it as it is, or name a \
         file that is not there"
    );
    run(&given).unwrap();
    write(11);
    assert_eq!(
        said(&given),
        "--tokens FOLDER/kept has a vocabulary of 11, and --tokenizer FOLDER/tokenizer.json one of 12; give the tokenizer \
         that it was made with, or leave it out"
    );
    write(13);
    assert_eq!(
        said(&given),
        "FOLDER/kept has tokens of a vocabulary of 13, the model one of 12; use the tokenizer of the model"
    );
}

/// Tokens in the folder of their text are no part of it, and what is ready needs nothing written.
#[test]
fn tokens_may_lie_in_the_folder_of_their_text() {
    let folder = folder("inside");
    let tokenizer = tokenizer(&folder);
    let inside = folder.join("inside");
    fs::create_dir(&inside).unwrap();
    text(&inside);
    let held_out = folder.join("other.txt");
    fs::write(&held_out, "ab abb abb|a b a b").unwrap();
    let line = format!(
        "--ranks 1 --text {0} --tokenizer {1} --tokens {0}/z --held-out {2}",
        inside.display(),
        tokenizer.display(),
        held_out.display()
    );
    let names = || {
        let entries = fs::read_dir(&inside).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let first = losses(&run(&line).unwrap());
    assert_eq!(names(), [".z.held-out.lock", ".z.lock", "text.txt", "z", "z.held-out"]);
    for lock in [".z.lock", ".z.held-out.lock"] {
        fs::remove_file(inside.join(lock)).unwrap();
    }
    assert_eq!(losses(&run(&line).unwrap()), first);
    assert_eq!(names(), ["text.txt", "z", "z.held-out"]);
    fs::write(&held_out, "ab abb abb|a b a b b").unwrap();
    let error = refused_and_kept(&folder, &inside.join("z.held-out"), &line);
    let start = "--tokens FOLDER/inside/z.held-out: it was made of another text (18 bytes in 1 files, hash ";
    assert!(
        error.starts_with(start) && error.ends_with("); delete it, or name another file"),
        "{error}"
    );
}

/// Processes that start at once, as ranks do, make one file between them.
#[test]
fn the_first_of_several_processes_makes_the_tokens() {
    let folder = folder("processes");
    let line = format!(
        "{TINY} --ranks 1 --text {} --tokenizer {}",
        text(&folder).display(),
        tokenizer(&folder).display()
    );
    let start = |_| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_train-transformer"));
        let program = program.args(line.split_whitespace()).stdout(Stdio::null());
        program.stderr(Stdio::piped()).spawn().unwrap()
    };
    let started: Vec<Child> = (0..4).map(start).collect();
    let said = started.into_iter().map(|child| {
        let out = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success(), "{stderr}");
        stderr
    });
    let makers = said.filter(|stderr| stderr.contains("tokenizing")).count();
    assert_eq!(makers, 1);
}

#[test]
fn losses_on_tokens_do_not_depend_on_the_mesh() {
    let folder = folder("meshes");
    let (tokenizer, text) = (tokenizer(&folder), text(&folder));
    let line = format!(
        "--text {} --tokenizer {} --document-separator |",
        text.display(),
        tokenizer.display()
    );
    let shapes = [
        "--shape llama",
        "--shape llama --window 5",
        "--shape gpt2",
        "--shape llama --pack",
    ];
    for data in shapes {
        let one = losses(&run(&format!("{line} {data} --ranks 1")).unwrap());
        assert!((one[0] - 12f64.ln()).abs() < 0.5, "{one:?}");
        for mesh in [
            "--ulysses 2",
            "--ring 3",
            "--dp 2",
            "--dp 2 --ring 2",
            "--dp 4",
            "--tp 2",
        ] {
            let other = losses(&run(&format!("{line} {data} {mesh}")).unwrap());
            for (a, b) in one.iter().zip(other) {
                assert!((a - b).abs() <= 1e-4 * a, "{data} {mesh}: {a} and {b}");
            }
        }
    }
    // Packed: one sequence a replica, so learned positions suffice.
    for mesh in ["--dp 4", "--dp 4 --ulysses 2"] {
        run(&format!("{line} --shape gpt2 --pack {mesh}")).unwrap();
    }
    // Other text to validate with: steps are of all sequences, in another order.
    let held_out = folder.join("other.txt");
    fs::write(&held_out, "ab abb abb|a b a b").unwrap();
    let other = run(&format!("{line} --ranks 2 --pack --held-out {}", held_out.display())).unwrap();
    assert!(other.validation_loss.is_some());
    assert_eq!(all(&folder.join("text.txt.tokens.held-out")).1, [3, 7]);
}

#[test]
fn what_cannot_be_learned_from_tokens() {
    let folder = folder("refusals");
    let (tokenizer, text) = (tokenizer(&folder), text(&folder));
    let given = format!(
        "--ranks 1 --text {} --tokenizer {}",
        text.display(),
        tokenizer.display()
    );
    run(&given).unwrap();
    let tokens = folder.join("text.txt.tokens");
    let mut writer = TokenWriter::create(folder.join("large"), 5000, "").unwrap();
    writer.write(&[4999, 0, 1]).unwrap();
    writer.finish().unwrap();
    TokenWriter::create(folder.join("few"), 2, "")
        .unwrap()
        .finish()
        .unwrap();
    fs::write(folder.join("bad.json"), "{\n\"version\": 1\n}").unwrap();
    fs::write(folder.join("bad.jsonl"), "text").unwrap();
    let count = TokenFile::open(&tokens).unwrap().len();
    for (line, expected) in [
        (
            format!("{given} --seq-len 5000"),
            format!(
                "FOLDER/text.txt.tokens: {count} tokens are too few for two sequences, of which one is held out (10000); \
                 give more text, or a smaller --seq-len"
            ),
        ),
        (
            "--ranks 1 --tokens FOLDER/text.txt.tokens --held-out FOLDER/large".into(),
            "FOLDER/large has tokens of a vocabulary of 5000, the model one of 12; use the tokenizer of the model".into(),
        ),
        (
            "--tokens FOLDER/text.txt".into(),
            "--tokens FOLDER/text.txt is no file of tokens; name one that TokenWriter wrote".into(),
        ),
        (
            "--tokens FOLDER/few --tp 3".into(),
            "--tp 3: the vocabulary has 2 entries; use --tp 2 at most".into(),
        ),
        (
            "--tokens FOLDER/large --text FOLDER".into(),
            "--text: --tokens alone trains on a file of tokens; give --tokenizer to make it".into(),
        ),
        (
            format!("{given} --eos <none>"),
            "--eos <none>: the tokenizer has no such token; name the one that ends a text, such as </s> or <|endoftext|>"
                .into(),
        ),
        (
            format!("{given} --tokens FOLDER"),
            "--tokens FOLDER: that is a folder; name a file in it".into(),
        ),
        (
            "--tokenizer FOLDER/tokenizer.json".into(),
            "--tokenizer: give --text, files to tokenize, or --tokens, a file of tokens".into(),
        ),
        (
            "--tokenizer FOLDER/tokenizer.json --text /".into(),
            "--tokenizer: give --tokens, a file for the tokens, too".into(),
        ),
        (
            format!("{given} --pack --dp 3 --ranks 3"),
            "--pack --batch 4 --dp 3: ranks of dp have as many packed sequences each; use --batch 3 or 6".into(),
        ),
        (
            format!("{given} --pack --shape gpt2"),
            "--pack --shape gpt2 --batch 4: 4 packed sequences in a row need more positions than the model learns; use \
             --batch 1 and --accumulate"
                .into(),
        ),
        (
            format!("{given} --pack --attention-dropout 0.25 --dp 2 --ranks 2"),
            "--pack --attention-dropout 0.25 --batch 4: which weights are dropped would depend on --dp, as 2 packed sequences \
             are in a row; use --batch 2 and --accumulate"
                .into(),
        ),
    ] {
        let line = line.replace("FOLDER", &folder.display().to_string());
        assert_eq!(refusal(&folder, &line), expected, "{line}");
    }
    let said = |line: &str| refusal(&folder, &line.replace("FOLDER", &folder.display().to_string()));
    run(&format!("{given} --pack --attention-dropout 0.25 --batch 1")).unwrap();
    let error = said("--tokenizer FOLDER/bad.json --tokens FOLDER/none");
    assert!(
        error.starts_with("--tokenizer FOLDER/bad.json: ") && error.ends_with("name a tokenizer.json"),
        "{error}"
    );
    let error = said("--text FOLDER/bad.jsonl --tokenizer FOLDER/tokenizer.json");
    assert!(error.starts_with("--text FOLDER/bad.jsonl: line 1: "), "{error}");
    // What failed has left no tokens.
    assert!(!folder.join("bad.jsonl.tokens").exists());
}
