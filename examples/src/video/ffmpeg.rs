//! Everything else that holds frames, by the programs `ffprobe` and `ffmpeg`, if they are installed.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

use super::footage::Source;
use super::{Picture, wrong};
use crate::InputError;

/// A file that ffmpeg reads.
#[derive(Debug)]
pub struct Ffmpeg {
    path: PathBuf,
    frames: usize,
    /// When each frame is shown, in seconds, if the file says so of all of them and can be looked up.
    times: Option<Vec<f64>>,
    size: [usize; 2],
    /// The flags that make it hand out each frame once, whatever its time.
    once: [&'static str; 2],
}

impl Ffmpeg {
    /// Lists the frames (as packets, so nothing is decoded) of the first video stream.
    pub fn open(path: &Path) -> Result<Self, InputError> {
        let ask = |command: &mut Command| {
            let output = command.stdin(Stdio::null()).output();
            let output = output.map_err(|error| wrong(path, reason(&error)))?;
            match output.status.success() {
                true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
                false => Err(wrong(path, unreadable(&last_line(&output.stderr)))),
            }
        };
        let entries = "stream=width,height:stream_side_data=rotation:packet=pts_time,flags:format=format_name";
        let found = ask(Command::new("ffprobe")
            .args(["-v", "error", "-select_streams", "v:0"])
            .args(["-show_entries", entries, "-of", "default=noprint_wrappers=1"])
            .arg(url(path)))?;
        let value = |name: &str| {
            found
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
        };
        let number = |name| value(name)?.parse().ok().filter(|number| *number > 0);
        // Packets that are marked D are decoded for the sake of others, and not shown.
        let packets = found.lines().filter_map(|line| line.strip_prefix("flags="));
        let shown: Vec<bool> = packets.map(|flags| !flags.contains('D')).collect();
        let frames = shown.iter().filter(|shown| **shown).count();
        let (Some(height), Some(width), 1..) = (number("height"), number("width"), frames) else {
            return Err(wrong(path, "no video is in it; give a file with a video stream"));
        };
        // In the order in which they are decoded; a frame is shown later than some that come after it.
        let times = found.lines().filter_map(|line| line.strip_prefix("pts_time="));
        let times: Option<Vec<f64>> = times.map(|time| time.parse().ok()).collect();
        // These have an index. In others, ffmpeg may land behind what it looks for.
        let indexed = value("format_name").is_some_and(|name| name.contains("mp4") || name.contains("matroska"));
        let times = times
            .filter(|times| indexed && times.len() == shown.len())
            .map(|times| {
                let pairs = times.into_iter().zip(shown);
                let mut times: Vec<f64> = pairs.filter(|(_, shown)| *shown).map(|(time, _)| time).collect();
                times.sort_by(f64::total_cmp);
                times
            });
        // A camera that was held upright; ffmpeg turns the frames, its probe does not.
        let turned = value("rotation").and_then(|degrees| degrees.parse::<f64>().ok());
        let turned = turned.is_some_and(|degrees| degrees.rem_euclid(180.0) == 90.0);
        Ok(Self {
            path: path.into(),
            frames,
            times,
            size: if turned { [width, height] } else { [height, width] },
            once: once(&ask(Command::new("ffmpeg").arg("-version"))?),
        })
    }
}

impl Source for Ffmpeg {
    fn frames(&self) -> usize {
        self.frames
    }

    fn size(&self) -> [usize; 2] {
        self.size
    }

