//! Where a checkpoint is saved: what is replaced, what goes along, and what a process leaves that ends meanwhile.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device};
use burn_sp_models::transformer::{HuggingFace, Transformer};
use burn_sp_tests::parameters_by_path;
use serde_json::json;

use super::checkpoint::{CONFIG, Family, TENSORS, contents, read_json, write_json};
use crate::common::contains;
use crate::folder;

fn opened(name: &str) -> (HuggingFace, Transformer) {
    let checkpoint = HuggingFace::open(Family::Llama.checkpoint(name)).unwrap();
    let model = checkpoint.load(&Device::flex()).unwrap();
    (checkpoint, model)
}

#[test]
fn nothing_else_is_overwritten() {
    let (checkpoint, model) = opened("overwrite");
    let place = folder("overwrite");
    let refused = || {
        let before = contents(&place);
        let error = checkpoint.save(&model, &place).unwrap_err();
        assert!(contents(&place) == before);
        assert_eq!(HuggingFace::check_folder(&place), Err(error));
        let error = checkpoint.save(&model, &place).unwrap_err().to_string();
        error.replace(&place.display().to_string(), "DIR")
    };
    let refusal =
        |what: &str| format!("DIR: {what}, so it is not only a checkpoint and is not replaced; save elsewhere");
    assert_eq!(HuggingFace::check_folder(&place), Ok(()));
    assert_eq!(HuggingFace::check_folder(place.join("none")), Ok(()));
    fs::write(place.join("tokenizer.json"), "{}").unwrap();
    assert_eq!(refused(), refusal("it has files but no config.json"));
    // That of another program.
    fs::write(place.join(CONFIG), "{\"port\": 80}").unwrap();
    let foreign = "it has no tensors, and config.json names no model_type";
    assert_eq!(refused(), refusal(foreign));
    fs::write(place.join(CONFIG), "port: 80").unwrap();
    assert_eq!(refused(), refusal(foreign));
    write_json(&place.join(CONFIG), &json!({ "model_type": "gpt2" }));
    assert_eq!(HuggingFace::check_folder(&place), Ok(()));
    fs::write(place.join("thesis.txt"), "").unwrap();
    assert_eq!(refused(), refusal("it has thesis.txt"));
    fs::remove_file(place.join("thesis.txt")).unwrap();
    checkpoint.save(&model, &place).unwrap();
    // The tokenizer of the checkpoint that was replaced, as the opened one has none.
    assert_eq!(
        contents(&place).keys().collect::<Vec<_>>(),
        [CONFIG, TENSORS, "tokenizer.json"]
    );
    let templates = place.join("additional_chat_templates");
    fs::create_dir(&templates).unwrap();
    fs::write(templates.join("notes.txt"), "").unwrap();
    let error = checkpoint.save(&model, &place).unwrap_err().to_string();
    contains(
        &error,
        &["it has additional_chat_templates, so it is not only a checkpoint"],
    );

    let file = folder("no-folder").join("file");
    fs::write(&file, "").unwrap();
    assert!(checkpoint.save(&model, &file).is_err());
    assert!(HuggingFace::check_folder(&file).is_err());
    assert!(checkpoint.save(&model, "/").is_err());
    assert_eq!(contents(file.parent().unwrap()).len(), 1);
}

/// The files of a folder, and of those in it.
fn all(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(all(&path)),
            false if path.ends_with(TENSORS) || path.ends_with(CONFIG) => {}
            false => found.push((path.clone(), fs::read_to_string(&path).unwrap())),
        }
    }
    found.sort();
    found
}

#[test]
fn what_belongs_to_a_model_goes_along() {
    let from = Family::Gpt2.checkpoint("along");
    let templates = from.join("additional_chat_templates");
    fs::create_dir(&templates).unwrap();
    for path in [
        from.join("tokenizer.json"),
        from.join("processor_config.json"),
        from.join("chat_template.jinja"),
        templates.join("rag.jinja"),
        templates.join("tools.jinja"),
    ] {
        fs::write(&path, path.file_name().unwrap().to_str().unwrap()).unwrap();
    }
    let checkpoint = HuggingFace::open(&from).unwrap();
    let model = checkpoint.load(&Device::flex()).unwrap();
    let to = folder("along").join("saved");
    let expected: Vec<_> = all(&from)
        .into_iter()
        .map(|(path, text)| (to.join(path.strip_prefix(&from).unwrap()), text))
        .collect();
    checkpoint.save(&model, &to).unwrap();
    assert_eq!(all(&to), expected);
    // Of the checkpoint that is replaced.
    let new = HuggingFace::new(checkpoint.config()).unwrap();
    new.save(&model, &to).unwrap();
    assert_eq!(all(&to), expected);

    // One that was trained for the model, before both.
    let own = folder("along-tokenizer").join("ours.json");
    fs::write(&own, "our own").unwrap();
    checkpoint.with_tokenizer(&own).save(&model, &to).unwrap();
    let mut expected = expected;
    for (path, text) in &mut expected {
        if path.ends_with("tokenizer.json") {
            *text = "our own".into();
        }
    }
    assert_eq!(all(&to), expected);
    let missing = HuggingFace::open(&to).unwrap().with_tokenizer("no/tokenizer.json");
    let error = missing.save(&model, &to).unwrap_err().to_string();
    assert_eq!(error, "no/tokenizer.json: No such file or directory (os error 2)");
    assert_eq!(all(&to), expected);
}

