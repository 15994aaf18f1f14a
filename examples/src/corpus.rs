//! The documents of a text, read a piece at a time.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::InputError;
use crate::fnv::Fnv;
use crate::listing::{Found, Listing, passed_over, wrong};

/// Bytes read at a time, and of a document that is longer, given out at a time.
const PIECE: usize = 1 << 20;

/// Text in files, which is never held whole.
pub(crate) struct Corpus {
    files: Vec<PathBuf>,
    /// Files that are no text, and what is no file.
    passed: [usize; 2],
    bytes: u64,
    /// What tells it apart from others: a hash of all of it.
    pub digest: String,
}

/// A part of a document.
pub(crate) struct Piece {
    pub text: String,
    /// Whether the document ends with it.
    pub last: bool,
}

#[derive(Deserialize)]
struct Line {
    text: String,
}

impl Corpus {
    /// Reads all of the files once, to know them again; what is not UTF-8 is passed over.
    ///
    /// # Errors
    /// If one cannot be read, one that is named is no text, or there is none.
    pub fn scan(listing: &Listing) -> Result<Self, InputError> {
        let (mut files, mut foreign, mut bytes) = (Vec::new(), 0, 0);
        let mut all = Fnv::new();
        for Found { path, named } in &listing.files {
            match hash(path) {
                Ok((length, hash)) => {
                    all = all.number(length).number(hash.value()).number(is_json(path).into());
                    bytes += length;
                    files.push(path.clone());
                }
                Err(error) if !named && error.kind() == ErrorKind::InvalidData => foreign += 1,
                Err(error) => return Err(wrong(path, error)),
            }
        }
        if bytes == 0 {
            return Err(InputError(
                "text: there is none; give --text PATH with UTF-8 files".into(),
            ));
        }
        Ok(Self {
            digest: format!("{bytes} bytes in {} files, hash {}", files.len(), all.hex()),
            files,
            passed: [foreign, listing.passed],
            bytes,
        })
    }

    /// What was read, in a few words.
    pub fn line(&self) -> String {
        let [foreign, passed] = self.passed;
        format!(
            "{} bytes from {} files{}",
            self.bytes,
            self.files.len(),
            passed_over(foreign, passed)
        )
    }

    /// Gives out all documents, piece by piece. Each line of a `.jsonl` file is one, `{"text": "..."}`; of other files each is
    /// one, or what `separator` leaves of it.
    ///
    /// A document of more than a mebibyte comes in pieces, cut, where it can be, before a line's end after a letter or digit:
    /// tokenizers cut there too. (One that puts something before a text puts it before each piece.) A line of `.jsonl` is
    /// one piece, however long.
    ///
    /// # Errors
    /// If a file cannot be read any more, a line of JSON is something else, or `take` fails.
    pub fn documents(
        &self,
        separator: Option<&str>,
        take: &mut dyn FnMut(Piece) -> Result<(), InputError>,
    ) -> Result<(), InputError> {
        for path in &self.files {
            match is_json(path) {
                true => json(path, take)?,
                false => text(path, separator, take)?,
            }
        }
        Ok(())
    }
}

/// How long a text is, and its hash.
fn hash(path: &Path) -> io::Result<(u64, Fnv)> {
    let mut text = Reader::open(path)?;
    let (mut length, mut hash) = (0, Fnv::new());
    while let Some(piece) = text.next()? {
        length += piece.len() as u64;
        hash = hash.bytes(piece.as_bytes());
    }
    Ok((length, hash))
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "jsonl")
}

fn json(path: &Path, take: &mut dyn FnMut(Piece) -> Result<(), InputError>) -> Result<(), InputError> {
    let mut file = BufReader::new(File::open(path).map_err(|error| wrong(path, error))?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = file.read_until(b'\n', &mut line);
        if read.map_err(|error| wrong(path, error))? == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let Line { text } = serde_json::from_slice(&line).map_err(|error| {
            let what = "each line of a .jsonl file is a document, {\"text\": \"...\"}";
            wrong(path, format!("line {number}: {error}; {what}"))
        })?;
        take(Piece { text, last: true })?;
    }
    Ok(())
}

fn text(
    path: &Path,
    separator: Option<&str>,
    take: &mut dyn FnMut(Piece) -> Result<(), InputError>,
) -> Result<(), InputError> {
    let mut file = Reader::open(path).map_err(|error| wrong(path, error))?;
    let mut held = String::new();
    loop {
        let more = file.next().map_err(|error| wrong(path, error))?;
        let end = more.is_none();
        held.push_str(&more.unwrap_or_default());
        if let Some(separator) = separator {
            let mut rest = String::new();
            let mut documents = held.split(separator).peekable();
            while let Some(document) = documents.next() {
                let text = document.to_owned();
                match documents.peek() {
                    Some(_) => take(Piece { text, last: true })?,
                    // It may go on.
                    None => rest = text,
                }
            }
            held = rest;
        }
        if end {
            return take(Piece { text: held, last: true });
        }
        // A separator may have begun.
        let most = held.len() - separator.map_or(0, str::len).min(held.len());
        if most >= PIECE {
            let rest = held.split_off(cut(&held, most));
            let text = std::mem::replace(&mut held, rest);
            take(Piece { text, last: false })?;
        }
    }
}

