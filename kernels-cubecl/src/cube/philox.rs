//! Philox 4x32-10 on the device: the same words as [`philox`](crate::philox) on the host.

use cubecl::prelude::*;

use crate::philox::halves;

const ROUNDS: u32 = 10;

/// A stream of a generator, as [`Philox::new`](crate::philox::Philox::new) takes it, in halves.
#[derive(CubeType, CubeLaunch)]
pub struct Stream {
    key_low: u32,
    key_high: u32,
    stream_low: u32,
    stream_high: u32,
}

impl Stream {
    /// The stream as a kernel's argument.
    pub fn argument(seed: u64, stream: u64) -> StreamLaunch {
        let ([key_low, key_high], [stream_low, stream_high]) = (halves(seed), halves(stream));
        StreamLaunch::new(key_low, key_high, stream_low, stream_high)
    }
}

/// The four words of the block that holds the word at this position, given in halves.
#[cube]
pub fn block(low: u32, high: u32, stream: &Stream) -> (u32, u32, u32, u32) {
    let mut c0 = (low >> 2) | (high << 30);
    let mut c1 = high >> 2;
    let mut c2 = stream.stream_low;
    let mut c3 = stream.stream_high;
    let mut k0 = stream.key_low;
    let mut k1 = stream.key_high;
    #[unroll]
    for _ in 0..ROUNDS {
        let left_high = c0.mul_hi(0xD251_1F53u32);
        let left_low = c0 * 0xD251_1F53u32;
        let right_high = c2.mul_hi(0xCD9E_8D57u32);
        let right_low = c2 * 0xCD9E_8D57u32;
        c0 = right_high ^ c1 ^ k0;
        c1 = right_low;
        c2 = left_high ^ c3 ^ k1;
        c3 = left_low;
        k0 += 0x9E37_79B9u32;
        k1 += 0xBB67_AE85u32;
    }
    (c0, c1, c2, c3)
}

/// The word at this position, given in halves.
#[cube]
pub fn word(low: u32, high: u32, stream: &Stream) -> u32 {
    let (w0, w1, w2, w3) = block(low, high, stream);
    let lane = low & 3;
    let first = select(lane == 0, w0, w1);
    let second = select(lane == 2, w2, w3);
    select(lane < 2, first, second)
}
