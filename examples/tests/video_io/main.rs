//! Clips on disk: what is read is what was written, frame by frame, and what cannot work is refused in a line.

mod ffmpeg;

use std::fs;
use std::path::{Path, PathBuf};

use burn_sp_examples::InputError;
use burn_sp_examples::video::{Captions, Dataset, Footage, Picture, contact_sheet, write_video};
use image::{ImageFormat, RgbImage};
use safetensors::{Dtype, tensor::TensorView};

/// An empty folder of a test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("video_io").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// That something is refused in one line that says all of this.
fn refused<T: std::fmt::Debug>(outcome: Result<T, InputError>, says: &[&str]) {
    let InputError(line) = outcome.unwrap_err();
    assert!(!line.contains('\n'), "{line}");
    for part in says {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}

/// A Y4M file of grey frames 3 wide and 2 high, each of one luma; the chroma planes are neutral.
fn greys(file: &Path, colours: &str, chroma: usize, frame_header: impl Fn(usize) -> String, lumas: &[u8]) {
    let mut bytes = format!("YUV4MPEG2 W3 H2 F8:1 Ip A1:1 {colours}\n").into_bytes();
    for (frame, luma) in lumas.iter().enumerate() {
        bytes.extend(frame_header(frame).bytes());
        bytes.extend([*luma; 6]);
        bytes.extend(vec![128; 2 * chroma]);
    }
    fs::write(file, bytes).unwrap();
}

fn plain(_: usize) -> String {
    "FRAME\n".into()
}

/// The grey of each frame, all of whose pixels should be the same.
fn levels(pictures: &[Picture]) -> Vec<u8> {
    let level = |picture: &Picture| {
        let level = picture.rgb[0];
        assert!(picture.rgb.iter().all(|byte| *byte == level), "{picture:?}");
        level
    };
    pictures.iter().map(level).collect()
}

#[test]
fn frames_of_y4m_are_found_whatever_their_headers_are() {
    let file = folder("headers").join("a.y4m");
    let lumas = [0, 30, 60, 90, 120];
    // Headers of other lengths, frame by frame.
    let odd = |frame: usize| format!("FRAME Ip{}\n", " X".repeat(frame % 3));
    for header in [&plain as &dyn Fn(usize) -> String, &odd] {
        greys(&file, "C444 XCOLORRANGE=FULL", 6, header, &lumas);
        let footage = Footage::open(&file).unwrap();
        assert_eq!((footage.frames(), footage.size()), (5, [2, 3]));
        assert_eq!(levels(&footage.read(0..5, [2, 3]).unwrap()), lumas);
        for (frame, luma) in lumas.into_iter().enumerate() {
            let alone = footage.read(frame..frame + 1, [2, 3]).unwrap();
            assert_eq!(levels(&alone), [luma]);
        }
        assert_eq!(levels(&footage.read(1..4, [8, 4]).unwrap()), lumas[1..4]);
        assert!(footage.read(2..2, [2, 3]).unwrap().is_empty());
    }
}

#[test]
fn planes_are_cut_as_the_colour_space_says() {
    let file = folder("planes").join("a.y4m");
    // In the limited range 16 is black and 235 white; without a colour space it is 4:2:0.
    for (colours, chroma) in [
        ("Cmono", 0),
        ("C420", 2),
        ("C420jpeg", 2),
        ("C420paldv", 2),
        ("C420mpeg2", 2),
        ("C422", 4),
        ("C444", 6),
        ("", 2),
    ] {
        greys(&file, colours, chroma, plain, &[16, 235]);
        let footage = Footage::open(&file).unwrap();
        assert_eq!(levels(&footage.read(0..2, [2, 3]).unwrap()), [0, 255], "{colours}");
    }
    // 4:2:0, 3 x 2: chroma samples are for columns 0 and 1, and for column 2. Red, then blue, by BT.601.
    let header = "YUV4MPEG2 W3 H2 F8:1 C420\nFRAME\n".bytes();
    let planes = [81, 81, 41, 81, 81, 41, 90, 240, 240, 110];
    fs::write(&file, header.chain(planes).collect::<Vec<_>>()).unwrap();
    let picture = &Footage::open(&file).unwrap().read(0..1, [2, 3]).unwrap()[0];
    for row in 0..2 {
        let pixels = [0, 1, 2].map(|column| picture.pixel(row, column));
        assert_eq!(pixels, [[254, 0, 0], [254, 0, 0], [0, 0, 255]]);
    }
}

#[test]
fn a_y4m_that_cannot_be_read_is_refused() {
    let file = folder("refused").join("a.y4m");
    let open = || Footage::open(&file).map(|footage| footage.frames());
    greys(&file, "C420p10", 2, plain, &[1]);
    refused(open(), &["a.y4m", "C420p10", "of 8 bits work"]);
    greys(&file, "C411", 2, plain, &[1]);
    refused(open(), &["not known", "420, 422 and 444"]);
    greys(&file, "C444", 6, plain, &[]);
    refused(open(), &["no frame in it"]);
    for damaged in [
        "RIFF",
        "",
        "YUV4MPEG2 W99999999999 H99999999999\n",
        "YUV4MPEG2 W99999 H99999\n",
        "YUV4MPEG2 H2\n",
    ] {
        fs::write(&file, damaged).unwrap();
        refused(open(), &["no Y4M header"]);
    }
    greys(&file, "C444", 6, plain, &[1, 2, 3]);
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    refused(open(), &["within frame 2", "write it anew"]);
    fs::write(&file, &whole[..whole.len() - 20]).unwrap();
    refused(open(), &["no header of frame 2"]);
    fs::remove_file(&file).unwrap();
    refused(open(), &["a.y4m", "No such file"]);
}

#[test]
fn what_is_asked_for_must_be_there() {
    let scene = Footage::scene(10);
    refused(scene.read(8..11, [4, 4]), &["8..11", "0..10"]);
    refused(scene.read(0..1, [4, 0]), &["0x4", "1x1"]);
    assert_eq!(scene.read(9..10, [4, 6]).unwrap()[0].size(), [4, 6]);
}

/// A picture of one grey, which also JPEG keeps.
fn save(file: &Path, level: u8, size: [usize; 2], format: ImageFormat) {
    let image = RgbImage::from(Picture::draw(size, |_, _| [level; 3]));
    image.save_with_format(file, format).unwrap();
}

/// The formats of pictures that are built in.
fn formats() -> Vec<(&'static str, ImageFormat)> {
    let mut formats = vec![("png", ImageFormat::Png), ("jpg", ImageFormat::Jpeg)];
    formats.retain(|(extension, format)| {
        let enabled = format.reading_enabled() && format.writing_enabled();
        if !enabled {
            println!("skipped: .{extension} is not built in");
        }
        enabled
    });
    formats
}

#[test]
fn pictures_of_a_folder_are_frames_in_the_order_of_their_numbers() {
    for (extension, format) in formats() {
        let folder = folder(&format!("pictures_{extension}"));
        for frame in [10, 2, 1, 9] {
            let file = folder.join(format!("frame_{frame}.{extension}"));
            save(&file, 16 * frame, [8, 16], format);
        }
        fs::write(folder.join("caption.txt"), "greys").unwrap();
        fs::write(folder.join(".hidden.png"), "no picture").unwrap();
        let footage = Footage::open(&folder).unwrap();
        assert_eq!((footage.frames(), footage.size()), (4, [8, 16]));
        assert_eq!(levels(&footage.read(0..4, [8, 16]).unwrap()), [16, 32, 144, 160]);
        assert_eq!(levels(&footage.read(2..3, [4, 4]).unwrap()), [144]);
        save(&folder.join(format!("frame_3.{extension}")), 0, [8, 8], format);
        refused(
            Footage::open(&folder),
            &[&format!("frame_3.{extension}"), "8x8", "16x8", "one size"],
        );
        fs::write(folder.join(format!("frame_3.{extension}")), "no picture").unwrap();
        refused(Footage::open(&folder), &[&format!("frame_3.{extension}")]);
    }
    refused(Footage::open(&folder("empty")), &["empty", "no pictures"]);
    // PNG's signature, of which the rest is missing, and another format's.
    for (extension, bytes) in [("png", &b"\x89PNG\r\n\x1a\n"[..]), ("jpg", b"GIF89a")] {
        let folder = folder("damaged");
        let name = format!("0.{extension}");
        fs::write(folder.join(&name), bytes).unwrap();
        refused(Footage::open(&folder), &[&name]);
    }
}

#[test]
fn a_data_set_is_what_lies_in_its_folders() {
    let folder = folder("data");
    let clip = |name: &str, frames: usize| greys(&folder.join(name), "Cmono", 0, plain, &vec![16; frames]);
    clip("clip_10.y4m", 3);
    clip("clip_2.y4m", 5);
    clip(".hidden.y4m", 7);
    fs::write(folder.join("clip_10.txt"), "the tenth\n\nand its end\n").unwrap();
    fs::write(folder.join("notes.md"), "no video").unwrap();
    fs::create_dir(folder.join("frames-of-grey")).unwrap();
    for frame in 0..2 {
        let file = folder.join(format!("frames-of-grey/{frame}.jpg"));
        save(&file, 100, [4, 4], ImageFormat::Jpeg);
    }
    fs::create_dir(folder.join("nothing")).unwrap();
    let dataset = Dataset::open(Some(std::slice::from_ref(&folder))).unwrap();
    let found = dataset.clips().iter().map(|clip| {
        let name = clip.footage.path().file_name().unwrap().to_string_lossy().into_owned();
        (name, clip.footage.frames(), clip.captions.clone())
    });
    let prompts = |lines: &[&str]| Captions::Prompts(lines.iter().map(|line| line.to_string()).collect());
    assert_eq!(
        found.collect::<Vec<_>>(),
        [
            ("clip_2.y4m".into(), 5, prompts(&["clip 2"])),
            ("clip_10.y4m".into(), 3, prompts(&["the tenth", "and its end"])),
            ("frames-of-grey".into(), 2, prompts(&["frames of grey"])),
        ]
    );
    assert_eq!(
        dataset.line(3, 2),
        "video: 10 frames in 3 clips, 1 clip passed over (shorter than 3 frames), 1 file passed over (no video), 2 clips \
         with captions cut to 2 tokens"
    );
    // A folder of pictures that is named is a clip, and so is a file.
    let paths = ["frames-of-grey", "clip_2.y4m"].map(|name| folder.join(name));
    let dataset = Dataset::open(Some(&paths)).unwrap();
    assert_eq!(dataset.line(1, 9), "video: 7 frames in 2 clips");
    refused(dataset.sampler(6), &["6 frames", "longest of 2 has 5"]);
    refused(
        Dataset::open(Some(&[folder.join("nothing")])),
        &["nothing", "no videos"],
    );
    fs::write(folder.join("clip_10.txt"), " \n...\n").unwrap();
    refused(Dataset::open(Some(&[folder])), &["clip_10.txt", "no words"]);
}

#[test]
fn without_paths_the_scene_is_rendered() {
    let dataset = Dataset::open(None).unwrap();
    let [clip] = dataset.clips() else { panic!("one clip") };
    assert_eq!(clip.captions, Captions::scene());
    assert_eq!(dataset.line(381, 512), "video: 10000 frames in 1 clip");
}

#[test]
fn captions_may_be_vectors() {
    let folder = folder("vectors");
    let clip = folder.join("a.mp4");
    let values = [0.5f32, -2.0, 3.0, 0.25, 1.0, 8.0];
    let write = |name: &str, dtype, shape: &[usize], bytes: Vec<u8>| {
        let tensor = TensorView::new(dtype, shape.into(), &bytes).unwrap();
        fs::write(
            folder.join("a.safetensors"),
            safetensors::serialize([(name, tensor)], None).unwrap(),
        )
        .unwrap();
        Captions::of(&clip)
    };
    let f32s = || values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let bf16s = || {
        values
            .iter()
            .flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes())
            .collect::<Vec<_>>()
    };
    let embedded = |blocks, tokens| Captions::Embedded {
        blocks,
        tokens,
        dim: 2,
        values: values.into(),
    };
    assert_eq!(write("text", Dtype::F32, &[3, 2], f32s()), Ok(embedded(1, 3)));
    assert_eq!(write("text", Dtype::BF16, &[3, 1, 2], bf16s()), Ok(embedded(3, 1)));
    // 1, -2 and 0.5 of binary16.
    let halves = [0x3c00u16, 0xc000, 0x3800].iter().flat_map(|half| half.to_le_bytes());
    let Ok(Captions::Embedded { values, .. }) = write("text", Dtype::F16, &[1, 3], halves.collect()) else {
        panic!("f16 is read");
    };
    assert_eq!(values, [1.0, -2.0, 0.5]);
    refused(write("other", Dtype::F32, &[3, 2], f32s()), &["\"text\"", "but: other"]);
    refused(write("text", Dtype::F32, &[6], f32s()), &["[6]", "[tokens, dim]"]);
    refused(write("text", Dtype::U16, &[3, 2], bf16s()), &["U16", "BF16 work"]);
    let nan = f32::NAN.to_le_bytes().into();
    refused(write("text", Dtype::F32, &[1, 1], nan), &["number 0", "NaN"]);
}

