//! Files of tokens: what is in them, and what is refused.

use std::fs;
use std::path::PathBuf;

use super::{IGNORED, TokenError, TokenFile, TokenSequences, TokenWriter};

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("burn-sp-data-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn write(path: &PathBuf, vocabulary: usize, documents: &[&[u32]]) -> TokenFile {
    let mut writer = TokenWriter::create(path, vocabulary, "made by hand").unwrap();
    for document in documents {
        writer.write(document).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap()
}

fn names(folder: &PathBuf) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The layout of the bytes is a promise.
#[test]
fn a_file_is_these_bytes() {
    let folder = folder("bytes");
    let file = write(&folder.join("tokens"), 300, &[&[1, 299], &[], &[7]]);
    let bytes = fs::read(file.path()).unwrap();
    assert_eq!(&bytes[..16], b"BSPTOKEN\x01\0\0\0\x02\0\0\0");
    for (at, number) in [(16, 300u64), (24, 3), (32, 2), (40, 12)] {
        assert_eq!(bytes[at..at + 8], number.to_le_bytes(), "{at}");
    }
    assert_eq!(&bytes[56..72], b"made by hand\0\0\0\0");
    assert_eq!(&bytes[72..80], [1, 0, 43, 1, 7, 0, 0, 0]);
    assert_eq!(bytes[80..88], 2u64.to_le_bytes());
    assert_eq!(bytes[88..], 3u64.to_le_bytes());
    assert_eq!(bytes[48..52], crc32fast::hash(&bytes[72..]).to_le_bytes());
    assert_eq!(names(&folder), ["tokens"]);
    fs::remove_dir_all(&folder).unwrap();
}

/// Both widths; any window, with the documents that end in it.
#[test]
fn windows_are_what_was_written() {
    let folder = folder("windows");
    for (number, vocabulary) in [1 << 16, (1 << 16) + 1, 1 << 32].into_iter().enumerate() {
        let largest = (vocabulary - 1) as u32;
        let tokens: Vec<u32> = (0..1000u32).map(|i| largest - i * 7).collect();
        // 300 documents of one token, then longer ones.
        let ends: Vec<usize> = (1..=300).chain([303, 600, 999, 1000]).collect();
        let starts = [0].into_iter().chain(ends.iter().copied());
        let documents: Vec<&[u32]> = starts.zip(&ends).map(|(start, end)| &tokens[start..*end]).collect();
        let file = write(&folder.join(number.to_string()), vocabulary, &documents);
        assert_eq!((file.len(), file.documents()), (1000, 304));
        assert_eq!((file.vocabulary(), file.about()), (vocabulary, "made by hand"));
        file.verify().unwrap();
        for range in [0..1000, 0..0, 5..6, 250..700, 303..600, 304..599, 999..1000, 1000..1000] {
            let places = range.start as usize..range.end as usize;
            assert_eq!(file.tokens(range.clone()).unwrap(), tokens[places.clone()]);
            let within = ends.iter().filter(|end| (places.start + 1..=places.end).contains(end));
            let expected: Vec<usize> = within.map(|end| end - places.start).collect();
            assert_eq!(file.ends(range.clone()).unwrap(), expected, "{range:?}");
        }
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_file_without_documents_is_empty() {
    let folder = folder("empty");
    let file = write(&folder.join("tokens"), 10, &[&[], &[]]);
    assert!(file.is_empty() && file.documents() == 0);
    file.verify().unwrap();
    assert_eq!(file.ends(0..0).unwrap(), [0usize; 0]);
    assert_eq!(TokenSequences::new(file, 4).count(), 0);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_is_no_whole_file_is_refused_in_one_line() {
    let folder = folder("refusals");
    let path = folder.join("tokens");
    write(&path, 50, &[&[1, 2, 3], &[4, 5]]);
    let whole = fs::read(&path).unwrap();
    let said = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = TokenFile::open(&path).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        error.replace(&path.display().to_string(), "FILE")
    };
    let foreign = "FILE is no file of tokens; name one that TokenWriter wrote";
    assert_eq!(said(b""), foreign);
    assert_eq!(said(&[b'x'; 500]), foreign);
    assert_eq!(said(&whole[..40]), foreign);
    let damaged = |what: &str| format!("FILE is damaged: {what}; make it again from its text");
    let bytes = whole.len();
    assert_eq!(
        said(&whole[..bytes - 1]),
        damaged(&format!("it has {} bytes, not {bytes}", bytes - 1))
    );
    assert_eq!(
        said(&[&whole[..], &[0]].concat()),
        damaged(&format!("it has {} bytes, not {bytes}", bytes + 1))
    );
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let sum = damaged("the checksum of its header is another");
    // The vocabulary, and the text.
    assert_eq!(said(&flipped(16)), sum);
    assert_eq!(said(&flipped(58)), sum);
    let mut endless = whole.clone();
    endless[24..32].fill(0xff);
    assert_eq!(said(&endless), damaged("its header asks for more than a file can hold"));
    assert_eq!(
        said(&flipped(9)),
        "FILE is of format version 257, this program reads version 1; make it again from its text"
    );
    // A token: only reading all of it shows that.
    fs::write(&path, flipped(72)).unwrap();
    let file = TokenFile::open(&path).unwrap();
    let error = file.verify().unwrap_err().to_string();
    assert!(error.contains("is damaged: its checksum is "), "{error}");
    // A token beyond the vocabulary, and a document that ends before the one before it.
    fs::write(&path, flipped(73)).unwrap();
    let file = TokenFile::open(&path).unwrap();
    assert!(matches!(file.tokens(0..2), Err(TokenError::Id { id: 257, .. })));
    fs::write(&path, flipped(bytes - 7)).unwrap();
    assert!(TokenFile::open(&path).unwrap().ends(0..5).unwrap().len() < 2);

    let missing = TokenFile::open(folder.join("none")).unwrap_err().to_string();
    assert!(missing.contains("none could not be read: "), "{missing}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn windows_and_tokens_that_are_not_there() {
    let folder = folder("beyond");
    let path = folder.join("tokens");
    let file = write(&path, 50, &[&[1, 2, 3]]);
    let shown = path.display();
    let error = file.tokens(2..4).unwrap_err().to_string();
    assert_eq!(error, format!("{shown} holds 3 tokens, and 2 to 4 were asked for"));
    assert!(matches!(
        file.tokens(u64::MAX - 1..u64::MAX),
        Err(TokenError::Window { .. })
    ));

    let mut writer = TokenWriter::create(&path, 50, "").unwrap();
    let error = writer.write(&[49, 50]).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("{shown}: token 50 is not below the vocabulary's size, 50")
    );
    drop(writer);
    let error = TokenWriter::create(folder.join("none/tokens"), 50, "").unwrap_err();
    assert!(matches!(error, TokenError::Write { .. }), "{error}");
    // What is given up leaves what was there before, and nothing else.
    assert_eq!(names(&folder), ["tokens"]);
    assert_eq!(TokenFile::open(&path).unwrap().tokens(0..3).unwrap(), [1, 2, 3]);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn sequences_are_cut_one_after_another() {
    let folder = folder("sequences");
    let file = write(&folder.join("tokens"), 50, &[&[0, 1, 2], &[3, 4, 5, 6, 7, 8, 9]]);
    let plain = TokenSequences::new(file, 4);
    assert_eq!(plain.count(), 3);
    let labels = |sequences: &TokenSequences| -> Vec<Vec<i64>> {
        (0..sequences.count())
            .map(|index| sequences.get(index).unwrap().labels)
            .collect()
    };
    let i = IGNORED;
    assert_eq!(labels(&plain), [[1, 2, 3, 4], [5, 6, 7, 8], [9, i, i, i]]);
    let packed = plain.clone().with_boundaries();
    assert_eq!(labels(&packed), [[1, 2, i, 4], [5, 6, 7, 8], [9, i, i, i]]);
    let documents: Vec<_> = (0..3).map(|index| packed.get(index).unwrap().documents).collect();
    assert_eq!(documents, [vec![3, 1], vec![4], vec![2, 2]]);
    let last = packed.get(2).unwrap();
    assert_eq!(last.tokens, [8, 9, 0, 0]);
    let slice = packed.slice(1..3).slice(1..2);
    assert_eq!((slice.count(), slice.get(0).unwrap()), (1, last));
    fs::remove_dir_all(&folder).unwrap();
}

/// A window at the end of a file of 6 GiB, which takes no room on the disk, reads that window alone.
#[test]
#[cfg(target_os = "linux")]
fn a_file_larger_than_memory_is_read_by_window() {
    use std::fs::File;
    use std::io::{Seek, SeekFrom, Write};
    use std::os::unix::fs::MetadataExt;

    use super::file::{HEADER, Header};

    let folder = folder("sparse");
    let path = folder.join("tokens");
    // Two bytes each; documents of 2^20 tokens.
    let tokens = 3u64 << 30;
    let header = Header {
        tokens,
        documents: tokens >> 20,
        ..Header::new(1000, "")
    };
    let ends = HEADER + 2 * tokens;
    let whole = ends + 8 * header.documents;
    let mut file = File::create(&path).unwrap();
    let made = file.set_len(whole);
    if made.is_err() || file.metadata().unwrap().blocks() * 512 > whole / 2 {
        fs::remove_dir_all(&folder).unwrap();
        return eprintln!("skipped: {} has no sparse files of this size", folder.display());
    }
    file.write_all(&header.bytes("")).unwrap();
    file.seek(SeekFrom::Start(ends - 2 * 4)).unwrap();
    file.write_all(&[1, 0, 2, 0, 3, 0, 4, 0]).unwrap();
    for document in 1..=header.documents {
        file.write_all(&(document << 20).to_le_bytes()).unwrap();
    }

    let resident = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
    };
    let before = resident();
    let file = TokenFile::open(&path).unwrap();
    assert_eq!(file.tokens(tokens - 5..tokens).unwrap(), [0, 1, 2, 3, 4]);
    assert_eq!(file.ends(tokens - (1 << 20)..tokens).unwrap(), [1 << 20]);
    let sequences = TokenSequences::new(file, 1 << 16).with_boundaries();
    let last = sequences.get(sequences.count() - 1).unwrap();
    assert_eq!(last.tokens[(1 << 16) - 4..], [1, 2, 3, 4]);
    assert_eq!(last.labels[(1 << 16) - 4..], [2, 3, 4, IGNORED]);
    // Other tests run beside it.
    let more = resident() - before;
    assert!(more < 256 << 20, "{more} bytes");
    fs::remove_dir_all(&folder).unwrap();
}
