use std::ops::Range;

use burn_sp_comm::Parts;

/// Which positions of a dimension a position of the next layer's reads: a newest one, and so many before it. Nothing reads
/// what comes later. A causal convolution of width `k` is `Window::new(k - 1)`, with stride `s` also `down(s)`.
///
/// ```
/// use burn_sp::layout::Window;
/// let conv = Window::new(2).down(2);
/// assert_eq!(conv.outputs(0..7), 0..4);
/// assert_eq!(conv.reads(2..4), 2..7);
/// assert_eq!(conv.missing(0), 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    behind: usize,
    rate: Rate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Rate {
    Down(usize),
    Up(usize),
}

impl Window {
    /// Output `u` reads inputs `u - behind ..= u`.
    pub fn new(behind: usize) -> Self {
        Self {
            behind,
            rate: Rate::Down(1),
        }
    }

    /// One output for `stride` inputs: the newest that output `u` reads is `stride * u`.
    ///
    /// # Panics
    /// If the stride is 0.
    pub fn down(self, stride: usize) -> Self {
        assert!(stride > 0, "window: a stride is at least 1");
        Self {
            rate: Rate::Down(stride),
            ..self
        }
    }

    /// `factor` outputs for one input, but one for the first: the newest that output `u` reads is `u / factor` rounded
    /// up. So what went [`down`](Self::down) from `1 + factor * n` positions comes back to as many.
    ///
    /// # Panics
    /// If the factor is 0.
    pub fn up(self, factor: usize) -> Self {
        assert!(factor > 0, "window: a factor is at least 1");
        Self {
            rate: Rate::Up(factor),
            ..self
        }
    }

    /// How many inputs before the newest an output reads.
    pub fn behind(&self) -> usize {
        self.behind
    }

    /// How many inputs an output is on from the one before it, 1 where outputs are more than inputs.
    pub fn stride(&self) -> usize {
        match self.rate {
            Rate::Down(stride) => stride,
            Rate::Up(_) => 1,
        }
    }

    /// The newest input that an output reads.
    pub fn newest(&self, output: usize) -> usize {
        match self.rate {
            Rate::Down(stride) => stride * output,
            Rate::Up(factor) => output.div_ceil(factor),
        }
    }

    /// The outputs whose newest input lies in a range. Of all inputs, these are all outputs.
    pub fn outputs(&self, inputs: Range<usize>) -> Range<usize> {
        let before = |input: usize| match self.rate {
            Rate::Down(stride) => input.div_ceil(stride),
            Rate::Up(factor) => input.checked_sub(1).map_or(0, |last| factor * last + 1),
        };
        before(inputs.start)..before(inputs.end)
    }

    /// The inputs that a range of outputs reads, of those that there are.
    pub fn reads(&self, outputs: Range<usize>) -> Range<usize> {
        if outputs.is_empty() {
            return 0..0;
        }
        let oldest = self.newest(outputs.start).saturating_sub(self.behind);
        oldest..self.newest(outputs.end - 1) + 1
    }

    /// How many inputs an output reads from before the start, where there are none.
    pub fn missing(&self, output: usize) -> usize {
        self.behind.saturating_sub(self.newest(output))
    }

    /// What each rank must hold to compute the outputs of its own inputs: those, and what the outputs read before them.
    /// Each rank's own are one range.
    pub(crate) fn fetched(&self, own: &[Range<usize>]) -> Parts {
        let fetched = |own: &Range<usize>| {
            let outputs = self.outputs(own.clone());
            let start = if outputs.is_empty() {
                own.start
            } else {
                own.start.min(self.reads(outputs).start)
            };
            vec![start..own.end]
        };
        Parts::new(own.iter().map(fetched).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows() -> Vec<Window> {
        let behind = (0..=4).map(Window::new);
        behind
            .flat_map(|window| (1..=3).flat_map(move |rate| [window.down(rate), window.up(rate)]))
            .collect()
    }

    /// Wherever inputs are cut, each output is computed once, by who holds its newest input.
    #[test]
    fn cuts_of_the_inputs_cut_the_outputs() {
        for window in windows() {
            for len in 0..=12 {
                let all = window.outputs(0..len);
                assert_eq!(all.start, 0);
                for cut in 0..=len {
                    let (left, right) = (window.outputs(0..cut), window.outputs(cut..len));
                    assert_eq!(
                        (left.start, left.end, right.end),
                        (0, right.start, all.end),
                        "{window:?}"
                    );
                    assert!(left.into_iter().all(|output| window.newest(output) < cut));
                    assert!(
                        right
                            .into_iter()
                            .all(|output| (cut..len).contains(&window.newest(output)))
                    );
                }
            }
        }
    }

    #[test]
    fn reads_are_the_union_of_what_each_output_reads() {
        for window in windows() {
            for outputs in (0..6).flat_map(|from| (from..6).map(move |to| from..to)) {
                let mut each: Vec<usize> = outputs
                    .clone()
                    .flat_map(|output| {
                        let newest = window.newest(output);
                        assert_eq!(window.missing(output), window.behind.saturating_sub(newest));
                        newest.saturating_sub(window.behind)..=newest
                    })
                    .collect();
                each.sort();
                each.dedup();
                // With a stride beyond the width, inputs between two outputs are read by neither.
                let found = window.reads(outputs.clone());
                assert!(
                    each.iter().all(|input| found.contains(input)),
                    "{window:?}, {outputs:?}"
                );
                assert_eq!(
                    each.first().copied().unwrap_or(0),
                    found.start,
                    "{window:?}, {outputs:?}"
                );
                assert_eq!(
                    each.last().map_or(0, |last| last + 1),
                    found.end,
                    "{window:?}, {outputs:?}"
                );
            }
        }
    }

    #[test]
    fn down_and_up_are_each_others_inverse() {
        for rate in 1..=4 {
            for count in 0..5 {
                let (down, up) = (Window::new(0).down(rate), Window::new(0).up(rate));
                assert_eq!(down.outputs(0..1 + rate * count), 0..1 + count);
                assert_eq!(up.outputs(0..1 + count), 0..1 + rate * count);
            }
        }
    }
}
