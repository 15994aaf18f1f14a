//! The data that steps see: a function of seed, step and sample, and of nothing else.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use burn::tensor::Device;
use burn_sp_examples::text::Text;

/// Bytes whose neighbours tell where they are.
fn counting(len: usize) -> Text {
    Text::new((0..len).map(|index| (index % 251) as u8).collect())
}

#[test]
fn a_window_depends_on_seed_step_and_sample() {
    let text = Text::new((0..5000u32).flat_map(|index| index.to_le_bytes()).collect());
    let mut seen = HashSet::new();
    for seed in 0..3 {
        for step in 0..5 {
            for sample in 0..4 {
                let window = text.window(seed, step, sample, 100);
                assert_eq!(window.len(), 101);
                assert_eq!(window, text.window(seed, step, sample, 100));
                assert!(
                    seen.insert(window.to_vec()),
                    "seed {seed}, step {step}, sample {sample}"
                );
            }
        }
    }
}

/// However a mesh or accumulation groups the samples of a step, they are the same.
#[test]
fn windows_do_not_depend_on_how_samples_are_grouped() {
    let text = counting(10_000);
    let device = Device::flex();
    let rows = |samples| {
        text.windows(3, 8, samples, 20, &device)
            .into_data()
            .iter::<i64>()
            .collect::<Vec<_>>()
    };
    let whole = rows(0..6);
    assert_eq!(whole, [rows(0..1), rows(1..4), rows(4..6)].concat());
    let one: Vec<i64> = text.window(3, 8, 0, 20).iter().map(|byte| i64::from(*byte)).collect();
    assert_eq!(whole[..21], one);
}

#[test]
fn windows_reach_all_of_the_training_text_and_none_of_the_rest() {
    let text = Text::new((0..100).collect());
    assert_eq!((text.training().len(), text.held_out().len()), (90, 10));
    let mut starts = HashSet::new();
    for step in 0..2000 {
        let window = text.window(1, step, 0, 80);
        assert!(*window.last().unwrap() < 90);
        starts.insert(window[0]);
    }
    assert_eq!(starts.len(), 10);
}

#[test]
fn validation_looks_at_fixed_windows_of_what_is_held_out() {
    let text = counting(10_000);
    let device = Device::flex();
    let batches = text.validation(8, 20, 3, &device);
    let shapes: Vec<_> = batches.iter().map(|batch| batch.dims()).collect();
    // No batch is smaller than asked for: every data-parallel rank needs a sample.
    assert_eq!(shapes, [[4, 21], [4, 21]]);
    let first = batches[0].to_data().iter::<i64>().collect::<Vec<_>>();
    assert_eq!(first[..2], [9000 % 251, 9001 % 251]);
    let last = batches[1].to_data().iter::<i64>().collect::<Vec<_>>();
    assert_eq!(last[83], 9999 % 251);
    // Little is held out: a window as wide as it goes, as often as asked for.
    let short = Text::new(vec![1; 100]).validation(8, 50, 3, &device);
    assert_eq!(short.iter().map(|batch| batch.dims()).collect::<Vec<_>>(), [[3, 10]]);
}

#[test]
fn folders_are_read_in_order_and_only_their_text() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("text");
    let _ = fs::remove_dir_all(&folder);
    for (name, content) in [
        ("b.txt", &b"second"[..]),
        ("a/one.md", b"first "),
        ("c.bin", &[0xff]),
        (".hidden", b"hidden"),
        ("target/built.txt", b"built"),
    ] {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let text = Text::read(Some(&[folder])).unwrap();
    assert_eq!([text.training(), text.held_out()].concat(), b"first second");
    assert_eq!(
        text.line(),
        "text: 12 bytes from 2 files, 1 passed over (not UTF-8); the last 2 are held out"
    );
}

/// A snapshot of Hugging Face's hub is nothing but links to files.
#[test]
#[cfg(unix)]
fn links_lead_to_files_and_what_is_none_is_counted() {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("links");
    let _ = fs::remove_dir_all(&folder);
    let snapshot = folder.join("snapshot");
    fs::create_dir_all(snapshot.join("part")).unwrap();
    fs::write(folder.join("blob"), "linked ").unwrap();
    symlink("../blob", snapshot.join("a.txt")).unwrap();
    symlink("../../blob", snapshot.join("part/b.txt")).unwrap();
    symlink("../none", snapshot.join("c.txt")).unwrap();
    symlink("..", snapshot.join("round")).unwrap();
    fs::write(snapshot.join("d.bin"), [0xff]).unwrap();
    // The path of a socket must be short.
    let socket = std::env::temp_dir().join(format!("burn-sp-{}", std::process::id()));
    let _listener = UnixListener::bind(&socket).unwrap();
    fs::rename(&socket, snapshot.join("e")).unwrap();
    let text = Text::read(Some(std::slice::from_ref(&snapshot))).unwrap();
    assert_eq!([text.training(), text.held_out()].concat(), b"linked linked ");
    assert_eq!(
        text.line(),
        "text: 14 bytes from 2 files, 1 passed over (not UTF-8), 3 passed over (links to folders, or no files); the last 2 are \
         held out"
    );
    // One that is named is not passed over, and a link that is named is followed.
    for (name, said) in [
        ("e", "that is neither a file nor a folder; name one"),
        ("c.txt", "No such file or directory (os error 2)"),
    ] {
        let path = snapshot.join(name);
        let error = Text::read(Some(std::slice::from_ref(&path))).unwrap_err().to_string();
        assert_eq!(error, format!("--text {}: {said}", path.display()));
    }
    let link = folder.join("link");
    symlink("snapshot/part", &link).unwrap();
    assert_eq!(Text::read(Some(&[link])).unwrap().training(), b"linked");
}

#[test]
fn texts_are_told_apart_by_what_is_in_them() {
    assert_eq!(Text::new(b"foobar".to_vec()).digest(), "6 bytes, hash 85944171f73967e8");
}

#[test]
fn with_no_paths_the_workspace_is_the_text() {
    let text = Text::read(None).unwrap();
    assert!(text.training().len() > 100_000);
    text.check(1024).unwrap();
}
