use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::*;
use crate::Positions;

/// No pattern at all, and only the required method.
#[derive(Debug)]
struct Scattered;

impl MaskRule for Scattered {
    fn visible(&self, query: usize, key: usize) -> bool {
        (query * 31 + key * 17 + query * key).is_multiple_of(3)
    }
}

/// Every kind of mask, in every small size.
fn masks() -> Vec<Mask> {
    let mut masks = vec![Mask::Full, Mask::Causal, Mask::custom(Scattered)];
    for (size, sink) in (0..5).flat_map(|size| (0..4).map(move |sink| (size, sink))) {
        masks.push(Mask::Window { size, sink });
    }
    for lengths in [&[][..], &[0], &[3], &[1, 1, 1], &[2, 0, 3], &[0, 4, 0, 0, 1, 3], &[9]] {
        masks.push(Mask::documents(lengths.iter().copied()));
        masks.push(Mask::whole_documents(lengths.iter().copied()));
    }
    let lens = || (1..4).flat_map(|len| (1..4).map(move |first| (len, first)));
    for blocks in lens().map(|(len, first)| Blocks::new(len).with_first(first)) {
        for window in [None, Some(0), Some(1), Some(2), Some(4)] {
            for sink in [0, 1, 3] {
                masks.push(Mask::BlockCausal { blocks, window, sink });
            }
        }
        masks.extend([0, 1, 3, 4].map(|half| Mask::TeacherForcing { blocks, half }));
    }
    let window = Mask::Window { size: 3, sink: 1 };
    masks.push(Mask::whole_documents([2, 0, 3]).and(Mask::Causal));
    masks.push(Mask::documents([3, 5]).and(window.clone()));
    masks.push(window.and(Mask::custom(Scattered)));
    masks.push(masks[masks.len() - 1].clone().and(Mask::block_causal(Blocks::new(2))));
    masks
}

/// Every tile and every row of keys over a few positions, against the definition.
#[test]
fn tiles_and_runs_agree_with_visible() {
    const END: usize = 9;
    let ranges = || (0..=END).flat_map(|start| (start..=END).map(move |end| start..end));
    for mask in masks() {
        // What is seen, asked once.
        let seen: Vec<Vec<bool>> = (0..END)
            .map(|query| (0..END).map(|key| mask.visible(query, key)).collect())
            .collect();
        let sees = |query: usize, key: usize| seen[query][key];
        let costly = matches!(mask, Mask::And(_) | Mask::Custom(_));
        for keys in ranges() {
            for query in 0..END {
                let runs: Vec<_> = mask.runs(query, keys.clone()).collect();
                assert!(runs.windows(2).all(|pair| pair[0].end <= pair[1].start));
                let listed: Vec<_> = runs.into_iter().flatten().collect();
                let expected: Vec<_> = keys.clone().filter(|&key| sees(query, key)).collect();
                assert_eq!(listed, expected, "{mask:?}, query {query}, keys {keys:?}");
            }
            for queries in ranges() {
                let pairs = queries.len() * keys.len();
                let seen_by = |query: usize| keys.clone().filter(|&key| sees(query, key)).count();
                let count: usize = queries.clone().map(seen_by).sum();
                let right = match mask.tile(&queries, &keys) {
                    Tile::Empty => count == 0,
                    Tile::Full => count == pairs,
                    Tile::Mixed => costly || 0 < count && count < pairs,
                };
                assert!(
                    right,
                    "{mask:?}, queries {queries:?}, keys {keys:?}: {count} of {pairs} seen"
                );
                let [queries, keys] = [queries.clone(), keys.clone()].map(|range| Positions::new([range]));
                assert_eq!(mask.visible_pairs(&queries, &keys), count as u64, "{mask:?}");
                assert_eq!(mask.sees_any(&queries, &keys), count > 0, "{mask:?}");
            }
        }
    }
}

fn assert_counts(mask: Mask, expected: &[u64]) {
    let all = Positions::whole(expected.len());
    let seen_by = |query: usize| mask.visible_pairs(&Positions::new([query..query + 1]), &all);
    let counts: Vec<u64> = (0..expected.len()).map(seen_by).collect();
    assert_eq!(counts, expected, "{mask:?}");
}

