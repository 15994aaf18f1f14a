//! Tensors as rows, fresh and reused output buffers, and the split into parallel tasks.

use std::mem::MaybeUninit;

use burn::backend::{DType, TensorMetadata};
use burn_flex::{FlexTensor, Layout};
use burn_std::{Bytes, Shape};
use pulp::Arch;
use rayon::prelude::*;

use super::scalar::{Real, Scalar, as_uninit};

/// Elements a task handles, about: small enough to balance two cores, large enough to hide the scheduling.
const TASK: usize = 32 * 1024;

/// Row length of elementwise kernels on contiguous tensors: some rows of the nearest cache.
const BLOCK: usize = 2048;

/// Lanes of sums along a row: several vector registers, so that additions do not wait for each other.
pub const LANES: usize = 16;

/// Calls `$run::<T>(...)` for the element type of a tensor.
macro_rules! by_dtype {
    ($op:literal, $dtype:expr, $run:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            burn::backend::DType::F32 => $run::<f32>($($argument),*),
            burn::backend::DType::F64 => $run::<f64>($($argument),*),
            burn::backend::DType::BF16 => $run::<half::bf16>($($argument),*),
            burn::backend::DType::F16 => $run::<half::f16>($($argument),*),
            other => panic!("{}: no kernel for {other:?}, use F32, F64, BF16 or F16", $op),
        }
    };
}
pub(super) use by_dtype;

/// The tensor with its last dimension contiguous: itself, or a copy.
pub fn dense(tensor: FlexTensor) -> FlexTensor {
    let last = tensor.layout().num_dims().wrapping_sub(1);
    let rows_are_slices = tensor.is_contiguous()
        // Rows of a few elements cost more to find than to copy.
        || (tensor.layout().strides()[last] == 1 && tensor.layout().shape()[last] >= 8);
    if rows_are_slices {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

/// Row length for an elementwise kernel over tensors of one shape: the last dimension, or any if all are contiguous.
pub fn block_len(tensors: &[&FlexTensor]) -> usize {
    match tensors[0].shape().as_slice().last() {
        Some(&last) if tensors.iter().any(|tensor| !tensor.is_contiguous()) => last,
        _ => BLOCK,
    }
}

/// A tensor as rows, each a slice.
pub struct Rows<'a, T> {
    storage: &'a [T],
    start: isize,
    len: usize,
    /// Sizes and strides of the dimensions before the row, the fastest first, merged where possible.
    outer: Vec<(usize, isize)>,
}

impl<'a, T: Scalar> Rows<'a, T> {
    /// Rows of `len` elements of a non-empty [`dense`] tensor: its last dimension, or anything if it is contiguous
    /// (the last row is then shorter where `len` does not divide).
    pub fn new(tensor: &'a FlexTensor, len: usize) -> Self {
        let storage = tensor.storage::<T>();
        let layout = tensor.layout();
        if let Some((start, end)) = layout.contiguous_offsets() {
            return Self {
                storage: &storage[..end],
                start: start as isize,
                len,
                outer: vec![((end - start).div_ceil(len), len as isize)],
            };
        }
        let dims = layout.shape().as_slice().iter().zip(layout.strides());
        let mut outer: Vec<(usize, isize)> = Vec::new();
        for (&size, &stride) in dims.rev().skip(1).filter(|&(&size, _)| size != 1) {
            match outer.last_mut() {
                Some((inner, step)) if stride == *step * *inner as isize => *inner *= size,
                _ => outer.push((size, stride)),
            }
        }
        Self {
            storage,
            start: layout.start_offset() as isize,
            len,
            outer,
        }
    }

    /// A row by its row-major index.
    #[inline(always)]
    pub fn row(&self, index: usize) -> &'a [T] {
        let mut at = self.start;
        match self.outer.as_slice() {
            [(_, stride)] => at += index as isize * stride,
            outer => {
                let mut rest = index;
                for &(size, stride) in outer {
                    at += (rest % size) as isize * stride;
                    rest /= size;
                }
            }
        }
        let at = at as usize;
        &self.storage[at..(at + self.len).min(self.storage.len())]
    }
}

/// The input that a kernel's output replaces.
pub enum Input<'a, T> {
    /// Its own tensor.
    Rows(Rows<'a, T>),
    /// The output's buffer: nobody else holds the input, so it is overwritten.
    Output,
}

impl<T: Scalar> Input<'_, T> {
    /// The row with this index, in the type computed in, before `out`, the same row of the output, is written.
    #[inline(always)]
    pub fn row<'a>(&'a self, index: usize, out: &[MaybeUninit<T>], scratch: &'a mut Vec<T::Acc>) -> &'a [T::Acc] {
        match self {
            Self::Rows(rows) => T::widen(rows.row(index), scratch),
            Self::Output => {
                // SAFETY: `replace` makes this variant only where the output's memory is the input's.
                let row = unsafe { &*(std::ptr::from_ref(out) as *const [T]) };
                T::widen_into(row, scratch);
                scratch
            }
        }
    }
}

