use std::ops::Range;
use std::path::{Path, PathBuf};

use super::pictures::{folder, is_picture};
use super::{Captions, Footage, extension, wrong};
use crate::InputError;
use crate::draw::below;
use crate::fnv::Fnv;

/// The streams of text have the upper of these bits, those of noise the lower; both together keep clips apart from them.
const STREAM: u64 = 3 << 62;

/// What a file in a folder ends in to be taken for a video. (One that is named may be called anything.)
const VIDEOS: [&str; 15] = [
    "y4m", "mp4", "m4v", "mov", "mkv", "webm", "avi", "mpg", "mpeg", "ts", "ogv", "gif", "wmv", "flv", "3gp",
];

/// The scene repeats itself, so it has as many frames as one likes.
const SCENE_FRAMES: usize = 10_000;

/// Clips to train on.
#[derive(Debug)]
pub struct Dataset {
    clips: Vec<Clip>,
    /// Files in folders that are no videos.
    skipped: usize,
}

/// A clip and what is said about it.
#[derive(Debug)]
pub struct Clip {
    /// Its frames.
    pub footage: Footage,
    /// Its captions.
    pub captions: Captions,
}

impl Dataset {
    /// Looks at files, folders of pictures (each a clip) and folders with any of these, in the order of their names; in
    /// those, hidden files and what is no video are passed over, and so are pictures beside videos. With no paths: the
    /// rendered scene.
    ///
    /// # Errors
    /// If a path holds no clip, or one that cannot be read.
    pub fn open(paths: Option<&[PathBuf]>) -> Result<Self, InputError> {
        let mut dataset = Self {
            clips: Vec::new(),
            skipped: 0,
        };
        match paths {
            Some(paths) => {
                for path in paths {
                    dataset.add(path)?;
                }
            }
            None => dataset.clips.push(Clip {
                footage: Footage::scene(SCENE_FRAMES),
                captions: Captions::scene(),
            }),
        }
        Ok(dataset)
    }

    /// A file, or a folder that must hold something.
    fn add(&mut self, path: &Path) -> Result<(), InputError> {
        if !path.is_dir() {
            return self.add_clip(path);
        }
        let before = self.clips.len();
        self.add_folder(path)?;
        match self.clips.len() - before {
            0 => Err(wrong(
                path,
                "no videos and no pictures are in it; put some there, or name a video file",
            )),
            _ => Ok(()),
        }
    }

    fn add_folder(&mut self, path: &Path) -> Result<(), InputError> {
        let before = self.clips.len();
        let mut pictures = 0;
        for inside in &folder(path)? {
            // A link may lead in circles.
            if inside.is_dir() && !inside.is_symlink() {
                self.add_folder(inside)?;
            } else if inside.is_file() && VIDEOS.contains(&extension(inside).as_str()) {
                self.add_clip(inside)?;
            } else if is_picture(inside) {
                pictures += 1;
            } else if !matches!(extension(inside).as_str(), "txt" | "safetensors") {
                self.skipped += 1;
            }
        }
        match self.clips.len() - before {
            0 if pictures > 0 => self.add_clip(path),
            _ => {
                self.skipped += pictures;
                Ok(())
            }
        }
    }

    fn add_clip(&mut self, path: &Path) -> Result<(), InputError> {
        self.clips.push(Clip {
            footage: Footage::open(path)?,
            captions: Captions::of(path)?,
        });
        Ok(())
    }

    /// The clips, in order.
    pub fn clips(&self) -> &[Clip] {
        &self.clips
    }

    /// What draws windows of so many frames, from clips that have them.
    ///
    /// # Errors
    /// If no clip has as many, or none are wanted.
    pub fn sampler(&self, frames: usize) -> Result<Sampler, InputError> {
        let longest = self.clips.iter().map(|clip| clip.footage.frames()).max().unwrap_or(0);
        if longest == 0 {
            return Err(InputError("video: there is no clip; name one at least".into()));
        }
        if frames == 0 || frames > longest {
            return Err(InputError(format!(
                "video: no clip has a window of {frames} frames, as the longest of {} has {longest}; ask for 1 to \
                 {longest}, or give a longer one",
                self.clips.len()
            )));
        }
        let mut windows = 0;
        let ends = self.clips.iter().map(|clip| {
            windows += (clip.footage.frames() + 1).saturating_sub(frames) as u64;
            windows
        });
        Ok(Sampler {
            frames,
            ends: ends.collect(),
        })
    }

    /// What tells the clips apart from others, on any host: their lengths, sizes and captions. Their pictures are not read.
    pub fn digest(&self) -> String {
        let mut hash = Fnv::new();
        for Clip { footage, captions } in &self.clips {
            let [height, width] = footage.size();
            for number in [footage.frames(), height, width] {
                hash = hash.number(number as u64);
            }
            hash = captions.add_to(hash);
        }
        let frames: usize = self.clips.iter().map(|clip| clip.footage.frames()).sum();
        format!("{frames} frames in {} clips, hash {}", self.clips.len(), hash.hex())
    }

