use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::real::Real;
use crate::problem::check_merge;

/// Merges `other` into `out` and `stats`, in place where no one else holds them.
///
/// A row that saw no key on one side leaves the other side's bits alone: `(0, (-inf, 0))` is the neutral element.
pub fn merge<A: Real>(
    out: FlexTensor,
    stats: FlexTensor,
    other_out: FlexTensor,
    other_stats: FlexTensor,
) -> (FlexTensor, FlexTensor) {
    let [mut out, mut stats, other_out, other_stats] = [out, stats, other_out, other_stats].map(whole);
    let ([batch, tokens, heads, width], _) = check_merge(&out, &stats, &other_out, &other_stats);
    let rows = batch * heads * tokens;
    let mut shares = vec![Share::Own; rows];
    let (largest, log_sum) = stats.storage_mut::<A>().split_at_mut(rows);
    let (other_largest, other_log_sum) = other_stats.storage::<A>().split_at(rows);
    let own = largest.par_iter_mut().zip(log_sum);
    own.zip(other_largest.par_iter().zip(other_log_sum))
        .zip(&mut shares)
        .with_min_len(4096)
        .for_each(|(((largest, log_sum), (other_largest, other_log_sum)), share)| {
            let other = (*other_largest, *other_log_sum);
            let merged;
            (merged, *share) = joined((*largest, *log_sum), other);
            (*largest, *log_sum) = merged;
        });

    // A row of the output is a token of a head; its number lies elsewhere, the heads being outside of the tokens.
    let number = |row: usize| {
        let (token, head) = (row / heads, row % heads);
        ((token / tokens) * heads + head) * tokens + token % tokens
    };
    let width = width.max(1);
    let rows = out.storage_mut::<A>().par_chunks_mut(width).enumerate();
    rows.zip(other_out.storage::<A>().par_chunks(width))
        .with_min_len(256)
        .for_each(|((row, out), other)| match shares[number(row)] {
            Share::Own => {}
            Share::Other => out.copy_from_slice(other),
            // From the larger share towards the smaller: equal parts stay what they are, to the bit.
            Share::LessOther(share) => {
                let pairs = out.iter_mut().zip(other);
                pairs.for_each(|(out, &other)| *out += share * (other - *out));
            }
            Share::LessOwn(share) => {
                let pairs = out.iter_mut().zip(other);
                pairs.for_each(|(out, &other)| *out = other + share * (*out - other));
            }
        });
    (out, stats)
}

/// What a row's merged output is made of.
#[derive(Clone, Copy)]
enum Share<A> {
    Own,
    Other,
    /// Of the other, not above a half.
    LessOther(A),
    /// Of the own, below a half.
    LessOwn(A),
}

/// Largest score and logarithm of the sum relative to it, of two parts together, and the smaller one's share. Differences
/// of large scores are exact, so that no digit of the logarithms is lost in them.
fn joined<A: Real>(own: (A, A), other: (A, A)) -> ((A, A), Share<A>) {
    if other.0 == A::NEG_INFINITY {
        return (own, Share::Own);
    }
    if own.0 == A::NEG_INFINITY {
        return (other, Share::Other);
    }
    let one = A::from_f64(1.0);
    let largest = if own.0 > other.0 { own.0 } else { other.0 };
    let [own, other] = [own, other].map(|(max, log_sum)| max - largest + log_sum);
    let (high, low) = if own < other { (other, own) } else { (own, other) };
    // The weight of the smaller one relative to the larger.
    let weight = exp(low - high);
    let share = weight / (one + weight);
    let log_sum = high + (one + weight).ln();
    if own < other {
        ((largest, log_sum), Share::LessOwn(share))
    } else {
        ((largest, log_sum), Share::LessOther(share))
    }
}

/// One number a row: no need for vector code.
fn exp<A: Real>(x: A) -> A {
    x.exp::<pulp::Scalar>()
}

/// Contiguous from the start of its storage on, and nothing behind.
fn whole(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let bytes = layout.num_elements() * tensor.dtype().size();
    if tensor.is_contiguous() && layout.start_offset() == 0 && tensor.bytes().len() == bytes {
        tensor
    } else {
        tensor.to_contiguous()
    }
}
