use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Cursor, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use image::{ImageFormat, RgbImage};
use y4m::{Colorspace, Frame, Ratio};

use super::Picture;
use super::ffmpeg::{Running, url};
use super::y4m::ColourRange;
use crate::RunError;

/// The shorter side that small clips are enlarged to, about, in an MP4.
const VISIBLE: usize = 256;

/// Frames of a clip on a contact sheet, at most.
const COLUMNS: usize = 8;

/// Pixels between them, and their colour.
const GAP: usize = 2;
const PAPER: [u8; 3] = [32; 3];

/// Writes a clip, `fps` frames a second, beside the name `path` with an extension added: `.mp4` (H.264) by ffmpeg if that is
/// installed and can, pixels of small pictures enlarged to squares; else `.y4m`, in the pictures' own size. Returns the file.
///
/// `flag` is what asked for it, for errors. A crash leaves no half a file there.
///
/// # Errors
/// If there are no pictures, or of several sizes, or no frames a second, or if writing fails.
pub fn write_video(flag: &'static str, path: &Path, pictures: &[Picture], fps: usize) -> Result<PathBuf, RunError> {
    let with = |extension: &str| {
        let mut file = OsString::from(path);
        file.push(extension);
        PathBuf::from(file)
    };
    let failed = RunError::output(flag, path);
    let size = pictures.first().map_or([0; 2], Picture::size);
    if size.contains(&0) || fps == 0 || pictures.iter().any(|picture| picture.size() != size) {
        return Err(failed(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a video takes a picture at least, all of one size, and a frame a second at least",
        )));
    }
    let mp4 = with(".mp4");
    // An ffmpeg that cannot, say without H.264, is as good as none: training must not end for it. A full disk shows below.
    if replace(&mp4, |part| by_ffmpeg(part, pictures, fps)).is_ok() {
        return Ok(mp4);
    }
    let y4m = with(".y4m");
    replace(&y4m, |part| as_y4m(part, pictures, fps)).map_err(RunError::output(flag, &y4m))?;
    Ok(y4m)
}

/// Writes the file beside itself, then puts it in its place.
fn replace(file: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut part = OsString::from(file);
    part.push(".part");
    let part = Path::new(&part);
    let outcome = write(part)
        .and_then(|()| File::open(part)?.sync_all())
        .and_then(|()| fs::rename(part, file));
    if outcome.is_err() && part.exists() {
        fs::remove_file(part)?;
    }
    outcome
}

fn by_ffmpeg(file: &Path, pictures: &[Picture], fps: usize) -> io::Result<()> {
    let [height, width] = pictures[0].size();
    let times = (VISIBLE / height.min(width)).max(1);
    let filter = format!("scale=iw*{times}:ih*{times}:flags=neighbor,pad=ceil(iw/2)*2:ceil(ih/2)*2");
    let mut command = Command::new("ffmpeg");
    command
        .args(["-v", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"])
        .args([
            "-video_size",
            &format!("{width}x{height}"),
            "-framerate",
            &fps.to_string(),
        ])
        .args([
            "-i", "pipe:0", "-vf", &filter, "-c:v", "libx264", "-pix_fmt", "yuv420p", "-f", "mp4",
        ])
        .arg(url(file))
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    let mut running = Running::start(&mut command)?;
    let mut pipe = running.child.stdin.take().expect("stdin is piped");
    let outcome = pictures.iter().try_for_each(|picture| pipe.write_all(&picture.rgb));
    drop(pipe);
    // Its own words say more than a broken pipe.
    running.finish().and(outcome)
}

/// Without loss of chroma's resolution (4:4:4), in the range that players expect.
fn as_y4m(file: &Path, pictures: &[Picture], fps: usize) -> io::Result<()> {
    let [height, width] = pictures[0].size();
    let header = y4m::encode(width, height, Ratio::new(fps, 1)).with_colorspace(Colorspace::C444);
    let mut out = BufWriter::new(File::create(file)?);
    let mut encoder = header.write_header(&mut out).map_err(io::Error::other)?;
    for picture in pictures {
        let mut planes = [const { Vec::new() }; 3];
        for rgb in picture.rgb.as_chunks().0 {
            for (plane, value) in planes.iter_mut().zip(ColourRange::Limited.ycbcr(*rgb)) {
                plane.push(value);
            }
        }
        let frame = Frame::new([&planes[0], &planes[1], &planes[2]], None);
        encoder.write_frame(&frame).map_err(io::Error::other)?;
    }
    out.flush()
}

/// Writes clips as one picture: a row each, of up to 8 frames at even distances, each pixel a square of `scale`. The file's
/// extension says in which format (those that are built in).
///
/// `flag` is what asked for it, for errors. A crash leaves no half a file there.
///
/// # Errors
/// If there are no frames, `scale` is 0, or writing fails.
pub fn contact_sheet(flag: &'static str, path: &Path, rows: &[&[Picture]], scale: usize) -> Result<(), RunError> {
    let sheet = sheet(rows, scale);
    let write = |part: &Path| {
        if sheet.size().contains(&0) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a contact sheet takes a frame and a scale of 1 at least",
            ));
        }
        let mut bytes = Cursor::new(Vec::new());
        ImageFormat::from_path(path)
            .and_then(|format| RgbImage::from(sheet).write_to(&mut bytes, format))
            .map_err(io::Error::other)?;
        fs::write(part, bytes.into_inner())
    };
    replace(path, write).map_err(RunError::output(flag, path))
}

