//! Case 32: one sample for a sequence group, every sample once an epoch.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn_sp::data::{PackedSequence, Sampler, TokenBatch};
use burn_sp::layout::{Axis, MeshShape};

use crate::common::{mesh, ranks};

/// However samples, replicas and batch divide: in two epochs, the steps of all replicas together.
#[test]
fn an_epoch_has_every_sample_once_over_all_replicas() {
    for samples in [1u64, 2, 3, 5, 7, 8, 16, 33] {
        for batch in [1, 2, 3, 4, 6, 8] {
            let sampler = Sampler::new(samples, batch, 5).with_epochs(2);
            let steps = sampler.steps().unwrap();
            assert_eq!(steps, (2 * samples).div_ceil(batch as u64));
            for replicas in [1, 2, 3, 4] {
                let what = format!("{samples} samples, {batch} a step, {replicas} replicas");
                let mut taken = Vec::new();
                for step in 0..steps {
                    let whole = sampler.batch(step);
                    let shares: Vec<Vec<u64>> = (0..replicas)
                        .map(|replica| sampler.share(step, replica, replicas))
                        .collect();
                    // A replica has at most one fewer than another, and none has what another has.
                    assert_eq!(shares.concat(), whole, "{what}");
                    let [most, least] = [shares[0].len(), shares[replicas - 1].len()];
                    assert!(most - least <= 1, "{what}: {shares:?}");
                    assert!(whole.len() == batch || step + 1 == steps, "{what}, step {step}");
                    taken.extend(whole);
                }
                assert!(sampler.batch(steps).is_empty());
                assert_eq!(taken.len() as u64, 2 * samples, "{what}");
                for epoch in taken.chunks(samples as usize) {
                    let mut epoch = epoch.to_vec();
                    epoch.sort_unstable();
                    assert!(epoch.into_iter().eq(0..samples), "{what}");
                }
            }
        }
    }
}

#[test]
fn epochs_and_seeds_have_orders_of_their_own() {
    let order = |seed, epoch: u64| {
        let sampler = Sampler::new(50, 10, seed);
        (5 * epoch..5 * epoch + 5)
            .flat_map(|step| sampler.batch(step))
            .collect::<Vec<u64>>()
    };
    assert_eq!(order(1, 0), order(1, 0));
    assert_ne!(order(1, 0), order(1, 1));
    assert_ne!(order(1, 0), order(2, 0));
    assert!(!order(1, 0).into_iter().eq(0..50));
}

/// An epoch of 5 samples ends after the first sample of the second step of 4.
#[test]
fn an_epoch_may_end_within_a_step() {
    let sampler = Sampler::new(5, 4, 3);
    assert_eq!(
        [0, 1, 2, 5].map(|step| sampler.position(step)),
        [(0, 0), (0, 4), (1, 3), (4, 0)]
    );
    let two = [sampler.batch(0), sampler.batch(1)].concat();
    let mut first = two[..5].to_vec();
    first.sort_unstable();
    assert_eq!(first, [0, 1, 2, 3, 4]);
    // What the second epoch has left comes next, and nothing twice.
    let mut second = [&two[5..], &sampler.batch(2)[..2]].concat();
    second.sort_unstable();
    assert_eq!(second, [0, 1, 2, 3, 4]);
    // It never ends.
    assert_eq!((sampler.steps(), sampler.batch(u64::MAX / 8).len()), (None, 4));
}

/// A step is known from its number, whichever steps came before and however many replicas there were.
#[test]
fn a_run_goes_on_from_a_step_number_on_any_mesh() {
    let sampler = || Sampler::new(11, 3, 8);
    let unbroken: Vec<u64> = (0..20).flat_map(|step| sampler().batch(step)).collect();
    let resumed = (0..20).flat_map(|step| {
        let replicas = 1 + step as usize % 3;
        (0..replicas).flat_map(move |replica| sampler().share(step, replica, replicas))
    });
    assert!(resumed.eq(unbroken));
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Ranks of one replica read the same sample, and hold its tokens once between them; replicas read different ones.
#[test]
fn a_sequence_group_has_one_sample() {
    for shape in [
        mesh(2, 2, 1),
        mesh(2, 1, 2),
        mesh(3, 2, 1),
        mesh(1, 2, 2),
        MeshShape::tp(2).with_dp(2),
        mesh(4, 1, 1),
    ] {
        let sampler = Sampler::new(23, 5, 2);
        let found = ranks(shape, |device| {
            (0..4)
                .map(|step| {
                    let own = sampler.own(step, device.mesh());
                    let tokens = |sample: &u64| {
                        let tokens: Vec<u32> = (0..6).map(|token| *sample as u32 * 10 + token).collect();
                        PackedSequence::new(&tokens, None, &[], 6)
                    };
                    let read: Vec<PackedSequence> = own.iter().map(tokens).collect();
                    let batch = TokenBatch::rows(&read, 5, &device);
                    let whole = batch.tokens.clone().gather().into_local();
                    let whole: Vec<u64> = whole.to_data().iter::<i64>().map(|token| token as u64).collect();
                    let expected = sampler.batch(step).into_iter();
                    assert!(
                        whole
                            .into_iter()
                            .eq(expected.flat_map(|sample| (0..6).map(move |token| sample * 10 + token)))
                    );
                    (
                        device.mesh().coordinate(Axis::Dp),
                        hash(read.iter().map(|read| &read.tokens).collect::<Vec<_>>()),
                    )
                })
                .collect::<Vec<_>>()
        });
        for step in 0..4 {
            for one in &found {
                for other in &found {
                    let ((replica, own), (another, theirs)) = (one[step], other[step]);
                    assert_eq!(replica == another, own == theirs, "{shape}, step {step}");
                }
            }
        }
    }
}
