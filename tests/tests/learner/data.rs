//! Token data in Burn's loop: which tokens, labels and mask a rank gets of an item, and the losses of packed documents.

use std::fs;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::optim::AdamWConfig;
use burn::train::{Learner, SupervisedTraining};
use burn_sp::attention::Mask;
use burn_sp::data::{IGNORED, PackedSequence, TokenFile, TokenSequences, TokenWriter, pack};
use burn_sp::layout::{Axis, MeshShape};
use burn_sp::learner::{SequenceParallel, SpModel, TokenBatcher, TokenItem, TokenMetric};
use burn_sp::seeded;

use super::model::{Hook, Language, llama};
use super::run::{Run, whole};
use crate::common::{config, device, mesh, ranks};

const NONE: i64 = IGNORED;

/// Whole tokens and labels, on every rank, and the masks of the replicas.
fn distributed(mesh: MeshShape, item: &TokenItem) -> (Vec<i64>, Vec<i64>, Vec<Mask>) {
    let found = ranks(mesh, |device| {
        let batch = item.clone().distribute(&device);
        let replica = device.mesh().coordinate(Axis::Dp);
        let values = [batch.tokens, batch.labels].map(|ids| ids.gather().into_local().into_data().iter().collect());
        (replica, values, batch.mask)
    });
    let mut masks = Vec::new();
    for (replica, values, mask) in &found {
        assert_eq!(values, &found[0].1);
        match masks.get(*replica) {
            None => masks.push(mask.clone()),
            Some(first) => assert_eq!(first, mask, "all ranks of a replica see the same"),
        }
    }
    let [tokens, labels]: [Vec<i64>; 2] = found.into_iter().next().unwrap().1;
    (tokens, labels, masks)
}

#[test]
fn windows_are_rows() {
    let windows: Vec<Vec<u32>> = vec![vec![1, 2, 3, 4], vec![5, 6, 7, 8], vec![9, 10, 11, 12]];
    let item: TokenItem = TokenBatcher::rows().batch(windows, &device());
    for mesh in [mesh(1, 1, 1), mesh(2, 1, 2), mesh(3, 1, 1), mesh(1, 1, 3)] {
        let (tokens, labels, masks) = distributed(mesh, &item);
        assert_eq!(tokens, [1, 2, 3, 5, 6, 7, 9, 10, 11], "{mesh}");
        assert_eq!(labels, [2, 3, 4, 6, 7, 8, 10, 11, 12], "{mesh}");
        assert!(masks.iter().all(|mask| *mask == Mask::Causal));
    }
    // One replica has none: it gets one that does not count.
    let (tokens, labels, _) = distributed(mesh(4, 1, 1), &item);
    assert_eq!((&tokens[9..], &labels[9..]), (&[0; 3][..], &[NONE; 3][..]));
}

#[test]
fn packed_documents_share_a_row() {
    let documents = [&[1, 2, 3][..], &[4, 5, 6, 7, 8, 9], &[10, 11]];
    let item: TokenItem = TokenBatcher::packed().batch(pack(documents, 4), &device());
    for mesh in [mesh(1, 1, 1), mesh(1, 1, 3), mesh(1, 2, 2)] {
        let (tokens, labels, masks) = distributed(mesh, &item);
        assert_eq!(tokens, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0]);
        assert_eq!(labels, [2, 3, NONE, 5, 6, 7, 8, 9, NONE, 11, NONE, NONE]);
        assert_eq!(masks, [Mask::documents([3, 1, 4, 1, 2, 1])]);
    }
    // Three sequences, two for each replica: one is filled up.
    let (tokens, labels, masks) = distributed(mesh(2, 1, 2), &item);
    assert_eq!(tokens[8..], [9, 10, 11, 0, 0, 0, 0, 0]);
    assert_eq!(labels[8..], [NONE, 11, NONE, NONE, NONE, NONE, NONE, NONE]);
    assert_eq!(masks, [Mask::documents([3, 1, 4]), Mask::documents([1, 2, 1, 4])]);
}

