//! The guide under docs/: all of it is in the book and in the doc tests, and its links lead somewhere.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Doc tests compile and run what is in here.
const TESTED: &str = include_str!("../src/guide.rs");

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src")
}

/// The names of all chapters, and their text.
fn chapters() -> Vec<(String, String)> {
    let files = fs::read_dir(source()).unwrap().map(|entry| entry.unwrap().path());
    let chapters = files.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let read = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read_to_string(path).unwrap())
    };
    chapters.map(read).filter(|(name, _)| name != "SUMMARY.md").collect()
}

/// Where the links of a text lead: what stands in `](..)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

#[test]
fn every_chapter_is_in_the_book_and_in_the_doc_tests() {
    let summary = fs::read_to_string(source().join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<&str> = links(&summary).collect();
    let tested: BTreeSet<&str> = TESTED.split('"').filter(|part| part.ends_with(".md")).collect();
    let chapters = chapters();
    let there: BTreeSet<&str> = chapters.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(listed, there);
    assert_eq!(tested, there);
}

/// `ignore` and `no_run` would let a program be wrong; a block without a language would be taken for Rust.
#[test]
fn every_program_is_compiled_and_run() {
    for (name, text) in chapters() {
        let mut open = false;
        for line in text.lines() {
            if let Some(language) = line.trim_start().strip_prefix("```") {
                open = !open;
                let known = [
                    "rust",
                    "rust,should_panic",
                    "diff",
                    "json",
                    "sh",
                    "text",
                    "toml",
                    "yaml",
                ];
                assert!(!open || known.contains(&language), "{name}: a block of {language:?}");
            }
        }
        assert!(!open, "{name}: a block has no end");
    }
}

#[test]
fn links_lead_somewhere() {
    for (name, text) in chapters() {
        for link in links(&text).filter(|link| !link.starts_with("http")) {
            let (file, part) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => text.clone(),
                file if file.ends_with(".md") => {
                    fs::read_to_string(source().join(file)).unwrap_or_else(|error| panic!("{name}: {link}: {error}"))
                }
                file => {
                    assert!(source().join(file).exists(), "{name}: {link}");
                    continue;
                }
            };
            // As mdBook and GitHub name them.
            let anchor = |heading: &str| -> String {
                let kept = heading.trim_start_matches('#').trim().to_lowercase();
                let kept = kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
                kept.map(|c| if c == ' ' { '-' } else { c }).collect()
            };
            let found = target
                .lines()
                .filter(|line| line.starts_with('#'))
                .any(|line| anchor(line) == part);
            assert!(part.is_empty() || found, "{name}: {link}");
        }
    }
}
