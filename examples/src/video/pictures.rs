use std::ffi::OsString;
use std::fs::File;
use std::io::BufReader;
use std::ops::Range;
use std::path::{Path, PathBuf};

use image::{ImageFormat, ImageReader};

use super::footage::Source;
use super::{Picture, extension, wrong};
use crate::InputError;

/// A folder of pictures, each a frame.
#[derive(Debug)]
pub struct Pictures {
    files: Vec<PathBuf>,
    size: [usize; 2],
}

/// Whether a file is a picture, going by its name.
pub fn is_picture(path: &Path) -> bool {
    matches!(extension(path).as_str(), "png" | "jpg" | "jpeg")
}

/// What is in a folder, by name, numbers in names compared as numbers; hidden ones are passed over.
pub fn folder(path: &Path) -> Result<Vec<PathBuf>, InputError> {
    let entries = path
        .read_dir()
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
    let names = entries.map_err(|error| wrong(path, error))?.into_iter();
    let mut names: Vec<OsString> = names
        .map(|entry| entry.file_name())
        .filter(|name| !name.to_string_lossy().starts_with('.'))
        .collect();
    names.sort_by_cached_key(|name| (natural(&name.to_string_lossy()), name.clone()));
    Ok(names.iter().map(|name| path.join(name)).collect())
}

impl Pictures {
    /// Reads only headers, to compare sizes.
    pub fn open(path: &Path) -> Result<Self, InputError> {
        let mut files = folder(path)?;
        files.retain(|file| is_picture(file));
        let sizes: Vec<[usize; 2]> = files.iter().map(|file| size(file)).collect::<Result<_, _>>()?;
        let Some(size) = sizes.first().copied() else {
            return Err(wrong(
                path,
                "no pictures are in it; put some there, or name a video file",
            ));
        };
        if let Some(other) = sizes.iter().position(|other| *other != size) {
            let [[height, width], [other_height, other_width]] = [size, sizes[other]];
            return Err(wrong(
                &files[other],
                format_args!(
                    "it is {other_width}x{other_height}, but {} is {width}x{height}; frames of one size work",
                    files[0].display()
                ),
            ));
        }
        Ok(Self { files, size })
    }
}

impl Source for Pictures {
    fn frames(&self) -> usize {
        self.files.len()
    }

    fn size(&self) -> [usize; 2] {
        self.size
    }

    fn read(&self, frames: Range<usize>, size: [usize; 2]) -> Result<Vec<Picture>, InputError> {
        let read = |file: &PathBuf| {
            let image = reader(file)?.decode();
            Ok(Picture::from(image.map_err(|error| wrong(file, error))?).fit(size))
        };
        self.files[frames].iter().map(read).collect()
    }
}

/// What it holds counts, not its name.
fn reader(file: &Path) -> Result<ImageReader<BufReader<File>>, InputError> {
    let reader = ImageReader::open(file).and_then(ImageReader::with_guessed_format);
    let reader = reader.map_err(|error| wrong(file, error))?;
    match reader.format() {
        Some(format) if format.reading_enabled() => Ok(reader),
        _ => {
            let works = [ImageFormat::Png, ImageFormat::Jpeg].into_iter();
            let works: Vec<_> = works.filter(ImageFormat::reading_enabled).collect();
            Err(wrong(
                file,
                format_args!("no picture of a format that is built in; {works:?} works"),
            ))
        }
    }
}

fn size(file: &Path) -> Result<[usize; 2], InputError> {
    let size = reader(file)?.into_dimensions();
    let (width, height) = size.map_err(|error| wrong(file, error))?;
    Ok([height as usize, width as usize])
}

/// A piece of a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Piece {
    /// How many digits, and which, without zeros in front: so they compare as numbers of any length.
    Number(usize, String),
    Text(String),
}

fn natural(name: &str) -> Vec<Piece> {
    let digit = |char: &u8| char.is_ascii_digit();
    // Cut only beside ASCII digits, so the pieces are UTF-8.
    let pieces = name.as_bytes().chunk_by(|left, right| digit(left) == digit(right));
    pieces
        .map(|piece| match String::from_utf8_lossy(piece).into_owned() {
            number if digit(&piece[0]) => {
                let number = number.trim_start_matches('0');
                Piece::Number(number.len(), number.into())
            }
            text => Piece::Text(text),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::natural;

    #[test]
    fn numbers_in_names_are_compared_as_numbers() {
        let ordered = [
            "2.png",
            "frame_002.png",
            "frame_10.png",
            "frame_10_1.png",
            "frame_99999999999999999999999.png",
            "frame_100000000000000000000000.png",
            "frame_é1.png",
            "frame_é02.png",
        ];
        for pair in ordered.windows(2) {
            assert!(natural(pair[0]) < natural(pair[1]), "{pair:?}");
        }
        assert_eq!(natural("007"), natural("7"));
    }
}