/// The definitions themselves, in numbers of keys seen.
#[test]
fn counts_are_those_of_the_definitions() {
    assert_counts(Mask::Window { size: 3, sink: 0 }, &[1, 2, 3, 3, 3, 3, 3, 3]);
    assert_counts(Mask::Window { size: 3, sink: 2 }, &[1, 2, 3, 4, 5, 5, 5, 5]);
    assert_counts(Mask::Window { size: 0, sink: 2 }, &[1, 2, 2, 2]);
    assert_counts(Mask::documents([3, 5]), &[1, 2, 3, 1, 2, 3, 4, 5]);
    assert_counts(Mask::documents([3, 0, 2]), &[1, 2, 3, 1, 2, 0, 0]);
    assert_counts(Mask::whole_documents([3, 0, 2]), &[3, 3, 3, 2, 2, 0]);
    assert_counts(
        Mask::documents([3, 5]).and(Mask::Window { size: 2, sink: 1 }),
        &[1, 2, 3, 1, 2, 2, 2, 2],
    );
    let blocks = Blocks::new(2);
    assert_counts(Mask::block_causal(blocks), &[2, 2, 4, 4, 6, 6, 8, 8]);
    assert_counts(Mask::block_causal(blocks.with_first(1)), &[1, 3, 3, 5, 5, 7, 7]);
    let windowed = |window, sink| Mask::BlockCausal {
        blocks,
        window: Some(window),
        sink,
    };
    assert_counts(windowed(4, 0), &[2, 2, 4, 4, 4, 4, 4, 4]);
    assert_counts(windowed(2, 1), &[2, 2, 3, 3, 3, 3, 3, 3]);
    // The last block counts whole, though the sequence ends within it.
    assert_counts(windowed(3, 0), &[2, 2, 3, 3, 2]);
    let forcing = |blocks, half| Mask::TeacherForcing { blocks, half };
    assert_counts(forcing(blocks, 4), &[2, 2, 4, 4, 2, 2, 4, 4, 0]);
    assert_counts(
        forcing(Blocks::new(3).with_first(1), 5),
        &[1, 4, 4, 4, 5, 1, 4, 4, 4, 5],
    );
}

#[test]
fn teacher_forcing_shows_its_share() {
    for (blocks, len) in [(1, 3), (4, 2), (5, 6)] {
        let mask = Mask::TeacherForcing {
            blocks: Blocks::new(len),
            half: blocks * len,
        };
        let tokens = 2 * blocks * len;
        let all = Positions::whole(tokens);
        // (nb + 1) / (4 nb) of all pairs
        let expected = tokens * tokens * (blocks + 1) / (4 * blocks);
        assert_eq!(mask.visible_pairs(&all, &all), expected as u64);
    }
}

#[test]
fn work_of_splits() {
    let work = |mask: &Mask, total: usize, ranks: &[Vec<Range<usize>>]| -> Vec<u64> {
        let own = ranks.iter().map(|ranges| Positions::new(ranges.iter().cloned()));
        own.map(|own| mask.visible_pairs(&own, &Positions::whole(total)))
            .collect()
    };
    assert_eq!(work(&Mask::Causal, 8, &[vec![0..4], vec![4..8]]), [10, 26]);
    let zigzag = [vec![0..2, 6..8], vec![2..6]];
    assert_eq!(work(&Mask::documents([8]), 8, &zigzag), [18, 18]);
    // Each document zigzag by itself.
    let by_document = [vec![0..1, 3..4, 4..7, 13..16], vec![1..3, 7..13]];
    assert_eq!(work(&Mask::documents([4, 12]), 16, &by_document), [44, 44]);
}

#[test]
fn whole_blocks_of_a_ring_are_skipped() {
    let early = Positions::new([0..4, 12..16]);
    let late = Positions::new([4..12]);
    assert!(Mask::documents([4, 8, 4]).sees_any(&early, &early));
    assert!(!Mask::documents([4, 8, 4]).sees_any(&early, &late));
    assert!(!Mask::Causal.sees_any(&Positions::new([0..4]), &late));
    assert!(!Mask::Window { size: 2, sink: 0 }.sees_any(&Positions::new([9..16]), &Positions::new([0..4, 5..8])));
    assert!(!Mask::Full.sees_any(&Positions::new([]), &late));
    // Each lets something through, but nothing in common.
    let sees_odd = Mask::custom(Odd).and(Mask::Window { size: 1, sink: 0 });
    assert!(!sees_odd.sees_any(&Positions::whole(16), &Positions::whole(16)));
}

