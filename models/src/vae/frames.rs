//! What layers do to a rank's frames, also where it has none: Burn convolves nothing empty, and cuts what is empty off its
//! graph. There a layer runs on zeros, and the result stays in the graph by a sum over no elements. So every rank has a
//! gradient, if only 0, of the same parameters.

use burn::tensor::Tensor;
use burn_sp::SpTensor;
use burn_sp::layout::Window;

/// The dimension of the frames in `[batch, channels, frames, height, width]`.
pub(super) const TIME: usize = 2;

/// Runs a layer on the frames that this rank's outputs read, after zeros for those that would lie before the clip. The
/// layer also gets which output is the first.
#[track_caller]
pub(super) fn windowed(
    x: SpTensor<5>,
    window: Window,
    layer: impl FnOnce(Tensor<5>, usize) -> Tensor<5>,
) -> SpTensor<5> {
    x.windowed(TIME, window, |x, part| {
        let first = part.outputs.start;
        if part.outputs.is_empty() {
            return without_frames(layer(zeros(&x, window.behind() + 1), first));
        }
        match part.missing {
            0 => layer(x, first),
            missing => layer(Tensor::cat(vec![zeros(&x, missing), x], TIME), first),
        }
    })
}

/// Runs what treats each frame by itself on a rank's frames.
#[track_caller]
pub(super) fn framewise(x: SpTensor<5>, layer: impl FnOnce(Tensor<5>) -> Tensor<5>) -> SpTensor<5> {
    x.tokenwise(|x| {
        let [_, _, frames, _, _] = x.dims();
        if frames == 0 {
            return without_frames(layer(zeros(&x, 1) + x.sum().reshape([1; 5])));
        }
        layer(x)
    })
}

/// [`framewise`], for layers on pictures.
///
/// # Shapes
/// - `layer`: `[pictures, channels, height, width]` to the same with other channels, height and width
#[track_caller]
pub(super) fn pictures(x: SpTensor<5>, layer: impl FnOnce(Tensor<4>) -> Tensor<4>) -> SpTensor<5> {
    framewise(x, |x| {
        let [batch, channels, frames, height, width] = x.dims();
        let y = layer(x.swap_dims(1, TIME).reshape([batch * frames, channels, height, width]));
        let [_, channels, height, width] = y.dims();
        y.reshape([batch, frames, channels, height, width]).swap_dims(1, TIME)
    })
}

/// `y` with its first frame replaced.
pub(super) fn with_first(y: Tensor<5>, first: Tensor<5>) -> Tensor<5> {
    y.slice_assign(first.dims().map(|len| 0..len), first)
}

/// So many frames of zeros, as large as those of `x`.
fn zeros(x: &Tensor<5>, frames: usize) -> Tensor<5> {
    let mut shape = x.dims();
    shape[TIME] = frames;
    Tensor::zeros(shape, (&x.device(), x.dtype()))
}

/// No frames, in the graph of `y`.
fn without_frames(y: Tensor<5>) -> Tensor<5> {
    zeros(&y, 0) + y.sum().reshape([1; 5])
}