/// Cells of the largest picture's size; smaller ones lie in the upper left corners of theirs.
fn sheet(rows: &[&[Picture]], scale: usize) -> Picture {
    let chosen: Vec<Vec<&Picture>> = rows.iter().map(|clip| evenly(clip)).collect();
    let all = || chosen.iter().flatten();
    let largest = |side: fn(&Picture) -> usize| scale * all().map(|picture| side(picture)).max().unwrap_or(0);
    let [height, width] = [largest(|picture| picture.height), largest(|picture| picture.width)];
    let columns = chosen.iter().map(Vec::len).max().unwrap_or(0);
    if height * width == 0 {
        return Picture::draw([0, 0], |_, _| PAPER);
    }
    let with_gaps = |count: usize, cell: usize| count * (cell + GAP) - GAP;
    Picture::draw(
        [with_gaps(rows.len(), height), with_gaps(columns, width)],
        |row, column| {
            let cell = chosen[row / (height + GAP)].get(column / (width + GAP));
            let [row, column] = [row % (height + GAP) / scale, column % (width + GAP) / scale];
            match cell {
                Some(picture) if row < picture.height && column < picture.width => picture.pixel(row, column),
                _ => PAPER,
            }
        },
    )
}

/// All frames of a clip, or 8 of them with the first and the last.
fn evenly(clip: &[Picture]) -> Vec<&Picture> {
    let count = clip.len().min(COLUMNS);
    let at = |index: usize| index * (clip.len() - 1) / (count - 1).max(1);
    (0..count).map(|index| &clip[at(index)]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Footage;
    use super::*;

    fn flat(red: u8, size: [usize; 2]) -> Picture {
        Picture::draw(size, |_, _| [red, 0, 0])
    }

    /// What is written where there is no ffmpeg.
    #[test]
    fn y4m_comes_back_up_to_its_own_rounding() {
        let folder = std::env::temp_dir().join(format!("burn-sp-write-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("a.y4m");
        let scene = Footage::scene(40).read(20..25, [31, 33]).unwrap();
        replace(&file, |part| as_y4m(part, &scene, 8)).unwrap();
        let read = Footage::open(&file).unwrap().read(0..5, [31, 33]).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let rounded = scene.iter().map(|picture| {
            let pixel = |row, column| ColourRange::Limited.rgb(ColourRange::Limited.ycbcr(picture.pixel(row, column)));
            Picture::draw(picture.size(), pixel)
        });
        assert_eq!(read, rounded.collect::<Vec<_>>());
        for (written, read) in scene.iter().zip(&read) {
            let mut bytes = written.rgb.iter().zip(&read.rgb);
            assert!(bytes.all(|(written, read)| written.abs_diff(*read) <= 2));
        }
    }

    #[test]
    fn a_sheet_has_a_row_a_clip() {
        let first = [flat(1, [1, 2]), flat(2, [1, 2])];
        let second = [flat(3, [1, 1])];
        let sheet = sheet(&[&first, &second], 2);
        // Cells of 2 x 4, and gaps of 2.
        assert_eq!(sheet.size(), [6, 10]);
        let red = |row: usize| (0..10).map(|column| sheet.pixel(row, column)[0]).collect::<Vec<_>>();
        assert_eq!(red(0), [1, 1, 1, 1, 32, 32, 2, 2, 2, 2]);
        assert_eq!(red(1), red(0));
        assert_eq!((red(2), red(3)), (vec![32; 10], vec![32; 10]));
        assert_eq!(red(5), [3, 3, 32, 32, 32, 32, 32, 32, 32, 32]);
    }

    #[test]
    fn frames_are_chosen_at_even_distances() {
        let reds = |frames: u8| {
            let clip: Vec<Picture> = (0..frames).map(|frame| flat(frame, [1, 1])).collect();
            evenly(&clip).iter().map(|picture| picture.rgb[0]).collect::<Vec<_>>()
        };
        assert_eq!(reds(15), [0, 2, 4, 6, 8, 10, 12, 14]);
        assert_eq!(reds(8), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!((reds(0), reds(1), reds(2)), (vec![], vec![0], vec![0, 1]));
    }
}
