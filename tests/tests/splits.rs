//! Who computes how much under a mask: splits that balance it, by exact counts of (query, key) pairs.

use burn_sp::attention::{Mask, Positions};
use burn_sp::kernels::Blocks;
use burn_sp::layout::Split;

/// The pairs that each rank computes.
fn work(split: &Split, mask: &Mask, len: usize, ranks: usize) -> Vec<u64> {
    let parts = split.parts(len, ranks);
    let queries = |rank: usize| Positions::new(parts.of(rank).to_vec());
    (0..ranks)
        .map(|rank| mask.visible_pairs(&queries(rank), &Positions::whole(len)))
        .collect()
}

/// The tokens that each rank owns; all of them once.
fn tokens(split: &Split, len: usize, ranks: usize) -> Vec<usize> {
    // Explicit parts that do not cover every position exactly once are refused here.
    let parts = split.parts(len, ranks);
    for rank in 0..ranks {
        let ascending = parts.of(rank).windows(2).all(|pair| pair[0].end < pair[1].start);
        assert!(ascending, "{:?}", parts.of(rank));
    }
    (0..ranks).map(|rank| parts.len_of(rank)).collect()
}

fn spread<T: Ord + Copy + std::ops::Sub<Output = T>>(of: &[T]) -> T {
    *of.iter().max().expect("a rank") - *of.iter().min().expect("a rank")
}

/// Case 23.
#[test]
fn documents_of_4_and_12_are_44_and_44() {
    let split = Split::zigzag_documents(&[4, 12], 2);
    assert_eq!(work(&split, &Mask::documents([4, 12]), 16, 2), [44, 44]);
    assert_eq!(Split::balanced(&Mask::documents([4, 12]), 16, 2), split);
    let parts = split.parts(16, 2);
    assert_eq!(parts.of(0), [0..1, 3..7, 13..16]);
    assert_eq!(parts.of(1), [1..3, 7..13]);
    // One document of 8.
    assert_eq!(work(&Split::Zigzag, &Mask::Causal, 8, 2), [18, 18]);
    assert_eq!(work(&Split::Contiguous, &Mask::Causal, 8, 2), [10, 26]);
    assert_eq!(work(&Split::zigzag_documents(&[8], 2), &Mask::Causal, 8, 2), [18, 18]);
}

#[test]
fn documents_whose_chunks_are_equal_are_balanced_exactly() {
    for ranks in 1..=6 {
        let lengths = [2 * ranks, 6 * ranks, 0, 4 * ranks];
        let len = lengths.iter().sum();
        let split = Split::zigzag_documents(&lengths, ranks);
        assert_eq!(spread(&tokens(&split, len, ranks)), 0);
        for mask in [Mask::documents(lengths), Mask::whole_documents(lengths)] {
            assert_eq!(spread(&work(&split, &mask, len, ranks)), 0, "{ranks} ranks");
        }
    }
}

/// Documents of every length up to 8, alone, in pairs and in a long row, on up to 6 ranks.
#[test]
fn any_documents_are_dealt_to_within_a_token() {
    let mut rows: Vec<Vec<usize>> = (0..=8).map(|length| vec![length]).collect();
    rows.extend((0..=8).flat_map(|first| (0..=8).map(move |second| vec![first, second])));
    // Many of a length that does not divide: what each leaves over must not add up.
    rows.extend((1..=13).map(|length| vec![length; 50]));
    rows.extend((1..=8).map(|by| (0..60).map(|index| index * by % 11).collect()));
    for lengths in rows {
        let len: usize = lengths.iter().sum();
        let longest = *lengths.iter().max().expect("a document") as u64;
        let mask = Mask::documents(lengths.clone());
        for ranks in 1..=6 {
            let split = Split::zigzag_documents(&lengths, ranks);
            let context = format!("{lengths:?} on {ranks} ranks");
            assert!(spread(&tokens(&split, len, ranks)) <= 1, "{context}");
            let work = work(&split, &mask, len, ranks);
            let all: u64 = lengths.iter().map(|length| (length * (length + 1) / 2) as u64).sum();
            assert_eq!(work.iter().sum::<u64>(), all, "{context}");
            // However many documents there are.
            assert!(spread(&work) <= 3 * longest, "{context}: {work:?}");
        }
    }
}

