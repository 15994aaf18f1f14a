//! A training step, with the faults that are made after the model.

use burn::module::{Module, ParamId};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor};
use burn_sp::layout::{Axis, Layout, Placement, Split};
use burn_sp::train::{LossShare, ParamLayouts, sum_gradients, valid_tokens};
use burn_sp::{SpDevice, SpTensor};
use burn_sp_models::transformer::next_token_labels;
use burn_sp_tests::{Outcome, Rank};

use super::fault::Fault;
use super::plain::{HIDDEN, scaled};

/// The rank's tokens, and their labels.
pub fn batch(rank: &Rank, fault: Fault) -> (SpTensor<2, Int>, SpTensor<2, Int>) {
    let device = rank.device();
    let whole = rank.int_input::<2>("tokens");
    let layout = device.sequence_layout(whole.dims());
    let tokens = match fault {
        Fault::WrongSlices => {
            // Contiguous slices for a ring that is zigzag; the last ones first for ulysses.
            let [_, length] = whole.dims();
            let world = device.mesh().world().size();
            let own = match device.mesh().size(Axis::Ring) {
                1 => world - 1 - device.rank(),
                _ => device.rank(),
            };
            let slice = whole.clone().narrow(1, own * length / world, length / world);
            SpTensor::from_local(slice, layout.clone(), device)
        }
        _ => device.distribute_tokens(whole.clone()),
    };
    let labels = match fault {
        Fault::LabelsShiftedLocally => SpTensor::from_local(next_token_labels(tokens.local().clone()), layout, device),
        _ => device.distribute_tokens(next_token_labels(whole)),
    };
    (tokens, labels)
}

/// `-log p(label)` of each token, 0 where it is ignored.
fn token_losses(logits: SpTensor<3>, labels: &SpTensor<2, Int>) -> SpTensor<2> {
    let labels = labels.local().clone();
    logits.tokenwise(|logits| {
        let [batch, tokens, _] = logits.dims();
        let ignored = labels.clone().lower_elem(0);
        let classes = labels.clamp_min(0).reshape([batch, tokens, 1]);
        let losses = log_softmax(logits, 2).gather(2, classes).neg().reshape([batch, tokens]);
        losses.mask_fill(ignored, 0.0)
    })
}

/// From logits to an outcome; `norm` are the parameters of the last norm.
pub fn finish<M: Module + 'static>(
    rank: &Rank,
    module: &M,
    norm: &[ParamId],
    logits: SpTensor<3>,
    labels: &SpTensor<2, Int>,
    fault: Fault,
) -> Outcome {
    let (device, layouts) = (rank.device(), rank.layouts());
    let losses = token_losses(logits, labels);
    let count = valid_tokens([labels]);
    let own = labels
        .local()
        .to_data()
        .iter::<i64>()
        .filter(|label| *label >= 0)
        .count() as u64;
    let ranks = device.mesh().world().size() as u64;
    let share = |count| LossShare::new(losses.clone(), count);
    let partial = |share: &LossShare| GradientsParams::from_grads(share.backward(), module);
    let summed = |grads| sum_gradients(module, grads, layouts, device.mesh());
    match fault {
        Fault::LossOnAllRanks => {
            let loss = whole_loss(losses, count, device);
            let value = loss.to_data().iter::<f64>().sum();
            let grads = GradientsParams::from_grads(loss.backward(), module);
            Outcome::of_step(value, summed(grads))
        }
        Fault::GradientsAveraged => {
            let share = share(count);
            let grads = scaled(module, &summed(partial(&share)), 1.0 / ranks as f64);
            Outcome::of_step(share.value(), grads)
        }
        Fault::GradientsNotSummed => {
            let share = share(count);
            Outcome::of_step(share.value(), partial(&share))
        }
        Fault::GradientsSummedTwice => {
            let share = share(count);
            Outcome::of_step(share.value(), summed(summed(partial(&share))))
        }
        Fault::MeanOfMeans => Outcome::new(share(own * ranks)),
        Fault::MeansAveraged => {
            let share = share(own);
            let grads = scaled(module, &summed(partial(&share)), 1.0 / ranks as f64);
            Outcome::of_step(share.value() / ranks as f64, grads)
        }
        Fault::PlainMeans => {
            let mean = losses.local().clone().sum().mul_scalar(1.0 / own as f64);
            let grads = GradientsParams::from_grads(mean.backward(), module);
            let grads = scaled(module, &summed(grads), 1.0 / ranks as f64);
            let means = whole_loss(losses, own, device).to_data().iter::<f64>().sum::<f64>();
            Outcome::of_step(means / ranks as f64, grads)
        }
        Fault::LossNotSummed => {
            let share = share(count);
            let own = losses.local().clone().sum().to_data().iter::<f64>().sum::<f64>() / count as f64;
            Outcome::of_step(own, summed(partial(&share)))
        }
        Fault::NormNotSummedOverTp => {
            let share = share(count);
            let grads = partial(&share);
            // As if the norm's parameters were sharded.
            let over_tp = |layouts: ParamLayouts, id: &ParamId| {
                let layout = Layout::replicated([HIDDEN]).shard(0, Axis::Tp, Split::Contiguous);
                layouts.with(*id, layout)
            };
            let layouts = norm.iter().fold(layouts.clone(), over_tp);
            let grads = sum_gradients(module, grads, &layouts, device.mesh());
            Outcome::of_step(share.value(), grads)
        }
        Fault::OwnStep | Fault::OtherRates => {
            let share = share(count);
            let grads = summed(partial(&share));
            let times = if fault == Fault::OtherRates { device.rank() } else { 0 };
            let rate = 0.1 * (1 + times) as f64;
            let moved = SgdConfig::new()
                .init()
                .step(rate, module.clone(), scaled(module, &grads, 1.0));
            Outcome::of_step(share.value(), grads).parameters(&moved)
        }
        _ => Outcome::new(share(count)),
    }
}

/// The loss of all ranks, on every rank, to be differentiated on each.
fn whole_loss(losses: SpTensor<2>, count: u64, device: &SpDevice) -> Tensor<1> {
    let layout = losses.layout().clone();
    let sharded = |axis: &Axis| matches!(layout.placement(*axis), Placement::Shard(_));
    let axes: Vec<Axis> = Axis::ALL.into_iter().filter(sharded).collect();
    let term = losses.into_local().sum().mul_scalar(1.0 / count as f64);
    let partial = axes
        .iter()
        .fold(Layout::replicated([1]), |layout, axis| layout.partial(*axis));
    let term = SpTensor::from_local(term, partial, device);
    let whole = axes
        .into_iter()
        .fold(term, |term, axis| term.redistribute(axis, Placement::Replicate));
    whole.into_local()
}
