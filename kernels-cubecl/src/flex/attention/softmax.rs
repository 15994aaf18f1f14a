//! What happens to a tile between its products, as loops that the compiler turns into vector code for the
//! instruction set found at run time.

use pulp::{Arch, Simd, WithSimd};

use super::{blocks::KEYS, dropout::DropoutTile, gemm::Matrix, real::Real};

/// Elements handled at once: one AVX-512 register of f32, two of f64.
const LANES: usize = 16;

/// Distance between the rows of a tile of `columns`: room to fill up the last lanes, and no power of two, which would
/// map a column of the tile to a few cache sets.
pub fn stride(columns: usize) -> usize {
    columns.next_multiple_of(LANES) + LANES
}

/// One step of the online softmax: turns `scores` into weights relative to the largest score so far, and brings
/// the running row statistics and outputs up to date with it.
pub struct Online<'a, A> {
    pub scores: &'a mut [A],
    pub stride: usize,
    pub columns: usize,
    /// Drops weights once they are summed.
    pub dropout: Option<DropoutTile>,
    /// Largest score so far, a row; negative infinity while nothing was seen, NaN where only NaN was.
    pub max: &'a mut [A],
    /// Sum of the weights so far, a row.
    pub sum: &'a mut [A],
    /// Weighted sum of the values so far, `[rows, value_dim]`.
    pub out: &'a mut [A],
}

impl<A: Real> Online<'_, A> {
    pub fn run(self) {
        Arch::new().dispatch(self);
    }
}

impl<A: Real> WithSimd for Online<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let rows = self.max.len();
        let width = self.out.len() / rows;
        let mut words = [0; KEYS];
        let words = &mut words[..self.columns];
        for i in 0..rows {
            let start = i * self.stride;
            let row = &mut self.scores[start..start + self.columns.next_multiple_of(LANES)];
            row[self.columns..].fill(A::NEG_INFINITY);
            let old = self.max[i];
            let new = largest(row, old);
            if new == A::NEG_INFINITY {
                // No score is larger, so that one of another value is NaN.
                if row.iter().any(|&x| x != A::NEG_INFINITY) {
                    self.max[i] = A::from_f64(f64::NAN);
                    self.sum[i] = self.max[i];
                }
                row.fill(A::ZERO);
                continue;
            }
            let added = exponentials::<S, A>(row, new);
            if new > old {
                let shrink = (old - new).exp::<S>();
                self.sum[i] *= shrink;
                self.max[i] = new;
                for x in &mut self.out[i * width..(i + 1) * width] {
                    *x *= shrink;
                }
            }
            self.sum[i] += added;
            if let Some(dropout) = self.dropout {
                dropout.draw(i, words);
                dropout.drop(words, row);
            }
        }
    }
}

#[inline(always)]
fn largest<A: Real>(row: &[A], start: A) -> A {
    let mut lanes = [start; LANES];
    for chunk in row.chunks_exact(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    lanes.into_iter().fold(start, |a, b| if b > a { b } else { a })
}

/// `row = exp(row - shift)`; returns the sum.
#[inline(always)]
fn exponentials<S: Simd, A: Real>(row: &mut [A], shift: A) -> A {
    let mut lanes = [A::ZERO; LANES];
    for chunk in row.chunks_exact_mut(LANES) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = (*x - shift).exp::<S>();
            *lane += *x;
        }
    }
    lanes.into_iter().fold(A::ZERO, |a, b| a + b)
}

/// Turns scores into weights (with dropout: those that are left of them) and gradients of weights into gradients of
/// scores, both in place.
pub struct Gradient<'a, A> {
    pub scores: &'a mut [A],
    pub grads: &'a mut [A],
    pub stride: usize,
    pub columns: usize,
    /// What forward dropped.
    pub dropout: Option<DropoutTile>,
    /// Largest score, a row; positive infinity for a row that sees nothing, which makes its weights 0.
    pub largest: &'a [A],
    /// Logarithm of the sum of the weights relative to the largest score, a row.
    pub log_sum: &'a [A],
    /// Sum of output times its gradient, a row.
    pub delta: &'a [A],
}

impl<A: Real> Gradient<'_, A> {
    pub fn run(self) {
        Arch::new().dispatch(self);
    }
}

impl<A: Real> WithSimd for Gradient<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut words = [0; KEYS];
        let words = &mut words[..self.columns];
        let rows = self.largest.iter().zip(self.log_sum).zip(self.delta);
        for (i, ((&largest, &log_sum), &delta)) in rows.enumerate() {
            // Filled-up lanes are computed as well, on whatever they hold; no product reads them.
            let range = i * self.stride..i * self.stride + self.columns.next_multiple_of(LANES);
            let (weights, grads) = (&mut self.scores[range.clone()], &mut self.grads[range]);
            if let Some(dropout) = self.dropout {
                dropout.draw(i, words);
                dropout.drop(words, grads);
            }
            for (weights, grads) in weights.chunks_exact_mut(LANES).zip(grads.chunks_exact_mut(LANES)) {
                for (weight, grad) in weights.iter_mut().zip(grads) {
                    // By name, not by 0 times the gradient, which a hidden value may have made NaN.
                    let hidden = *weight == A::NEG_INFINITY;
                    let seen = (*weight - largest - log_sum).exp::<S>();
                    *grad = if hidden { A::ZERO } else { seen * (*grad - delta) };
                    *weight = if hidden { A::ZERO } else { seen };
                }
            }
            // Only now: the softmax is differentiated at the weights it gave.
            if let Some(dropout) = self.dropout {
                dropout.drop(words, weights);
            }
        }
    }
}

/// `sum(a * b)` in a fixed order.
pub fn dot<A: Real>(a: &[A], b: &[A]) -> A {
    struct Dot<'a, A>(&'a [A], &'a [A]);

    impl<A: Real> WithSimd for Dot<'_, A> {
        type Output = A;

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> A {
            let mut lanes = [A::ZERO; LANES];
            for (a, b) in self.0.chunks(LANES).zip(self.1.chunks(LANES)) {
                for (lane, (&a, &b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
                    *lane += a * b;
                }
            }
            lanes.into_iter().fold(A::ZERO, |a, b| a + b)
        }
    }

    Arch::new().dispatch(Dot(a, b))
}

/// Whether the first `rows` rows of `width` numbers are all finite.
pub fn finite<A: Real>(matrix: Matrix<A>, rows: usize, width: usize) -> bool {
    struct Finite<'a, A>(Matrix<'a, A>, usize, usize);

    impl<A: Real> WithSimd for Finite<'_, A> {
        type Output = bool;

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> bool {
            let Self(matrix, rows, width) = self;
            let mut all = true;
            for row in 0..rows {
                for &x in &matrix.data[row * matrix.stride..][..width] {
                    all &= is_finite(x);
                }
            }
            all
        }
    }

    Arch::new().dispatch(Finite(matrix, rows, width))
}

#[inline(always)]
pub fn is_finite<A: Real>(x: A) -> bool {
    x * A::ZERO == A::ZERO
}