    /// What was found, in one line, and what of it does not serve windows of so many frames with texts of so many tokens.
    pub fn line(&self, frames: usize, tokens: usize) -> String {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let counted = |count: usize, what: &str, rest: &str| match count {
            0 => String::new(),
            _ => format!(", {count} {what}{} {rest}", plural(count)),
        };
        let clips = self.clips.len();
        let total: usize = self.clips.iter().map(|clip| clip.footage.frames()).sum();
        let short = self.clips.iter().filter(|clip| clip.footage.frames() < frames).count();
        let wordy = self.clips.iter().filter(|clip| clip.captions.tokens() > tokens).count();
        format!(
            "video: {total} frames in {clips} clip{}{}{}{}",
            plural(clips),
            counted(short, "clip", &format!("passed over (shorter than {frames} frames)")),
            counted(self.skipped, "file", "passed over (no video)"),
            counted(wordy, "clip", &format!("with captions cut to {tokens} tokens")),
        )
    }
}

/// Draws windows, each of them equally often.
#[derive(Clone, Debug)]
pub struct Sampler {
    frames: usize,
    /// Windows of the clips up to each, it included.
    ends: Vec<u64>,
}

/// Frames in a row of a clip.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// The clip's number.
    pub clip: usize,
    /// Its frames.
    pub frames: Range<usize>,
}

impl Sampler {
    /// The window of a sample: a function of seed, step and the sample's number only, the same on every rank.
    pub fn window(&self, seed: u64, step: u64, sample: u64) -> Window {
        let windows = self.ends.last().copied().unwrap_or(0);
        let window = below(windows, seed, STREAM | step, sample);
        let clip = self.ends.partition_point(|end| *end <= window);
        let before = clip.checked_sub(1).map_or(0, |before| self.ends[before]);
        let first = (window - before) as usize;
        Window {
            clip,
            frames: first..first + self.frames,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn scenes(lengths: &[usize]) -> Dataset {
        let clip = |frames: &usize| Clip {
            footage: Footage::scene(*frames),
            captions: Captions::scene(),
        };
        Dataset {
            clips: lengths.iter().map(clip).collect(),
            skipped: 0,
        }
    }

    #[test]
    fn every_window_is_drawn_equally_often() {
        let dataset = scenes(&[6, 4, 5, 9]);
        // 2, none, 1 and 5 windows.
        let sampler = dataset.sampler(5).unwrap();
        let mut seen = HashMap::<Window, usize>::new();
        for step in 0..2000 {
            for sample in 0..4 {
                *seen.entry(sampler.window(7, step, sample)).or_default() += 1;
            }
        }
        let all = [(0, 0), (0, 1), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)];
        let window = |(clip, first): (usize, usize)| Window {
            clip,
            frames: first..first + 5,
        };
        assert_eq!(seen.keys().cloned().collect::<HashSet<_>>(), all.map(window).into());
        // Of 8000 draws 1000 each; a standard deviation is 30.
        assert!(seen.values().all(|count| count.abs_diff(1000) < 150), "{seen:?}");
    }

    #[test]
    fn a_window_depends_on_seed_step_and_sample() {
        let sampler = Dataset::open(None).unwrap().sampler(17).unwrap();
        let mut seen = HashSet::new();
        for (seed, step, sample) in (0..2).flat_map(|a| (0..3).flat_map(move |b| (0..4).map(move |c| (a, b, c)))) {
            let window = sampler.window(seed, step, sample);
            assert_eq!(window, sampler.clone().window(seed, step, sample));
            assert!(window.frames.end <= SCENE_FRAMES && window.frames.len() == 17);
            seen.insert(window);
        }
        assert_eq!(seen.len(), 24);
    }

    /// Lengths of the same sum, and other captions, are other data; files that are no clips change nothing.
    #[test]
    fn other_clips_are_other_data() {
        let digest = |lengths: &[usize]| scenes(lengths).digest();
        assert!(digest(&[6, 4]).starts_with("10 frames in 2 clips, hash "));
        assert_eq!(digest(&[6, 4]), digest(&[6, 4]));
        assert_ne!(digest(&[6, 4]), digest(&[4, 6]));
        let mut other = scenes(&[6, 4]);
        other.skipped = 3;
        assert_eq!(other.digest(), digest(&[6, 4]));
        other.clips[0].captions = Captions::Prompts(vec!["another".into()]);
        assert_ne!(other.digest(), digest(&[6, 4]));
    }

    #[test]
    fn what_does_not_serve_is_said() {
        let dataset = scenes(&[6, 4]);
        assert_eq!(dataset.line(4, 20), "video: 10 frames in 2 clips");
        assert_eq!(
            dataset.line(5, 3),
            "video: 10 frames in 2 clips, 1 clip passed over (shorter than 5 frames), 2 clips with captions cut to 3 tokens"
        );
        for frames in [0, 7] {
            let InputError(line) = dataset.sampler(frames).unwrap_err();
            assert!(
                line.contains(&format!("window of {frames} frames")) && line.contains("ask for 1 to 6"),
                "{line}"
            );
        }
        let InputError(line) = scenes(&[]).sampler(1).unwrap_err();
        assert!(line.contains("no clip"), "{line}");
    }
}
