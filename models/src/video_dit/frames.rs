use burn::tensor::Tensor;
use burn_sp::attention::Positions;

/// A rank's tokens as runs of the frames they lie in, to give each token the vectors of its frame.
///
/// Whole frames are taken together, and each one's vector broadcasts over its tokens: nothing of the size of the tokens is
/// made but the result. A cut within a frame makes a run of that frame's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameRuns {
    frames: Vec<usize>,
    runs: Vec<Run>,
}

/// `frames` frames, of each of which the rank has `len` tokens, one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    /// The first of its tokens, of the rank's.
    start: usize,
    /// The first of its frames, of the rank's.
    first: usize,
    frames: usize,
    len: usize,
}

impl FrameRuns {
    /// Of the tokens at these global positions.
    ///
    /// # Panics
    /// If there are tokens, and frames have none.
    pub fn new(positions: &Positions, tokens_per_frame: usize) -> Self {
        let mut frames: Vec<usize> = Vec::new();
        let mut runs = Vec::new();
        let mut start = 0;
        for range in positions.ranges() {
            let mut next = range.start;
            while next < range.end {
                let (frame, within, left) = (next / tokens_per_frame, next % tokens_per_frame, range.end - next);
                let (count, len) = if within == 0 && left >= tokens_per_frame {
                    (left / tokens_per_frame, tokens_per_frame)
                } else {
                    (1, left.min(tokens_per_frame - within))
                };
                // A frame that goes on where the range before ended is there already.
                let held = usize::from(frames.last() == Some(&frame));
                frames.extend(frame + held..frame + count);
                runs.push(Run {
                    start,
                    first: frames.len() - count,
                    frames: count,
                    len,
                });
                start += count * len;
                next += count * len;
            }
        }
        if runs.is_empty() {
            // A rank without tokens takes part in the graph all the same: every rank has gradients of every parameter.
            frames.push(0);
            runs.push(Run {
                start: 0,
                first: 0,
                frames: 1,
                len: 0,
            });
        }
        Self { frames, runs }
    }

    /// The frames, counted through the sequence, of which there are vectors; frame 0 if the rank has no token.
    pub fn frames(&self) -> &[usize] {
        &self.frames
    }

    /// `x * (1 + scale) + shift`.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, features]`, and so is the result
    /// - `shift`, `scale`: `[batch, frames, 1, features]`, of [`frames`](Self::frames)
    pub fn modulate(&self, x: Tensor<3>, shift: Tensor<4>, scale: Tensor<4>) -> Tensor<3> {
        self.with_vectors(x, [shift, scale + 1.0], |x, [shift, scale]| x * scale + shift)
    }

    /// `x * gate`.
    ///
    /// # Shapes
    /// - `x`: `[batch, tokens, features]`, and so is the result
    /// - `gate`: `[batch, frames, 1, features]`, of [`frames`](Self::frames)
    pub fn gate(&self, x: Tensor<3>, gate: Tensor<4>) -> Tensor<3> {
        self.with_vectors(x, [gate], |x, [gate]| x * gate)
    }

    /// `body` gets a frame of a sample a row, `[batch * frames, tokens of a frame, features]`, and its vectors.
    fn with_vectors<const N: usize>(
        &self,
        x: Tensor<3>,
        vectors: [Tensor<4>; N],
        body: impl Fn(Tensor<3>, [Tensor<3>; N]) -> Tensor<3>,
    ) -> Tensor<3> {
        let [batch, _, features] = x.dims();
        let apply = |run: &Run, x: Tensor<3>, vectors: [Tensor<4>; N]| {
            let rows = batch * run.frames;
            let vectors = vectors.map(|vector| vector.reshape([rows, 1, features]));
            // A length of 0 is read as that of the same dimension before, which is 0 too.
            let y = body(x.reshape([rows, run.len, features]), vectors);
            y.reshape([batch, run.frames * run.len, features])
        };
        if let [run] = self.runs.as_slice() {
            return apply(run, x, vectors);
        }
        let part = |run: &Run| {
            let own = vectors.clone().map(|vector| vector.narrow(1, run.first, run.frames));
            apply(run, x.clone().narrow(1, run.start, run.frames * run.len), own)
        };
        Tensor::cat(self.runs.iter().map(part).collect(), 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames and runs as (start, first, frames, len).
    type Found = (Vec<usize>, Vec<(usize, usize, usize, usize)>);

    fn runs(ranges: &[std::ops::Range<usize>]) -> Found {
        let found = FrameRuns::new(&Positions::new(ranges.to_vec()), 4);
        let runs = found.runs.iter().map(|run| (run.start, run.first, run.frames, run.len));
        (found.frames.clone(), runs.collect())
    }

    #[test]
    fn whole_frames_are_one_run() {
        assert_eq!(runs(&[8..20]), (vec![2, 3, 4], vec![(0, 0, 3, 4)]));
    }

    #[test]
    fn a_cut_frame_is_a_run_of_its_own() {
        assert_eq!(
            runs(&[3..14]),
            (vec![0, 1, 2, 3], vec![(0, 0, 1, 1), (1, 1, 2, 4), (9, 3, 1, 2)])
        );
        assert_eq!(runs(&[5..7]), (vec![1], vec![(0, 0, 1, 2)]));
    }

    #[test]
    fn a_frame_that_goes_on_counts_once() {
        // Zigzag may cut a frame out of the middle of a rank's tokens.
        assert_eq!(
            runs(&[0..1, 2..8]),
            (vec![0, 1], vec![(0, 0, 1, 1), (1, 0, 1, 2), (3, 1, 1, 4)])
        );
    }

    #[test]
    fn no_token_is_a_run_of_none() {
        assert_eq!(runs(&[]), (vec![0], vec![(0, 0, 1, 0)]));
    }
}
