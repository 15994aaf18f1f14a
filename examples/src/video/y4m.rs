//! YUV4MPEG2, raw frames with a line of text before each: what every converter writes and a page of code reads.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use y4m::{Colorspace, Decoder};

use super::footage::Source;
use super::{Picture, wrong};
use crate::InputError;

const WORKS: &str = "mono, 420, 422 and 444 of 8 bits work; convert it with ffmpeg -i IN -pix_fmt yuv420p OUT.y4m";

/// A Y4M file and where its frames lie.
#[derive(Debug)]
pub struct Y4m {
    path: PathBuf,
    size: [usize; 2],
    /// Rows and columns of luma that share a chroma sample; none without chroma.
    chroma: Option<[usize; 2]>,
    range: ColourRange,
    /// Where the planes of each frame start, in bytes.
    offsets: Vec<u64>,
}

impl Y4m {
    /// Goes from frame header to frame header: those may carry parameters, so that their lengths differ.
    pub fn open(path: &Path) -> Result<Self, InputError> {
        let failed = |error: &dyn std::fmt::Display| wrong(path, error);
        let file = File::open(path).map_err(|error| failed(&error))?;
        let len = file.metadata().map_err(|error| failed(&error))?.len();
        // Of what lies behind a frame header nothing is wanted.
        let mut reader = BufReader::with_capacity(128, file);
        let mut line = Vec::new();
        let read = (&mut reader).take(1024).read_until(b'\n', &mut line);
        let mut at = read.map_err(|error| failed(&error))? as u64;
        // Whoever parses it multiplies the sides unchecked.
        let huge = |parameter: &[u8]| parameter.len() > 6 && matches!(parameter[0], b'W' | b'H');
        if line.split(u8::is_ascii_whitespace).any(huge) {
            return Err(failed(&"no Y4M header (a side of more than 5 digits); write it anew"));
        }
        let header = Decoder::new(line.as_slice()).map_err(|error| match error {
            y4m::Error::UnknownColorspace => failed(&format_args!("its colour space is not known; {WORKS}")),
            error => failed(&format_args!("no Y4M header ({error}); {WORKS}")),
        })?;
        let chroma = match header.get_colorspace() {
            Colorspace::Cmono => None,
            Colorspace::C420 | Colorspace::C420jpeg | Colorspace::C420paldv | Colorspace::C420mpeg2 => Some([2, 2]),
            Colorspace::C422 => Some([1, 2]),
            Colorspace::C444 => Some([1, 1]),
            other => return Err(failed(&format_args!("colour space {other:?}; {WORKS}"))),
        };
        let full = header
            .get_raw_params()
            .split(|byte| *byte == b' ')
            .any(|parameter| parameter == b"XCOLORRANGE=FULL");
        let mut file = Self {
            path: path.into(),
            size: [header.get_height(), header.get_width()],
            chroma,
            range: if full { ColourRange::Full } else { ColourRange::Limited },
            offsets: Vec::new(),
        };
        while at < len {
            let mut line = Vec::new();
            reader
                .seek(SeekFrom::Start(at))
                .and_then(|_| (&mut reader).take(1024).read_until(b'\n', &mut line))
                .map_err(|error| failed(&error))?;
            let frame = file.offsets.len();
            if line != b"FRAME\n" && !(line.starts_with(b"FRAME ") && line.ends_with(b"\n")) {
                return Err(failed(&format_args!(
                    "no header of frame {frame} at byte {at}; the file is damaged, write it anew"
                )));
            }
            let start = at + line.len() as u64;
            at = start + file.frame_len() as u64;
            if at > len {
                return Err(failed(&format_args!(
                    "it ends within frame {frame}, at byte {len} of {at}; write it anew"
                )));
            }
            file.offsets.push(start);
        }
        Ok(file)
    }

    /// Bytes of a plane of chroma.
    fn chroma_len(&self) -> usize {
        let [height, width] = self.size;
        let len = |[rows, columns]: [usize; 2]| height.div_ceil(rows) * width.div_ceil(columns);
        self.chroma.map_or(0, len)
    }

    fn frame_len(&self) -> usize {
        self.size[0] * self.size[1] + 2 * self.chroma_len()
    }

    /// A chroma sample is taken for every pixel that shares it; where in between it was sampled makes no difference here.
    fn picture(&self, planes: &[u8]) -> Picture {
        let [height, width] = self.size;
        let (luma, chroma) = planes.split_at(height * width);
        let (blue, red) = chroma.split_at(self.chroma_len());
        Picture::draw(self.size, |row, column| {
            let [blue, red] = match self.chroma {
                Some([rows, columns]) => {
                    let at = row / rows * width.div_ceil(columns) + column / columns;
                    [blue[at], red[at]]
                }
                None => [128; 2],
            };
            self.range.rgb([luma[row * width + column], blue, red])
        })
    }
}