    fn read(&self, frames: Range<usize>, size: [usize; 2]) -> Result<Vec<Picture>, InputError> {
        let failed = |error: io::Error| wrong(&self.path, reason(&error));
        let mut command = Command::new("ffmpeg");
        command.args(["-v", "error", "-nostdin"]);
        let mut first = frames.start;
        if let Some([before, start]) = self.around(frames.start) {
            // It decodes from the picture before that stands alone, and hands out what is shown from then on.
            let time = format!("{:.6}", (before + start) / 2.0);
            command.args(["-seek_timestamp", "1", "-ss", &time]);
            first = 0;
        }
        let select = format!("select='between(n\\,{first}\\,{})'", first + frames.len() - 1);
        command
            .arg("-i")
            .arg(url(&self.path))
            .args(["-map", "0:v:0", "-vf", &select, "-frames:v", &frames.len().to_string()])
            .args(self.once)
            .args(["-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut running = Running::start(&mut command).map_err(failed)?;
        let mut pictures = Vec::with_capacity(frames.len());
        let [height, width] = self.size;
        let mut pipe = running.child.stdout.take().expect("stdout is piped");
        let outcome: io::Result<()> = frames.clone().try_for_each(|_| {
            let mut rgb = vec![0; 3 * height * width];
            pipe.read_exact(&mut rgb)?;
            pictures.push(Picture { width, height, rgb }.fit(size));
            Ok(())
        });
        drop(pipe);
        // The pipe is closed, so it ends, whatever happened.
        running
            .finish()
            .map_err(|error| wrong(&self.path, unreadable(&error)))?;
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(wrong(
                &self.path,
                format_args!(
                    "ffmpeg gave {} of the frames {}..{}, though {} were counted; write the file anew",
                    pictures.len(),
                    frames.start,
                    frames.end,
                    self.frames
                ),
            )),
            outcome => outcome.map(|()| pictures).map_err(failed),
        }
    }
}

impl Ffmpeg {
    /// When a frame and the one before it are shown, if that tells them apart.
    fn around(&self, frame: usize) -> Option<[f64; 2]> {
        let times = self.times.as_ref()?;
        let [before, start] = [times[frame.checked_sub(1)?], times[frame]];
        // Half of what lies between must survive being written down.
        (start - before > 1e-5).then_some([before, start])
    }
}

/// A program whose complaints are read while it works, so that it never waits for a reader of them.
pub struct Running {
    pub child: Child,
    complaints: JoinHandle<io::Result<Vec<u8>>>,
}

impl Running {
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command.stderr(Stdio::piped()).spawn()?;
        let stderr = child.stderr.take();
        let complaints = thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut stderr) = stderr {
                stderr.read_to_end(&mut bytes)?;
            }
            Ok(bytes)
        });
        Ok(Self { child, complaints })
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// With the last line of its complaints if it failed.
    pub fn finish(mut self) -> io::Result<()> {
        let status = self.child.wait()?;
        let complaints = self.complaints.join().expect("reading does not panic")?;
        match status.success() {
            true => Ok(()),
            false => Err(io::Error::other(last_line(&complaints))),
        }
    }
}

/// Without a protocol in front, a colon in a path would be taken for the end of one.
pub fn url(path: &Path) -> OsString {
    let mut url = OsString::from("file:");
    url.push(path);
    url
}

/// What the program said at the end, which is what made it end.
fn last_line(complaints: &[u8]) -> String {
    let text = String::from_utf8_lossy(complaints);
    match text.lines().map(str::trim).rfind(|line| !line.is_empty()) {
        Some(line) => format!("ffmpeg: {line}"),
        None => "ffmpeg failed and does not say why".into(),
    }
}

fn unreadable(error: &dyn Display) -> String {
    format!("{error}; give a file that ffmpeg can read, a .y4m file or a folder of pictures")
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "reading it takes ffmpeg, which is not installed; install that, or give a .y4m file or a folder of pictures"
                .into()
        }
        _ => error.to_string(),
    }
}

/// The flags changed their name in 5.1. What is no release is newer than that.
fn once(version: &str) -> [&'static str; 2] {
    let number = version.strip_prefix("ffmpeg version ").unwrap_or_default();
    let number = number.trim_start_matches('n');
    let mut parts = number.split(['.', '-', ' ']).map_while(|part| part.parse::<u32>().ok());
    match (parts.next(), parts.next()) {
        (Some(major), minor) if (major, minor.unwrap_or(0)) < (5, 1) => ["-vsync", "0"],
        _ => ["-fps_mode", "passthrough"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_go_by_the_version() {
        let old = ["-vsync", "0"];
        let new = ["-fps_mode", "passthrough"];
        let cases = [
            ("ffmpeg version 4.4.2-0ubuntu0.22.04.1 Copyright", old),
            ("ffmpeg version n4.4 Copyright", old),
            ("ffmpeg version 5.0 Copyright", old),
            ("ffmpeg version 5.1.9-0+deb12u1 Copyright", new),
            ("ffmpeg version 6.0 Copyright", new),
            ("ffmpeg version n7.1-12-gabc Copyright", new),
            ("ffmpeg version N-109468-gd39b34123d Copyright", new),
            ("", new),
        ];
        for (version, flags) in cases {
            assert_eq!(once(version), flags, "{version}");
        }
    }

    #[test]
    fn a_program_that_complains_a_lot_ends_with_its_last_line() {
        // More than a pipe holds.
        let script = "i=0; while [ $i -lt 20000 ]; do echo complaint $i >&2; i=$((i+1)); done; echo >&2; exit 3";
        let running = match Running::start(Command::new("sh").args(["-c", script])) {
            Ok(running) => running,
            Err(error) => return eprintln!("skipped: no sh ({error})"),
        };
        let error = running.finish().unwrap_err().to_string();
        assert_eq!(error, "ffmpeg: complaint 19999");
    }
}