#[test]
fn a_contact_sheet_is_written_whole_or_not_at_all() {
    let folder = folder("sheet");
    let scene = Footage::scene(48).read(0..48, [32, 32]).unwrap();
    for (extension, format) in formats() {
        let file = folder.join(format!("sheet.{extension}"));
        contact_sheet("--sheet", &file, &[&scene, &scene[..4]], 3).unwrap();
        let sheet = image::open(&file).unwrap();
        // 8 cells of 96 and 7 gaps of 2, in two rows with one.
        assert_eq!((sheet.width(), sheet.height()), (8 * 96 + 14, 2 * 96 + 2));
        if format == ImageFormat::Png {
            assert_eq!(Picture::from(sheet).pixel(0, 0), scene[0].pixel(0, 0));
        }
    }
    let count = formats().len();
    for (name, rows, says) in [
        ("none.jpg", &[][..], "takes a frame"),
        ("sheet.abc", &[&scene[..]][..], "sheet.abc"),
        ("no/folder/sheet.jpg", &[&scene[..]][..], "No such file"),
    ] {
        let error = contact_sheet("--sheet", &folder.join(name), rows, 1)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("--sheet ") && error.contains(says), "{error}");
    }
    assert_eq!(fs::read_dir(folder).unwrap().count(), count);
}