impl Source for Y4m {
    fn frames(&self) -> usize {
        self.offsets.len()
    }

    fn size(&self) -> [usize; 2] {
        self.size
    }

    fn read(&self, frames: Range<usize>, size: [usize; 2]) -> Result<Vec<Picture>, InputError> {
        let mut file = File::open(&self.path).map_err(|error| wrong(&self.path, error))?;
        let mut planes = vec![0; self.frame_len()];
        let read = |frame: usize| {
            file.seek(SeekFrom::Start(self.offsets[frame]))
                .and_then(|_| file.read_exact(&mut planes))
                .map_err(|error| wrong(&self.path, format_args!("frame {frame}: {error}")))?;
            Ok(self.picture(&planes).fit(size))
        };
        frames.map(read).collect()
    }
}

/// Which bytes stand for black and white.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColourRange {
    /// Luma from 16 to 235, chroma from 16 to 240.
    Limited,
    /// All of 0 to 255.
    Full,
}

/// The shares of red and blue in luma (ITU-R BT.601-7, section 2.5.1).
const RED: f32 = 0.299;
const BLUE: f32 = 0.114;
const GREEN: f32 = 1.0 - RED - BLUE;

impl ColourRange {
    /// Luma's black, what separates that from white, and the same for chroma, from which differences range over a unit
    /// (BT.601-7, section 2.5.3; of the full range, JFIF 1.02).
    fn steps(self) -> [f32; 3] {
        match self {
            ColourRange::Limited => [16.0, 219.0, 224.0],
            ColourRange::Full => [0.0, 255.0, 255.0],
        }
    }

    /// Red, green and blue of luma and the differences of blue and red.
    pub fn rgb(self, [luma, blue, red]: [u8; 3]) -> [u8; 3] {
        let [black, lumas, chromas] = self.steps();
        let luma = (f32::from(luma) - black) / lumas;
        let [blue, red] = [blue, red].map(|chroma| (f32::from(chroma) - 128.0) / chromas);
        let red = luma + 2.0 * (1.0 - RED) * red;
        let blue = luma + 2.0 * (1.0 - BLUE) * blue;
        let green = (luma - RED * red - BLUE * blue) / GREEN;
        // The cast stops at 0 and 255.
        [red, green, blue].map(|share| (255.0 * share).round() as u8)
    }

    /// Luma and the differences of blue and red.
    pub fn ycbcr(self, rgb: [u8; 3]) -> [u8; 3] {
        let [black, lumas, chromas] = self.steps();
        let [red, green, blue] = rgb.map(|byte| f32::from(byte) / 255.0);
        let luma = RED * red + GREEN * green + BLUE * blue;
        let chroma = |colour: f32, share: f32| 128.0 + chromas * (colour - luma) / (2.0 * (1.0 - share));
        [black + lumas * luma, chroma(blue, BLUE), chroma(red, RED)].map(|value| value.round() as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::ColourRange::{Full, Limited};

    /// The bars of colour of a test picture: values that every book on video has.
    #[test]
    fn known_colours() {
        let cases = [
            ([16, 128, 128], [0, 0, 0]),
            ([235, 128, 128], [255, 255, 255]),
            ([81, 90, 240], [255, 0, 0]),
            ([145, 54, 34], [0, 255, 0]),
            ([41, 240, 110], [0, 0, 255]),
        ];
        for (ycbcr, rgb) in cases {
            assert_eq!(Limited.ycbcr(rgb), ycbcr, "{rgb:?}");
            for (back, wanted) in Limited.rgb(ycbcr).into_iter().zip(rgb) {
                assert!(back.abs_diff(wanted) <= 1, "{ycbcr:?}");
            }
        }
        // Beyond black and white there is nothing.
        assert_eq!(Limited.rgb([0, 128, 128]), [0; 3]);
        assert_eq!(Limited.rgb([255, 128, 128]), [255; 3]);
        assert_eq!(Full.ycbcr([255, 0, 0]), [76, 85, 255]);
        assert_eq!(Full.rgb([76, 85, 255]), [254, 0, 0]);
    }

    #[test]
    fn greys_of_the_full_range_are_kept_and_all_colours_nearly() {
        for grey in 0..=255 {
            assert_eq!(Full.ycbcr([grey; 3]), [grey, 128, 128]);
            assert_eq!(Full.rgb([grey, 128, 128]), [grey; 3]);
        }
        let steps = || (0..=255u8).step_by(15);
        for rgb in steps().flat_map(|red| steps().flat_map(move |green| steps().map(move |blue| [red, green, blue]))) {
            for (back, wanted) in Limited.rgb(Limited.ycbcr(rgb)).into_iter().zip(rgb) {
                assert!(back.abs_diff(wanted) <= 2, "{rgb:?}");
            }
        }
    }
}