/// Computes a tensor of the shape and dtype of `input`: in its memory if nobody else holds it, else in a fresh one.
///
/// A fresh page costs more than all the arithmetic on its content, so reuse pays.
///
/// # Safety
/// `fill` must write every element, and read a row of the input before it writes that row.
pub unsafe fn replace<T: Scalar>(
    input: FlexTensor,
    len: usize,
    fill: impl FnOnce(Input<'_, T>, &mut [MaybeUninit<T>]),
) -> FlexTensor {
    let mut input = input;
    let elements = input.layout().num_elements();
    let whole =
        input.is_contiguous() && input.layout().start_offset() == 0 && input.bytes().len() == elements * size_of::<T>();
    if whole && let Some(buffer) = input.try_storage_mut::<T>() {
        fill(Input::Output, as_uninit(buffer));
        return input;
    }
    // SAFETY: the caller's promise.
    unsafe { build(input.shape(), |out| fill(Input::Rows(Rows::new(&input, len)), out)) }
}

/// A contiguous tensor in fresh memory, not zeroed first.
///
/// # Safety
/// `fill` must write every element.
pub unsafe fn build<T: Scalar>(shape: Shape, fill: impl FnOnce(&mut [MaybeUninit<T>])) -> FlexTensor {
    let elements = shape.num_elements();
    let mut data: Vec<T> = Vec::with_capacity(elements);
    fill(&mut data.spare_capacity_mut()[..elements]);
    // SAFETY: the capacity is there and the caller promises that `fill` wrote it all.
    unsafe { data.set_len(elements) };
    FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape), T::dtype())
}

/// A tensor of no elements, or of zeros.
pub fn zeros(shape: Shape, dtype: DType) -> FlexTensor {
    FlexTensor::zeros(shape, dtype)
}

/// A one-dimensional tensor from sums in the accumulation type.
pub fn vector<T: Scalar>(sums: &[T::Acc]) -> FlexTensor {
    // SAFETY: `fill` writes as many elements as `sums` has, which is the shape.
    unsafe {
        build::<T>(Shape::from([sums.len()]), |out| {
            T::narrow(out, &mut Vec::new(), |out| {
                out.write_copy_of_slice(sums);
            });
        })
    }
}

/// The elements of a small tensor in the accumulation type.
pub fn widened<T: Scalar>(tensor: &FlexTensor) -> Vec<T::Acc> {
    let mut values = Vec::new();
    if tensor.layout().num_elements() > 0 {
        let tensor = tensor.to_contiguous();
        T::widen_into(tensor.as_slice::<T>().expect("contiguous"), &mut values);
    }
    values
}

/// Rows a task takes: depends on the shape alone, so that sums over tasks do not depend on the threads.
pub fn task_rows(len: usize) -> usize {
    (TASK / len.max(1)).max(1)
}

/// The same for tasks that each hold sums as long as a row: some rows at least, or the sums cost as much as the rows.
pub fn summing_task_rows(len: usize) -> usize {
    task_rows(len).max(8)
}

/// Runs the tasks with the best instruction set of this processor, in parallel if there are several.
///
/// `body` should be `#[inline(always)]`, to be compiled for that instruction set.
pub fn run<T: Send>(tasks: impl Iterator<Item = T>, body: impl Fn(T) + Sync) {
    let arch = Arch::new();
    let each = |task| {
        arch.dispatch(
            #[inline(always)]
            || body(task),
        )
    };
    let mut tasks: Vec<T> = tasks.collect();
    if tasks.len() > 1 {
        tasks.into_par_iter().for_each(each);
    } else if let Some(task) = tasks.pop() {
        each(task);
    }
}

/// Adds up the tasks' sums, `len` each, in order.
pub fn add_tasks<A: Real>(sums: Vec<A>, len: usize) -> Vec<A> {
    let mut total = vec![A::ZERO; len];
    for task in sums.chunks_exact(len) {
        for (total, &sum) in total.iter_mut().zip(task) {
            *total += sum;
        }
    }
    total
}

/// Sum of `term` over a row.
#[inline(always)]
pub fn sum<A: Real>(row: &[A], term: impl Fn(A) -> A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let (chunks, tail) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += term(chunk[lane]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += term(x);
    }
    add_lanes(lanes)
}

/// Sum of the lanes, pairwise.
#[inline(always)]
pub fn add_lanes<A: Real>(mut lanes: [A; LANES]) -> A {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            let other = lanes[lane + half];
            lanes[lane] += other;
        }
        half /= 2;
    }
    lanes[0]
}
