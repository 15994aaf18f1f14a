//! A scene that is rendered, so that programs have a video without a file.
//!
//! Lengths are in heights of the picture, from its top and its middle; times in frames.

use std::f32::consts::{PI, TAU};
use std::ops::Range;

use super::Picture;
use super::footage::Source;
use crate::InputError;

/// What the scene shows, for a model that listens.
pub const CAPTIONS: [&str; 2] = [
    "a red ball bounces over a green field under a blue sky",
    "a white box crosses behind the bouncing red ball",
];

const SKY: [u8; 3] = [110, 175, 235];
const FIELD: [u8; 3] = [70, 140, 60];
const BALL: [u8; 3] = [215, 40, 35];
const BOX: [u8; 3] = [245, 245, 235];

const HORIZON: f32 = 0.6;
const RADIUS: f32 = 0.13;
/// Where the ball's centre is when it touches the field, and how high it jumps from there.
const LOWEST: f32 = 0.75;
const JUMP: f32 = 0.5;
/// Frames of a jump, of a swing from left to right and back, and between two boxes.
const JUMP_FRAMES: usize = 16;
const SWING_FRAMES: usize = 64;
const BOX_FRAMES: usize = 48;
/// Where the box's centre is, and half its side.
const BOX_HEIGHT: f32 = 0.52;
const BOX_HALF: f32 = 0.1;

/// So many frames of it; the motion repeats after 192.
#[derive(Debug)]
pub struct Scene {
    pub frames: usize,
}

impl Source for Scene {
    fn frames(&self) -> usize {
        self.frames
    }

    fn size(&self) -> [usize; 2] {
        [240, 320]
    }

    fn read(&self, frames: Range<usize>, size: [usize; 2]) -> Result<Vec<Picture>, InputError> {
        Ok(frames.map(|frame| render(frame, size)).collect())
    }
}

fn render(frame: usize, size: [usize; 2]) -> Picture {
    let [height, width] = size.map(|pixels| pixels as f32);
    let half = 0.5 * width / height;
    let phase = |period: usize| (frame % period) as f32 / period as f32;
    let ball = [
        LOWEST - JUMP * (PI * phase(JUMP_FRAMES)).sin(),
        (half - RADIUS).max(0.0) * (TAU * phase(SWING_FRAMES)).cos(),
    ];
    // From outside of the picture to outside.
    let crossing = [BOX_HEIGHT, (half + BOX_HALF) * (2.0 * phase(BOX_FRAMES) - 1.0)];
    Picture::draw(size, |row, column| {
        let at = [(row as f32 + 0.5) / height, (column as f32 + 0.5) / height - half];
        let to = |centre: [f32; 2]| [at[0] - centre[0], at[1] - centre[1]];
        // How much of a pixel lies in a shape whose border is so far outside of its centre.
        let cover = |distance: f32| (0.5 - distance * height).clamp(0.0, 1.0);
        let [down, right] = to(crossing);
        let in_box = cover(down.abs().max(right.abs()) - BOX_HALF);
        let [down, right] = to(ball);
        let in_ball = cover(down.hypot(right) - RADIUS);
        let colour = mix(SKY, FIELD, cover(HORIZON - at[0]));
        mix(mix(colour, BOX, in_box), BALL, in_ball)
    })
}

fn mix(under: [u8; 3], over: [u8; 3], share: f32) -> [u8; 3] {
    let channel = |index: usize| {
        let [under, over] = [under, over].map(|colour| f32::from(colour[index]));
        (under + share * (over - under)).round() as u8
    };
    [channel(0), channel(1), channel(2)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_are_where_they_should_be() {
        // A square of 100: a pixel is a hundredth. The ball starts at the right, on the field; no box is to be seen.
        let first = render(0, [100, 100]);
        assert_eq!(first.pixel(75, 86), BALL);
        assert_eq!(first.pixel(0, 0), SKY);
        assert_eq!(first.pixel(99, 0), FIELD);
        assert_eq!((first.pixel(59, 20), first.pixel(60, 20)), (SKY, FIELD));
        assert!(!first.rgb.as_chunks().0.contains(&BOX));
        // Half a jump: at its highest. A quarter of a swing: in the middle, on the field again.
        assert_eq!(render(8, [100, 100]).pixel(25, 76), BALL);
        assert_eq!(render(16, [100, 100]).pixel(75, 50), BALL);
        // Half way between two boxes, one is in the middle, its side 20.
        let third = render(24, [100, 100]);
        assert_eq!((third.pixel(43, 41), third.pixel(43, 58)), (BOX, BOX));
        assert_eq!((third.pixel(43, 39), third.pixel(43, 60)), (SKY, SKY));
    }

    #[test]
    fn the_motion_repeats_and_borders_are_smooth() {
        assert_eq!(render(5, [33, 21]), render(5 + 192, [33, 21]));
        assert_ne!(render(5, [33, 21]), render(5 + 96, [33, 21]));
        // On the ball's border some pixels are between red and the field.
        let picture = render(0, [32, 32]);
        let between = picture.rgb.as_chunks().0.iter();
        assert!(
            between
                .filter(|colour| ![SKY, FIELD, BALL, BOX].contains(colour))
                .count()
                > 10
        );
    }
}