#[test]
fn each_mask_gets_the_split_that_balances_it() {
    let window = Mask::Window { size: 5, sink: 1 };
    for ranks in 2..=5 {
        let len = 12 * ranks;
        let balanced = |mask: &Mask| Split::balanced(mask, len, ranks);
        assert_eq!(balanced(&Mask::Full), Split::Contiguous);
        assert_eq!(balanced(&window), Split::Contiguous);
        assert_eq!(balanced(&Mask::Causal), Split::Zigzag);
        // A window as wide as the sequence is none.
        assert_eq!(balanced(&Mask::Window { size: len, sink: 0 }), Split::Zigzag);
        assert_eq!(balanced(&Mask::block_causal(Blocks::new(6))), Split::Zigzag);
        let documents = Mask::documents([len - 10, 10]);
        assert_eq!(balanced(&documents), Split::zigzag_documents(&[len - 10, 10], ranks));
        // Padding after the documents is shared out too.
        let padded = balanced(&Mask::documents([len - 10, 3]));
        assert_eq!(padded, Split::zigzag_documents(&[len - 10, 3, 7], ranks));
    }
}

/// No candidate is better, for any length, and all positions are owned once.
#[test]
fn no_other_split_is_better_balanced() {
    for len in 0..=25 {
        let masks = [
            Mask::Full,
            Mask::Causal,
            Mask::Window { size: 4, sink: 2 },
            Mask::documents([7, 5]),
            Mask::whole_documents([3, 30]),
            Mask::block_causal(Blocks::new(4).with_first(1)),
            Mask::documents([9, 9]).and(Mask::Window { size: 3, sink: 0 }),
        ];
        for mask in masks {
            for ranks in 1..=5 {
                let split = Split::balanced(&mask, len, ranks);
                assert!(spread(&tokens(&split, len, ranks)) <= 1, "{mask:?}, {len} on {ranks}");
                let busiest = |split: &Split| work(split, &mask, len, ranks).into_iter().max();
                for other in [Split::Contiguous, Split::Zigzag] {
                    assert!(busiest(&split) <= busiest(&other), "{mask:?}, {len} on {ranks}");
                }
            }
        }
    }
}

/// The clean and the noisy tokens of the same frames are on one rank, and work is as balanced as by zigzag.
#[test]
fn teacher_forcing_keeps_both_halves_of_a_frame_together() {
    for ranks in 1..=4 {
        for half in 0..=16 {
            let mask = Mask::TeacherForcing {
                blocks: Blocks::new(2),
                half,
            };
            for padding in [0, 3] {
                let len = 2 * half + padding;
                let split = Split::balanced(&mask, len, ranks);
                let most = if padding > 0 { 3 } else { 2 };
                assert!(spread(&tokens(&split, len, ranks)) <= most, "{half} on {ranks}");
                let parts = split.parts(len, ranks);
                let noisy = |rank| {
                    let own = parts.of(rank).iter().cloned().flatten();
                    own.filter(|at| (half..2 * half).contains(at)).count()
                };
                assert!(
                    spread(&(0..ranks).map(noisy).collect::<Vec<_>>()) <= 1,
                    "{half} on {ranks}"
                );
                for rank in 0..ranks {
                    let own: Vec<usize> = parts.of(rank).iter().cloned().flatten().collect();
                    let clean: Vec<usize> = own.iter().filter(|at| **at < half).map(|at| at + half).collect();
                    let noisy = own.iter().copied().filter(|at| (half..2 * half).contains(at));
                    assert_eq!(clean, noisy.collect::<Vec<_>>(), "rank {rank} of {ranks}, {half}");
                }
            }
        }
        // Too short for both halves: equally many tokens, as under any mask.
        for len in 0..20 {
            let mask = Mask::TeacherForcing {
                blocks: Blocks::new(3),
                half: len / 2 + 1,
            };
            let split = Split::balanced(&mask, len, ranks);
            assert!(spread(&tokens(&split, len, ranks)) <= 1, "{len} on {ranks}");
        }
        // Whole blocks in every chunk: exactly balanced.
        let half = 4 * ranks;
        let mask = Mask::TeacherForcing {
            blocks: Blocks::new(2),
            half,
        };
        let split = Split::balanced(&mask, 2 * half, ranks);
        assert_eq!(tokens(&split, 2 * half, ranks), vec![8; ranks]);
        // A token of block `j` sees `j + 1` blocks of 2, in either half: over both halves and 2 * ranks blocks.
        let each = 2 * 2 * 2 * (2 * ranks + 1) as u64;
        assert_eq!(work(&split, &mask, 2 * half, ranks), vec![each; ranks]);
    }
}

#[test]
#[should_panic(expected = "0 ranks")]
fn no_ranks_are_refused() {
    Split::balanced(&Mask::Causal, 8, 0);
}
