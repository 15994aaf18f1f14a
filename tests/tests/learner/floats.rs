//! Items with tensors, which rank threads share, and which are moved where ranks have a device each.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::{Learner, SupervisedTraining};
use burn_sp::layout::MeshShape;
use burn_sp::learner::{SequenceParallel, SpModel, SpStep, TokenMetric, TokenOutput};
use burn_sp::train::LossShare;
use burn_sp::{SpDevice, seeded};

use super::run::Run;
use crate::common::{config, device, mesh};

/// `y = w x + b` over tokens.
#[derive(Module, Debug)]
struct Line {
    linear: Linear,
}

/// `[batch, tokens, 1]`, on the device of the loader.
#[derive(Clone, Debug)]
struct Points {
    x: Tensor<3>,
    y: Tensor<3>,
}

static MOVED: AtomicUsize = AtomicUsize::new(0);

impl SpStep for Line {
    type Input = Points;
    type Output = TokenOutput;

    fn step(&self, points: Points, device: &SpDevice) -> (LossShare, TokenOutput) {
        let count = points.x.dims().iter().product::<usize>() as u64;
        assert!(!points.x.is_require_grad());
        let layout = device.sequence_layout(points.x.dims());
        let [x, y] = [points.x, points.y].map(|points| device.distribute(points, &layout));
        let predicted = x.tokenwise(|x| self.linear.forward(x));
        let error = predicted.sub(y);
        let loss = LossShare::mean(error.tokenwise(|error| error.powi_scalar(2)));
        let output = TokenOutput::new(&loss, count);
        (loss, output)
    }

    fn move_item(points: Points, device: &Device) -> Points {
        MOVED.fetch_add(1, Ordering::Relaxed);
        Points {
            x: points.x.to_device(device),
            y: points.y.to_device(device),
        }
    }
}

#[derive(Clone)]
struct Pairs;

impl Batcher<Vec<f32>, Points> for Pairs {
    fn batch(&self, rows: Vec<Vec<f32>>, device: &Device) -> Points {
        let shape = [rows.len(), rows[0].len(), 1];
        let x = Tensor::from_data(TensorData::new(rows.concat(), shape), device);
        let y = x.clone() * 3.0 - 1.0;
        Points { x, y }
    }
}

fn losses(mesh: impl Into<Option<MeshShape>>, devices: &[Device]) -> Vec<f64> {
    let run = Run::new("floats", mesh);
    let rows = |count: u8| (0..count).map(|row| (0..7).map(|i| f32::from(row * i % 5) / 4.0).collect());
    let loader = |count| {
        DataLoaderBuilder::new(Pairs)
            .batch_size(2)
            .build(InMemDataset::new(rows(count).collect()))
    };
    let training = SupervisedTraining::new(&run.folder, loader(8), loader(2))
        .metrics((TokenMetric::loss(),))
        .num_epochs(run.epochs)
        .with_application_logger(None);
    let training = match run.mesh {
        Some(mesh) => SequenceParallel::new(config(mesh), devices).unwrap().lead(training),
        None => training,
    };
    let linear = seeded(&device().autodiff(), 3, |device| LinearConfig::new(1, 1).init(device));
    let learner = Learner::new(SpModel::new(Line { linear }), SgdConfig::new().init(), 0.1);
    let result = training.launch(learner);
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    run.losses(2)
}

/// Untracked tensors that rank threads have in common do not join their graphs: backward passes do not wait for each other.
#[test]
fn rank_threads_share_float_items() {
    let one = losses(None, &[]);
    for mesh in [mesh(2, 1, 2), mesh(1, 1, 4), mesh(1, 2, 1)] {
        let found = losses(mesh, &[device()]);
        assert_eq!(found.len(), one.len());
        for (one, other) in one.iter().zip(&found) {
            assert!((one - other).abs() <= 1e-5 * one, "{mesh}: {one} {other}");
        }
    }
    assert_eq!(MOVED.load(Ordering::Relaxed), 0);
}