/// Where to cut a text that goes on, at `most` bytes or before.
fn cut(text: &str, most: usize) -> usize {
    let most = text.floor_char_boundary(most);
    let ends = |(at, _): &(usize, &str)| text[..*at].ends_with(char::is_alphanumeric);
    let mut lines = text[..most].rmatch_indices('\n');
    let line = lines.clone().find(ends).or_else(|| lines.next());
    line.map_or(most, |(at, _)| at).max(1)
}

/// A file of UTF-8 text, read a piece at a time.
struct Reader {
    file: File,
    /// The start of a character whose end has not been read.
    rest: Vec<u8>,
}

impl Reader {
    fn open(path: &Path) -> io::Result<Self> {
        let rest = Vec::new();
        File::open(path).map(|file| Self { file, rest })
    }

    fn next(&mut self) -> io::Result<Option<String>> {
        let mut bytes = std::mem::take(&mut self.rest);
        let read = (&mut self.file).take(PIECE as u64).read_to_end(&mut bytes)?;
        if read == 0 && bytes.is_empty() {
            return Ok(None);
        }
        let invalid = |error| io::Error::new(ErrorKind::InvalidData, format!("not UTF-8 text: {error}"));
        if let Err(error) = std::str::from_utf8(&bytes) {
            if error.error_len().is_some() || read == 0 {
                return Err(invalid(error));
            }
            self.rest = bytes.split_off(error.valid_up_to());
        }
        String::from_utf8(bytes)
            .map(Some)
            .map_err(|error| invalid(error.utf8_error()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::slice::from_ref;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("burn-sp-corpus-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn scan(paths: &[PathBuf]) -> Result<Corpus, InputError> {
        Corpus::scan(&Listing::of(Some(paths))?)
    }

    fn documents(paths: &[PathBuf], separator: Option<&str>) -> Result<Vec<String>, InputError> {
        let (mut all, mut text) = (Vec::new(), String::new());
        scan(paths)?.documents(separator, &mut |piece| {
            text.push_str(&piece.text);
            if piece.last {
                all.push(std::mem::take(&mut text));
            }
            Ok(())
        })?;
        assert!(text.is_empty());
        Ok(all)
    }

    #[test]
    fn a_file_is_a_document_and_so_is_a_line_of_json() {
        let folder = folder("files");
        fs::write(folder.join("a.txt"), "one\ntwo").unwrap();
        fs::write(
            folder.join("b.jsonl"),
            "{\"text\": \"three\\n\", \"id\": 3}\n\n{\"text\":\"four\"}",
        )
        .unwrap();
        fs::write(folder.join("c.bin"), [0xff]).unwrap();
        assert_eq!(
            documents(from_ref(&folder), None).unwrap(),
            ["one\ntwo", "three\n", "four"]
        );
        assert_eq!(
            scan(from_ref(&folder)).unwrap().line(),
            "52 bytes from 2 files, 1 passed over (not UTF-8)"
        );
        let bad = folder.join("d.jsonl");
        fs::write(&bad, "{\"text\":\"a\"}\n{\"body\":\"b\"}\n").unwrap();
        let InputError(error) = documents(from_ref(&bad), None).unwrap_err();
        assert!(error.contains("d.jsonl: line 2: missing field `text`"), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }

    /// Wherever reading pauses: within a separator, within a character, in a document longer than a piece.
    #[test]
    fn documents_are_whole_wherever_they_lie() {
        let folder = folder("long");
        let path = folder.join("text");
        for before in [PIECE - 5, PIECE - 2, PIECE - 1, PIECE, 2 * PIECE + 7, 3 * PIECE] {
            let mut long = "ä line of word5\n\n".repeat(before / 18 + 1);
            long.truncate(long.floor_char_boundary(before));
            let long = format!("{}{long}", "x".repeat(before - long.len()));
            assert_eq!(long.len(), before);
            fs::write(&path, format!("{long}<end>short<end><end>last")).unwrap();
            let found = documents(from_ref(&path), Some("<end>")).unwrap();
            assert!(found == [long.as_str(), "short", "", "last"], "{before}");
            fs::write(&path, format!("{}é", &long)).unwrap();
            assert!(
                documents(from_ref(&path), None).unwrap() == [format!("{long}é")],
                "{before}"
            );
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn pieces_are_cut_where_words_end_lines() {
        assert_eq!(cut("ab\ncd.\nef", 9), 2);
        assert_eq!(cut("ab.\ncd", 6), 3);
        assert_eq!(cut("abcdef", 4), 4);
        assert_eq!(cut("aä", 2), 1);
        assert_eq!(cut("\nabc", 4), 1);
    }
}
