//! What travels: attention to the text needs nothing on ring and ulysses, and a cached key travels once.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};
use burn_sp::SpDevice;
use burn_sp::layout::{Axis, MeshShape, Placement};
use burn_sp_models::video_dit::{VideoCache, VideoGrid, VideoInput, VideoOptions};

use super::tiny;
use crate::common::{mesh, ranks};

const GRID: VideoGrid = VideoGrid {
    frames: 4,
    rows: 2,
    columns: 2,
};

/// Calls and bytes of a rank, by operation.
type Sent = BTreeMap<String, (u64, u64)>;

/// What the first rank sends while it does something to the model's input; in f32, 2 samples.
fn sent(mesh: MeshShape, work: impl Fn(&VideoInput, &SpDevice) + Send + Sync) -> Sent {
    let of = |device: SpDevice| {
        let on = (device.device(), DType::F32);
        let latents = Tensor::<5>::from_data(tiny::latents(51, 2, &GRID, 1).convert_dtype(DType::F32), on);
        let text = Tensor::<3>::from_data(tiny::text(2).convert_dtype(DType::F32), on);
        let input = VideoInput::partition(GRID, latents, tiny::times(2, &GRID, 1), text, &device);
        device.mesh().world().reset_statistics();
        work(&input, &device);
        let counters = device.mesh().world().statistics().into_iter();
        counters
            .map(|counter| (counter.op, (counter.calls, counter.bytes_sent)))
            .collect::<Sent>()
    };
    ranks(mesh, of).swap_remove(0)
}

/// Elements of 2 samples, 16 tokens, 24 features, in 2 layers.
const ALL: u64 = 2 * 16 * 24 * 2;

const BYTES: u64 = 4;

/// Of each layer: queries, keys and values go in one message, and what attention returns in another. That is all there is.
#[test]
fn attention_to_the_text_sends_nothing() {
    let forward = |input: &VideoInput, _: &SpDevice| {
        let _velocity = tiny::model(DType::F32).forward(input, &VideoOptions::default());
    };
    // Of 3 heads the first rank gets 2: of its half of the tokens it sends 1 of 3 heads of q, k and v, and of the output
    // 2 of 3 heads of the other half.
    let found = sent(mesh(1, 1, 2), forward);
    let expected = (3 * ALL / 2 / 3 + ALL / 2 * 2 / 3) * BYTES;
    assert_eq!(found, Sent::from([("all_to_all".into(), (4, expected))]));
    // Keys and values of its quarter of the tokens, three times.
    let found = sent(mesh(1, 4, 1), forward);
    assert_eq!(found, Sent::from([("shift".into(), (2 * 3, 2 * ALL / 4 * 3 * BYTES))]));
}

/// On ulysses the cache's heads stay where they are: the second block sends no more than the first, which had no cache.
#[test]
fn what_is_cached_is_not_sent_again() {
    let blocks = |count: usize| {
        move |input: &VideoInput, _: &SpDevice| {
            let mut cache = VideoCache::new(2, None, 0);
            for block in 0..count {
                let model = tiny::model(DType::F32);
                let first = block * GRID.frames;
                let velocity = model.forward_cached(input, first, &mut cache, &VideoOptions::default());
                drop(velocity.redistribute(Axis::Tp, Placement::Replicate));
            }
        }
    };
    let [one, three] = [1, 3].map(|count| sent(mesh(1, 1, 2), blocks(count)));
    let (calls, bytes) = one["all_to_all"];
    assert_eq!(three, Sent::from([("all_to_all".into(), (3 * calls, 3 * bytes))]));
    assert_eq!(calls, 4);
    // Around the ring the keys and values of all blocks travel: 1, 2 and 3 of them.
    let [one, three] = [1, 3].map(|count| sent(mesh(1, 2, 1), blocks(count)));
    assert_eq!(three["shift"].1, 6 * one["shift"].1);
}