#[test]
#[should_panic(expected = "windows of 1 tokens leave none to predict from")]
fn windows_without_labels_are_refused() {
    let _ = TokenItem::from_windows([[1]]);
}

/// Documents of 2 to 8 tokens in a file.
fn sequences(run: &Run) -> TokenSequences {
    let file = run.folder.join("tokens");
    let mut writer = TokenWriter::create(&file, 17, "").unwrap();
    for document in 0..12u32 {
        let tokens: Vec<u32> = (0..2 + document % 7)
            .map(|i| (3 * i + document * document) % 17)
            .collect();
        writer.write(&tokens).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
    TokenSequences::new(TokenFile::open(&file).unwrap(), 9).with_boundaries()
}

fn trained(run: &Run, batcher: TokenBatcher) {
    let loader = || {
        let builder = DataLoaderBuilder::<PackedSequence, TokenItem>::new(batcher);
        builder.batch_size(3).shuffle(4).build(sequences(run))
    };
    let training = SupervisedTraining::new(&run.folder, loader(), loader())
        .num_epochs(run.epochs)
        .metrics((TokenMetric::loss(),))
        .with_application_logger(None);
    let training = match run.mesh {
        Some(mesh) => SequenceParallel::new(config(mesh), &device()).unwrap().lead(training),
        None => training,
    };
    let model = SpModel::new(Language {
        transformer: seeded(&device().autodiff(), 5, |device| llama().init(device)),
        hook: Hook::default(),
    });
    whole(training.launch(Learner::new(model, AdamWConfig::new().init(), 0.02)));
}

/// A file of packed documents, the last sequence not full and the last batch of fewer: on any mesh as by Burn's own strategy.
#[test]
fn packed_documents_of_a_file_train_on_any_mesh() {
    let one = Run::new("packed", None);
    let file = sequences(&one);
    assert!(!file.count().is_multiple_of(3));
    trained(&one, TokenBatcher::packed());
    // Who sees other documents gets other losses.
    let rows = Run::new("unpacked", None);
    trained(&rows, TokenBatcher::rows());
    assert_ne!(rows.losses(1), one.losses(1));

    let labels = |index| {
        file.get(index)
            .unwrap()
            .labels
            .into_iter()
            .filter(|label| *label >= 0)
            .count()
    };
    let all: usize = (0..file.count()).map(labels).sum();
    for mesh in [
        mesh(1, 1, 3),
        mesh(2, 1, 2),
        mesh(1, 2, 1),
        mesh(3, 1, 1),
        MeshShape::tp(2),
    ] {
        let run = Run::new("packed", mesh);
        trained(&run, TokenBatcher::packed());
        run.same_losses(&one);
        let steps = run.logged("train", "Loss", 2).steps;
        assert_eq!(steps.iter().map(|(_, tokens)| tokens).sum::<usize>(), all, "{mesh}");
    }
}

/// A file that is cut off meanwhile ends training with its name.
#[test]
fn a_file_that_cannot_be_read_ends_training() {
    let run = Run::new("cut", mesh(1, 1, 2));
    let read = sequences(&run);
    fs::File::options()
        .write(true)
        .open(run.folder.join("tokens"))
        .unwrap()
        .set_len(60)
        .unwrap();
    let builder = || DataLoaderBuilder::<PackedSequence, TokenItem>::new(TokenBatcher::packed()).batch_size(1);
    let training = SupervisedTraining::new(&run.folder, builder().build(read.clone()), builder().build(read))
        .with_application_logger(None);
    let model = SpModel::new(Language {
        transformer: llama().init(&device()),
        hook: Hook::default(),
    });
    let strategy = SequenceParallel::new(config(mesh(1, 1, 2)), &device()).unwrap();
    let result = strategy
        .lead(training)
        .launch(Learner::new(model, AdamWConfig::new().init(), 0.02));
    let error = result.error.unwrap().to_string();
    assert!(error.contains("tokens could not be read: "), "{error}");
}
