//! Packed documents: what a token sees and predicts, at every number of ranks and in every layout.

use burn::tensor::{DType, Device};
use burn_sp::attention::{AttentionOptions, KvMove, Mask, attention};
use burn_sp::data::{IGNORED, PackedSequence, TokenBatch, pack};
use burn_sp::layout::{Axis, MeshShape, Split};
use burn_sp::train::valid_tokens;
use burn_sp::{SpDevice, SpTensor, launch};

use crate::common::{config, mesh, ranks, tensor};

fn meshes() -> [MeshShape; 10] {
    [
        mesh(1, 1, 1),
        mesh(1, 1, 2),
        mesh(1, 2, 1),
        mesh(1, 1, 4),
        mesh(1, 4, 1),
        mesh(1, 2, 2),
        MeshShape::tp(2),
        mesh(2, 1, 1),
        mesh(2, 2, 1),
        mesh(2, 1, 2),
    ]
}

/// Documents 0..3 and 3..8, after them 8..10, which goes on in the next sequence: of 8 tokens, or of 4.
#[test]
fn documents_are_packed_one_after_another() {
    let i = IGNORED;
    let documents = [vec![0, 1, 2], vec![3, 4, 5, 6, 7], vec![], vec![8, 9]];
    let packed = pack(&documents, 8);
    assert_eq!(packed.len(), 2);
    assert_eq!(packed[0].tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
    // Case 6.
    assert_eq!(packed[0].labels, [1, 2, i, 4, 5, 6, 7, i]);
    assert_eq!(packed[0].documents, [3, 5]);
    assert_eq!(packed[1].tokens, [8, 9, 0, 0, 0, 0, 0, 0]);
    assert_eq!(packed[1].labels, [9, i, i, i, i, i, i, i]);
    assert_eq!(packed[1].documents, [2, 6]);

    let packed = pack(&documents, 4);
    let labels: Vec<_> = packed.iter().map(|sequence| sequence.labels.clone()).collect();
    // A document that goes on has its next token as label, in the next sequence.
    assert_eq!(labels, [[1, 2, i, 4], [5, 6, 7, i], [9, i, i, i]]);
    let documents: Vec<_> = packed.iter().map(|sequence| sequence.documents.clone()).collect();
    assert_eq!(documents, [vec![3, 1], vec![4], vec![2, 2]]);

    let ignored = PackedSequence::ignored(3);
    assert_eq!((ignored.labels, ignored.documents), (vec![i; 3], vec![3]));
    assert!(pack([[0u32; 0]], 4).is_empty());
}

/// As many as a corpus may have: no sequence looks at the documents of all.
#[test]
fn many_documents_are_packed_as_few_are() {
    let document = |number: u32| vec![number; 1 + number as usize % 2];
    let packed = pack((0..200_000).map(document), 3);
    assert_eq!(packed.len(), 100_000);
    for (number, sequence) in (0..).zip(&packed) {
        assert_eq!(sequence.tokens, [2 * number, 2 * number + 1, 2 * number + 1]);
        assert_eq!(sequence.labels, [IGNORED, i64::from(2 * number + 1), IGNORED]);
        assert_eq!(sequence.documents, [1, 2]);
    }
}

/// This replica's sequences of four: documents of 3 and 5 tokens, of 8, of 1, 1, 2 and 4, and of 6 with two filled up.
fn own(device: &SpDevice) -> Vec<PackedSequence> {
    let lengths = [&[3, 5][..], &[8], &[1, 1, 2, 4], &[6]];
    let mut first = 0;
    let documents = lengths.concat().into_iter().map(|length| {
        first += length;
        (first - length..first).collect::<Vec<u32>>()
    });
    let all = pack(documents, 8);
    let each = all.len() / device.mesh().size(Axis::Dp);
    all[device.mesh().coordinate(Axis::Dp) * each..][..each].to_vec()
}

/// Of the four sequences: labels, for each token the first one of its document, and whether there is a document at all.
const LABELS: [i64; 32] = [
    1, 2, -100, 4, 5, 6, 7, -100, 9, 10, 11, 12, 13, 14, 15, -100, -100, -100, 19, -100, 21, 22, 23, -100, 25, 26, 27,
    28, 29, -100, -100, -100,
];
const STARTS: [usize; 32] = [
    0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 8, 8, 8, 8, 8, 8, 16, 17, 18, 18, 20, 20, 20, 20, 24, 24, 24, 24, 24, 24, 30, 30,
];

/// Labels are each rank's part of the whole's, whole rows of a replica.
#[test]
fn labels_end_with_their_documents_on_every_layout() {
    for shape in meshes() {
        for split in [Split::Contiguous, Split::Zigzag] {
            ranks(shape, |device| {
                let device = device.with_ring_split(split.clone());
                let batch = TokenBatch::packed(&own(&device), &device);
                let row = 32 / shape.dp;
                assert_eq!(batch.labels.global_shape(), [shape.dp, row]);
                let first = device.mesh().coordinate(Axis::Dp) * row;
                let positions = batch.labels.positions(1);
                let expected: Vec<i64> = positions.iter().map(|at| LABELS[first + at]).collect();
                let found: Vec<i64> = batch.labels.local().to_data().iter().collect();
                assert_eq!(found, expected, "{shape}, {split}");
                let count = LABELS.iter().filter(|label| **label >= 0).count() as u64;
                assert_eq!(valid_tokens([&batch.labels]), count);
                let whole: Vec<i64> = batch.labels.gather().into_local().to_data().iter().collect();
                assert_eq!(whole, LABELS);
            });
        }
    }
}

/// O1: equal scores, so the output is the mean of what is seen: of token numbers, and of 1 for the first of a document.
#[test]
fn attention_sees_its_own_document_alone_on_every_layout() {
    for shape in meshes() {
        for kv in [KvMove::Ring, KvMove::Gather] {
            ranks(shape, |device| {
                let batch = TokenBatch::packed(&own(&device), &device);
                let row = 32 / shape.dp;
                let first = device.mesh().coordinate(Axis::Dp) * row;
                let heads = 4;
                let values = |value: &dyn Fn(usize) -> [f64; 2]| {
                    let layout = device.sequence_layout([shape.dp, row, heads, 2]);
                    let held = batch.tokens.positions(1);
                    let local: Vec<f64> = held.iter().flat_map(|at| value(first + at).repeat(heads)).collect();
                    let local = tensor(&local, [1, held.len(), heads, 2], DType::F32, device.device());
                    SpTensor::from_local(local, layout, &device)
                };
                let zero = values(&|_| [0.0; 2]);
                let v = values(&|at| [at as f64, f64::from(u8::from(STARTS[at] == at))]);
                let options = AttentionOptions {
                    mask: batch.mask.clone(),
                    kv,
                    ..AttentionOptions::default()
                };
                let out = attention(zero.clone(), zero, v, &options);
                let found: Vec<f64> = out.local().to_data().iter::<f64>().collect();
                let held = batch.tokens.positions(1);
                for (index, at) in held.iter().enumerate() {
                    let (at, start) = (first + at, STARTS[first + at]);
                    let (mean, count) = ((start + at) as f64 / 2.0, (at - start + 1) as f64);
                    for head in 0..heads {
                        let pair = &found[(index * heads + head) * 2..][..2];
                        let what = format!("{shape}, {kv:?}, token {at}, head {head}: {pair:?}");
                        assert!((pair[0] - mean).abs() < 1e-4, "{what}");
                        assert_eq!((1.0 / pair[1]).round(), count, "{what}");
                    }
                }
            });
        }
    }
}

/// Rows see causally, whatever documents they have.
#[test]
fn rows_are_causal() {
    ranks(mesh(2, 1, 2), |device| {
        let batch = TokenBatch::rows(&own(&device), 4, &device);
        assert_eq!((batch.mask, batch.tokens.global_shape()), (Mask::Causal, &[4, 8][..]));
    });
}

#[test]
fn replicas_without_sequences_are_told_what_to_give() {
    for packed in [false, true] {
        let error = launch(&config(mesh(1, 1, 2)), &Device::flex(), |device| match packed {
            true => TokenBatch::packed(&[], &device),
            false => TokenBatch::rows(&[], 2, &device),
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("PackedSequence::ignored"), "{error}");
    }
}
