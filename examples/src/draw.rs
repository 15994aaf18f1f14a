//! Numbers drawn for data: functions of seed, stream and number, the same on every rank.

use burn_sp::kernels::philox::Philox;

/// One of `0..bound`, each equally likely.
pub(crate) fn below(bound: u64, seed: u64, stream: u64, number: u64) -> u64 {
    let words = Philox::new(seed, stream);
    let random = u64::from(words.word(2 * number)) << 32 | u64::from(words.word(2 * number + 1));
    ((u128::from(random) * u128::from(bound)) >> 64) as u64
}