/// Keys at odd distance.
#[derive(Debug)]
struct Odd;

impl MaskRule for Odd {
    fn visible(&self, query: usize, key: usize) -> bool {
        query.abs_diff(key) % 2 == 1
    }
}

#[test]
fn many_documents_are_found_quickly() {
    // A search through all documents for each row would take minutes.
    let documents = 1_000_000;
    let mask = Mask::documents(std::iter::repeat_n(4, documents));
    let all = Positions::whole(4 * documents);
    assert_eq!(mask.visible_pairs(&all, &all), 10 * documents as u64);
}

#[test]
fn masks_are_values() {
    assert_eq!(Mask::default(), Mask::Causal);
    assert_eq!(Mask::documents([3, 5]), Mask::documents_from_offsets(&[0, 3, 8]));
    assert_eq!(
        Mask::whole_documents([3, 5]),
        Mask::Documents {
            documents: Documents::from_offsets(&[0, 3, 8]),
            causal: false
        }
    );
    assert_ne!(Mask::documents([3, 5]), Mask::whole_documents([3, 5]));
    let custom = Mask::custom(Scattered);
    assert_eq!(custom, custom.clone());
    assert_ne!(custom, Mask::custom(Scattered));
    // Intersections that say nothing new.
    assert_eq!(Mask::Full.and(Mask::Causal), Mask::Causal);
    assert_eq!(custom.clone().and(Mask::Full), custom);
    assert_eq!(Mask::Causal.and(Mask::Causal), Mask::Causal);
}

/// The same run, whatever it is asked about.
#[derive(Debug)]
struct Answer(Range<usize>);

impl MaskRule for Answer {
    fn visible(&self, _: usize, key: usize) -> bool {
        self.0.contains(&key)
    }

    fn next_run(&self, _: usize, _: Range<usize>) -> Range<usize> {
        self.0.clone()
    }
}

#[test]
fn refusals_name_what_is_wrong() {
    fn refused<R>(work: impl FnOnce() -> R, expected: &str) {
        let payload = catch_unwind(AssertUnwindSafe(work)).err().expect("a refusal");
        let message = payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| payload.downcast_ref::<&str>().map(|message| message.to_string()));
        assert_eq!(message.as_deref(), Some(expected));
    }
    refused(
        || Mask::documents_from_offsets(&[]),
        "documents: the first offset is None, expected 0, the start of the first document",
    );
    refused(
        || Mask::documents_from_offsets(&[3, 8]),
        "documents: the first offset is Some(3), expected 0, the start of the first document",
    );
    refused(
        || Documents::from_offsets(&[0, 3, 8, 5]),
        "documents: offset 3 is 5 after 8, expected ascending offsets",
    );
    refused(
        || Documents::new([1, usize::MAX]),
        "documents: a length of 18446744073709551615 after 1 tokens is beyond any sequence",
    );
    refused(|| Blocks::new(0), "blocks: the length is 0, expected at least 1");
    refused(
        || Blocks::new(1).with_first(0),
        "blocks: the length of the first is 0, expected at least 1",
    );
    for (answer, keys) in [(3..9, 4..8), (4..9, 4..8), (0..2, 4..8), (8..9, 4..8)] {
        let mask = Mask::custom(Answer(answer.clone()));
        let expected = format!(
            "mask: Answer({answer:?}) answers {answer:?} for query 5, expected a run within the keys asked about, {keys:?}"
        );
        refused(|| mask.runs(5, keys.clone()).count(), &expected);
        let both = Mask::whole_documents([100]).and(mask);
        refused(|| both.runs(5, keys).count(), &expected);
    }
    // Nothing is nothing, wherever.
    assert_eq!(Mask::custom(Answer(0..0)).runs(5, 4..8).count(), 0);
}