#[test]
fn a_clip_is_written_and_read_again() {
    let folder = folder("written");
    let scene = Footage::scene(12).read(0..12, [31, 33]).unwrap();
    let file = write_video("--video", &folder.join("run.v1"), &scene, 8).unwrap();
    let footage = Footage::open(&file).unwrap();
    assert_eq!(footage.frames(), 12);
    let read = footage.read(0..12, [31, 33]).unwrap();
    if file.ends_with("run.v1.mp4") {
        // 8 times as large, and even.
        assert_eq!(footage.size(), [248, 264]);
    }
    for (written, read) in scene.iter().zip(&read) {
        let distance: u64 = written
            .rgb
            .iter()
            .zip(&read.rgb)
            .map(|(a, b)| u64::from(a.abs_diff(*b)))
            .sum();
        assert!(distance < 8 * written.rgb.len() as u64, "{distance}");
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    let sizes = [scene[0].clone(), scene[0].clone().fit([8, 8])];
    for (pictures, fps) in [(&scene[..0], 8), (&scene[..], 0), (&sizes[..], 8)] {
        let error = write_video("--video", &folder.join("b"), pictures, fps)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("--video ") && error.contains("one size"), "{error}");
    }
    let error = write_video("--video", &folder.join("no/b"), &scene, 8)
        .unwrap_err()
        .to_string();
    assert!(error.contains("ffmpeg: ") || error.contains("No such file"), "{error}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}