/// A folder that was saved over has what is new, under other names of files too.
#[test]
fn what_is_loaded_is_what_is_there_then() {
    let folder = Family::Gpt2.checkpoint("then");
    let open = || HuggingFace::open(&folder).unwrap();
    let (checkpoint, other) = (open(), open().config().init(&Device::flex()));
    open().with_shard_size(40_000).save(&other, &folder).unwrap();
    assert!(!folder.join(TENSORS).exists());
    let found = checkpoint.load(&Device::flex()).unwrap();
    assert_eq!(parameters_by_path(&found), parameters_by_path(&other));
}

/// The names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// What a process leaves that ends at some moment of a save.
type Left = fn(place: &Path, draft: &Path, aside: &Path);

const LEFT: [(&str, Left, &str); 5] = [
    (
        "half written",
        |_, draft, _| {
            fs::remove_file(draft.join(CONFIG)).unwrap();
            fs::write(draft.join(TENSORS), "half").unwrap();
        },
        "float32",
    ),
    ("all written", |_, _, _| {}, "float32"),
    (
        "between the renames",
        |place, _, aside| fs::rename(place, aside).unwrap(),
        "float32",
    ),
    (
        "in its place",
        |place, draft, aside| {
            fs::rename(place, aside).unwrap();
            fs::rename(draft, place).unwrap();
        },
        "float16",
    ),
    (
        "half removed",
        |place, draft, aside| {
            fs::rename(place, aside).unwrap();
            fs::rename(draft, place).unwrap();
            fs::remove_file(aside.join(CONFIG)).unwrap();
        },
        "float16",
    ),
];

/// Whatever was left, what is there can be read, and the next save goes on from that and leaves nothing else.
fn survives(place_of: impl Fn(&Path) -> PathBuf) {
    let (checkpoint, model) = opened("interrupted");
    let half = HuggingFace::new(checkpoint.config()).unwrap().with_dtype(DType::F16);
    for (left, leave, dtype) in LEFT {
        let parent = folder("interrupted");
        let [real, draft, aside] = ["model", ".model.tmp", ".model.old"].map(|name| parent.join(name));
        checkpoint.save(&model, &real).unwrap();
        fs::write(real.join("vocab.json"), "{}").unwrap();
        half.save(&model, &draft).unwrap();
        fs::write(draft.join("vocab.json"), "{}").unwrap();
        let place = place_of(&parent);
        leave(&real, &draft, &aside);

        let found = HuggingFace::open(&place).unwrap_or_else(|error| panic!("{left}: {error}"));
        let loaded = found
            .load(&Device::flex())
            .unwrap_or_else(|error| panic!("{left}: {error}"));
        let exact = parameters_by_path(&loaded) == parameters_by_path(&model);
        assert_eq!(exact, dtype == "float32", "{left}");
        assert_eq!(HuggingFace::check_folder(&place), Ok(()), "{left}");
        found
            .with_dtype(DType::BF16)
            .save(&model, &place)
            .unwrap_or_else(|error| panic!("{left}: {error}"));
        assert_eq!(read_json(&real.join(CONFIG))["vocab_size"], 128, "{left}");
        let saved = read_json(&place.join(CONFIG));
        let key = if dtype == "float32" { "dtype" } else { "torch_dtype" };
        assert_eq!(saved[key], "bfloat16", "{left}");
        assert_eq!(
            contents(&place).keys().collect::<Vec<_>>(),
            [CONFIG, TENSORS, "vocab.json"]
        );
        let others: Vec<String> = names(&parent).into_iter().filter(|name| name != "model").collect();
        assert!(others.iter().all(|name| name == "link"), "{left}: {others:?}");
    }
}

#[test]
fn an_interrupted_save_loses_nothing() {
    survives(|parent| parent.join("model"));
}

/// A link to a checkpoint stays one, also while what it names is aside.
#[cfg(unix)]
#[test]
fn an_interrupted_save_through_a_link_loses_nothing() {
    use std::os::unix::fs::symlink;

    survives(|parent| {
        symlink(parent.join("model"), parent.join("link")).unwrap();
        parent.join("link")
    });
    // Of a link's own folder, through another, with a slash at the end.
    survives(|parent| {
        symlink("model", parent.join("link")).unwrap();
        let second = folder("interrupted-link").join("second");
        symlink(parent.join("link"), &second).unwrap();
        second.join("")
    });
    let (checkpoint, model) = opened("links");
    let parent = folder("links");
    let link = parent.join("link");
    symlink("new", &link).unwrap();
    checkpoint.save(&model, &link).unwrap();
    assert!(link.is_symlink() && parent.join("new").is_dir());
    let round = parent.join("round");
    symlink("round", &round).unwrap();
    let error = checkpoint.save(&model, &round).unwrap_err().to_string();
    assert!(
        error.ends_with("round: it is a link to itself; name a folder"),
        "{error}"
    );
    assert_eq!(names(&parent), ["link", "new", "round"]);
}
