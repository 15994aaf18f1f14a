//! What ffmpeg reads, where it is installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use burn_sp_examples::video::{Footage, Picture};

use super::{folder, refused};

/// Makes a clip of ffmpeg's test pictures, 16 of 64 x 48, if there is ffmpeg.
fn test_pictures(file: &Path, more: &[&str]) -> bool {
    let made = Command::new("ffmpeg")
        .args([
            "-v",
            "error",
            "-f",
            "lavfi",
            "-i",
            "testsrc=size=64x48:rate=8:duration=2",
        ])
        .args(more)
        .arg(file)
        .status();
    match made {
        Ok(status) => assert!(status.success()),
        Err(error) => println!("skipped: no ffmpeg ({error})"),
    }
    file.exists()
}

#[test]
fn ffmpeg_reads_a_frame_alone_as_it_reads_all() {
    let folder = folder("ffmpeg");
    // A colon and a dash in front, which ffmpeg would take for a protocol and a flag.
    let file = folder.join("-a:b.mp4");
    if !test_pictures(&folder.join("plain.mp4"), &[]) {
        // What it would have read is refused, with what works.
        fs::write(&file, "anything").unwrap();
        return refused(Footage::open(&file), &["-a:b.mp4", "install", ".y4m"]);
    }
    fs::rename(folder.join("plain.mp4"), &file).unwrap();
    let footage = Footage::open(&file).unwrap();
    assert_eq!((footage.frames(), footage.size()), (16, [48, 64]));
    let all = footage.read(0..16, [48, 64]).unwrap();
    assert_eq!(all.len(), 16);
    for frame in [0, 1, 7, 15] {
        assert_eq!(footage.read(frame..frame + 1, [48, 64]).unwrap(), all[frame..=frame]);
    }
    assert_eq!(footage.read(3..9, [48, 64]).unwrap(), all[3..9]);
    assert_ne!(all[0], all[8]);
    let small: Vec<Picture> = all[4..6].iter().map(|picture| picture.clone().fit([20, 20])).collect();
    assert_eq!(footage.read(4..6, [20, 20]).unwrap(), small);
    // Several ranks at once.
    std::thread::scope(|scope| {
        let ranks = [0..5, 5..11, 11..16].map(|frames| scope.spawn(|| footage.read(frames, [48, 64]).unwrap()));
        let read: Vec<Picture> = ranks.into_iter().flat_map(|rank| rank.join().unwrap()).collect();
        assert_eq!(read, all);
    });
    // Its bytes go after it was looked at.
    fs::write(&file, "no video").unwrap();
    refused(footage.read(0..2, [48, 64]), &["-a:b.mp4", "ffmpeg:", "Invalid data"]);
    refused(Footage::open(&file), &["Invalid data found", ".y4m"]);
}

/// Wherever pictures stand alone, whenever the video starts, and whatever is cut off without decoding.
#[test]
fn a_window_is_found_in_the_middle() {
    let folder = folder("middle");
    let rare = folder.join("rare.mkv");
    if !test_pictures(&rare, &["-c:v", "libx264", "-g", "9", "-bf", "2"]) {
        return;
    }
    let derived = |name: &str, before: &[&str], after: &[&str]| {
        let file = folder.join(name);
        let mut command = Command::new("ffmpeg");
        command
            .args(["-v", "error"])
            .args(before)
            .arg("-i")
            .arg(&rare)
            .args(after)
            .arg(&file);
        assert!(command.status().unwrap().success(), "{name}");
        file
    };
    let files = [
        rare.clone(),
        derived("later.mp4", &["-itsoffset", "1.7"], &["-c", "copy"]),
        derived("cut.mp4", &["-ss", "0.6"], &["-c", "copy"]),
        derived("stream.ts", &[], &["-c", "copy"]),
        derived("alone.mjpeg", &[], &["-c:v", "mjpeg"]),
        // Without times.
        derived("bare.h264", &[], &["-c", "copy"]),
    ];
    for file in files {
        let footage = Footage::open(&file).unwrap();
        let count = footage.frames();
        assert!(count > 8, "{}: {count}", file.display());
        let all = footage.read(0..count, [48, 64]).unwrap();
        for start in (0..count).step_by(2) {
            let end = (start + 3).min(count);
            let found = footage.read(start..end, [48, 64]).unwrap();
            assert!(found == all[start..end], "{}, from {start}", file.display());
        }
    }
}

/// If the reader here understands planes and range, two converters of colour differ by their rounding, a level each.
#[test]
fn y4m_of_ffmpeg_is_read_as_ffmpeg_reads_it() {
    let folder = folder("ffmpeg_y4m");
    for (name, format) in [("limited", "yuv444p"), ("full", "yuvj444p"), ("grey", "gray")] {
        let file = folder.join(format!("{name}.y4m"));
        if !test_pictures(&file, &["-pix_fmt", format]) {
            return;
        }
        let ours = Footage::open(&file).unwrap().read(0..16, [48, 64]).unwrap();
        let other = folder.join(format!("{name}.bin"));
        fs::copy(&file, &other).unwrap();
        let theirs = Footage::open(&other).unwrap().read(0..16, [48, 64]).unwrap();
        for (ours, theirs) in ours.iter().zip(&theirs) {
            let worst = ours
                .rgb
                .iter()
                .zip(&theirs.rgb)
                .map(|(left, right)| left.abs_diff(*right));
            assert!(worst.max().unwrap() <= 2, "{name}");
        }
    }
}

#[test]
fn ffmpeg_turns_what_a_camera_held_upright_took() {
    let folder = folder("turned");
    let file = folder.join("a.mp4");
    if !test_pictures(&file, &[]) {
        return;
    }
    let turned = folder.join("turned.mp4");
    let made = Command::new("ffmpeg")
        .args(["-v", "error", "-i"])
        .arg(&file)
        .args(["-c", "copy", "-metadata:s:v:0", "rotate=90"])
        .arg(&turned)
        .status()
        .unwrap();
    assert!(made.success());
    let [upright, turned] = [&file, &turned].map(|file| Footage::open(file).unwrap());
    if turned.size() == upright.size() {
        return println!("skipped: this ffmpeg takes no rotate tag");
    }
    assert_eq!(turned.size(), [64, 48]);
    let [upright, turned] = [(upright, [48, 64]), (turned, [64, 48])].map(|(footage, size)| {
        let pictures = footage.read(5..6, size).unwrap();
        pictures.into_iter().next().unwrap()
    });
    // By a quarter turn one way or the other.
    let clockwise = Picture::draw([64, 48], |row, column| upright.pixel(47 - column, row));
    let back = Picture::draw([64, 48], |row, column| upright.pixel(column, 63 - row));
    assert!(turned == clockwise || turned == back);
}
