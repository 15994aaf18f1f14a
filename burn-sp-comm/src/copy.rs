//! Carrying out a [`Plan`] on host memory.

use crate::buffer::{Buffer, Storage, row_major};
use crate::plan::{Plan, Tile};
use crate::sum::{BLOCK, Or, Sum};
use crate::{Collective, CommError};
use burn_std::{BoolStore, Bytes, DType, bf16, f16};

/// Memory for one result, allocated but not written: zeroing it first would touch every page twice.
///
/// The vector's element has the size and the alignment of the dtype, so that the bytes can be turned into a vector of
/// the dtype later.
pub(crate) struct Output {
    memory: Memory,
    elements: usize,
    strides: Vec<isize>,
    dtype: DType,
}

enum Memory {
    B1(Vec<u8>),
    B2(Vec<u16>),
    B4(Vec<u32>),
    B8(Vec<u64>),
}

impl Output {
    /// Room for a result of this shape.
    pub fn new(shape: &[usize], dtype: DType) -> Self {
        let elements = shape.iter().product();
        let memory = match dtype.size() {
            1 => Memory::B1(Vec::with_capacity(elements)),
            2 => Memory::B2(Vec::with_capacity(elements)),
            4 => Memory::B4(Vec::with_capacity(elements)),
            // A buffer has no dtype of another size.
            _ => Memory::B8(Vec::with_capacity(elements)),
        };
        Output {
            memory,
            elements,
            strides: row_major(shape),
            dtype,
        }
    }

    /// Where to write. The pointer stays the same when the output moves.
    pub fn target(&mut self) -> Target {
        let start = match &mut self.memory {
            Memory::B1(vec) => vec.as_mut_ptr().cast(),
            Memory::B2(vec) => vec.as_mut_ptr().cast(),
            Memory::B4(vec) => vec.as_mut_ptr().cast(),
            Memory::B8(vec) => vec.as_mut_ptr().cast(),
        };
        Target {
            start,
            strides: self.strides.clone(),
            dtype: self.dtype,
        }
    }

    /// The written memory as a buffer of `shape`.
    ///
    /// # Safety
    /// All elements must have been written, and no one may write any more.
    pub unsafe fn finish(self, shape: Vec<usize>) -> Buffer {
        let elements = self.elements;
        // SAFETY: the capacity is at least `elements`, and the caller vouches for their being written.
        let bytes = unsafe {
            match self.memory {
                Memory::B1(vec) => Bytes::from_elems(filled(vec, elements)),
                Memory::B2(vec) => Bytes::from_elems(filled(vec, elements)),
                Memory::B4(vec) => Bytes::from_elems(filled(vec, elements)),
                Memory::B8(vec) => Bytes::from_elems(filled(vec, elements)),
            }
        };
        Buffer::contiguous(bytes, shape, self.dtype).expect("memory was allocated for this very shape")
    }
}

/// # Safety
/// The first `elements` elements must have been written.
unsafe fn filled<T>(mut vec: Vec<T>, elements: usize) -> Vec<T> {
    // SAFETY: as promised by the caller.
    unsafe { vec.set_len(elements) };
    vec
}

/// The memory of an [`Output`], to be written by one or several threads.
pub(crate) struct Target {
    pub start: *mut u8,
    pub strides: Vec<isize>,
    pub dtype: DType,
}

// SAFETY: a target is only an address; that no two threads write the same element is up to `write`'s callers.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

/// Carries out the whole plan, where `own` is; `sources` by rank, where the plan needs them.
///
/// # Errors
/// If the tensors are on a device and it refuses.
pub(crate) fn assemble(plan: Plan, own: &Buffer, sources: &[Option<&Buffer>]) -> Result<Buffer, CommError> {
    if let Storage::Device(own) = own.storage() {
        return own.assemble(&plan, sources).map(Buffer::on_device);
    }
    let dtype = own.dtype();
    let mut output = Output::new(&plan.shape, dtype);
    let target = output.target();
    for tile in &plan.tiles {
        // SAFETY: the tiles lie within the plan's shape, for which the output was made, and no one else knows of it.
        unsafe { write(tile, sources, &target) };
    }
    // SAFETY: a plan's tiles cover its shape.
    Ok(unsafe { output.finish(plan.shape) })
}

/// A row-major copy of a tensor in host memory.
pub(crate) fn dense(buffer: &Buffer) -> Result<Buffer, CommError> {
    let whole = Plan::new(&Collective::Barrier, 1, 0, buffer.shape()).map_err(CommError::invalid)?;
    assemble(whole, buffer, &[Some(buffer)])
}

/// Writes every element of one tile.
///
/// # Panics
/// If a source is missing, has another dtype or does not contain its box.
///
/// # Safety
/// The tile must lie within the target's shape, the target's [`Output`] must be alive, and no other thread may write
/// to the tile's box or read it at the same time.
pub(crate) unsafe fn write(tile: &Tile, sources: &[Option<&Buffer>], target: &Target) {
    let size = target.dtype.size();
    let place = |start: &[usize], strides: &[isize]| -> isize {
        start
            .iter()
            .zip(strides)
            .map(|(&start, &stride)| start as isize * stride)
            .sum()
    };
    if tile.shape.contains(&0) {
        return;
    }
    let mut steps = vec![target.strides.clone()];
    let mut from = Vec::with_capacity(tile.sources.len());
    for source in &tile.sources {
        let buffer = sources[source.rank].expect("the plan's sources are present");
        let inside = buffer.shape().len() == tile.shape.len()
            && (source.start.iter().zip(&tile.shape).zip(buffer.shape()))
                .all(|((start, len), all)| start + len <= *all);
        assert!(inside && buffer.dtype() == target.dtype, "the source holds its box");
        let view = buffer.host().expect("ranks agree on where their tensors are");
        let first = view.offset as isize + place(&source.start, &view.strides);
        // SAFETY: the box is inside the buffer, which checked on creation that all of it lies within its bytes.
        from.push(unsafe { view.bytes.as_ptr().offset(first * size as isize) });
        steps.push(view.strides.clone());
    }
    // SAFETY: the tile lies within the target, as the caller promises.
    let to = unsafe { target.start.offset(place(&tile.start, &target.strides) * size as isize) };
    let nest = Nest::new(&tile.shape, steps);

    macro_rules! add_as {
        ($type:ty) => {
            // SAFETY: the boxes of all operands are in bounds (above) and of this type, aligned as `Buffer` checked.
            unsafe { add::<$type>(&nest, to.cast(), &from) }
        };
    }
    if let [from] = from[..] {
        // SAFETY: as for the sums; a copy needs only the size to be right.
        return unsafe {
            match size {
                1 => copy::<u8>(&nest, to.cast(), from.cast()),
                2 => copy::<u16>(&nest, to.cast(), from.cast()),
                4 => copy::<u32>(&nest, to.cast(), from.cast()),
                _ => copy::<u64>(&nest, to.cast(), from.cast()),
            }
        };
    }
    match target.dtype {
        DType::F64 => add_as!(f64),
        DType::F32 | DType::Flex32 => add_as!(f32),
        DType::F16 => add_as!(f16),
        DType::BF16 => add_as!(bf16),
        DType::I64 => add_as!(i64),
        DType::I32 => add_as!(i32),
        DType::I16 => add_as!(i16),
        DType::I8 => add_as!(i8),
        DType::U64 => add_as!(u64),
        DType::U32 => add_as!(u32),
        DType::U16 => add_as!(u16),
        DType::U8 => add_as!(u8),
        DType::Bool(BoolStore::Native | BoolStore::U8) => add_as!(Or<u8>),
        DType::Bool(BoolStore::U32) => add_as!(Or<u32>),
        DType::QFloat(_) => unreachable!("a buffer is never quantised"),
    }
}

/// The loops that visit a box in several operands at once, outermost first; operand 0 is the target.
pub(crate) struct Nest {
    pub lengths: Vec<usize>,
    /// Per operand and loop, how far to go each turn, in elements.
    pub steps: Vec<Vec<isize>>,
}

impl Nest {
    /// As few loops as possible: those of one turn are left out, and two become one where every operand allows it.
    pub fn new(shape: &[usize], strides: Vec<Vec<isize>>) -> Self {
        let mut nest = Nest {
            lengths: Vec::new(),
            steps: vec![Vec::new(); strides.len()],
        };
        for dim in (0..shape.len()).rev().filter(|&dim| shape[dim] > 1) {
            // Innermost first while building.
            let joins = nest.lengths.last().is_some_and(|&inner| {
                nest.steps
                    .iter()
                    .zip(&strides)
                    .all(|(steps, strides)| steps.last().is_some_and(|&step| step * inner as isize == strides[dim]))
            });
            if joins {
                *nest.lengths.last_mut().expect("joins only what is there") *= shape[dim];
                continue;
            }
            nest.lengths.push(shape[dim]);
            nest.steps
                .iter_mut()
                .zip(&strides)
                .for_each(|(steps, strides)| steps.push(strides[dim]));
        }
        if nest.lengths.is_empty() {
            nest.lengths.push(1);
            nest.steps.iter_mut().for_each(|steps| steps.push(1));
        }
        nest.lengths.reverse();
        nest.steps.iter_mut().for_each(|steps| steps.reverse());
        nest
    }

    /// Calls `visit` with every operand's place, for every turn of the `outer` outermost loops.
    fn visit(&self, outer: &[usize], mut visit: impl FnMut(&[isize])) {
        let mut places = vec![0isize; self.steps.len()];
        let mut turns = vec![0; outer.len()];
        loop {
            visit(&places);
            let mut level = outer.len();
            loop {
                if level == 0 {
                    return;
                }
                level -= 1;
                let dim = outer[level];
                turns[level] += 1;
                let done = turns[level] == self.lengths[dim];
                for (place, steps) in places.iter_mut().zip(&self.steps) {
                    // On the last turn the loop goes back to its start, and the next outer one advances.
                    *place += if done {
                        -steps[dim] * (turns[level] as isize - 1)
                    } else {
                        steps[dim]
                    };
                }
                if !done {
                    break;
                }
                turns[level] = 0;
            }
        }
    }
}

/// Copies a box.
///
/// # Safety
/// Both operands must be valid for their whole boxes, and the target's box must not overlap the source's.
unsafe fn copy<T: Copy>(nest: &Nest, to: *mut T, from: *const T) {
    let (to_steps, from_steps) = (&nest.steps[0], &nest.steps[1]);
    let inner = nest.lengths.len() - 1;
    let length = nest.lengths[inner];
    let (to_step, from_step) = (to_steps[inner], from_steps[inner]);
    // The loop that walks the source's memory in order, if it is another than the innermost.
    let ordered = from_steps.iter().position(|&step| step.abs() == 1);

    if to_step == 1 && from_step == 1 {
        // Rows: the two innermost loops by hand, as rows may be short.
        let (rows, to_row, from_row) = match inner {
            0 => (1, 0, 0),
            _ => (nest.lengths[inner - 1], to_steps[inner - 1], from_steps[inner - 1]),
        };
        let outer: Vec<usize> = (0..inner.saturating_sub(1)).collect();
        nest.visit(&outer, |places| {
            for row in 0..rows as isize {
                // SAFETY: a row of the box, in both operands.
                unsafe {
                    let source = from.offset(places[1] + row * from_row);
                    to.offset(places[0] + row * to_row)
                        .copy_from_nonoverlapping(source, length);
                }
            }
        });
    } else if let Some(across) = ordered.filter(|&loop_| loop_ != inner) {
        // A transposition: in squares, so that the lines of both operands are used up while they are in the cache.
        const SQUARE: usize = 16;
        let outer: Vec<usize> = (0..inner).filter(|&loop_| loop_ != across).collect();
        let width = nest.lengths[across];
        nest.visit(&outer, |places| {
            for column in (0..length).step_by(SQUARE) {
                for row in (0..width).step_by(SQUARE) {
                    for r in row as isize..(row + SQUARE).min(width) as isize {
                        for c in column as isize..(column + SQUARE).min(length) as isize {
                            // SAFETY: an element of the box, in both operands.
                            unsafe {
                                let source = from.offset(places[1] + r * from_steps[across] + c * from_step);
                                to.offset(places[0] + r * to_steps[across] + c * to_step)
                                    .write(source.read());
                            }
                        }
                    }
                }
            }
        });
    } else {
        let outer: Vec<usize> = (0..inner).collect();
        nest.visit(&outer, |places| {
            for at in 0..length as isize {
                // SAFETY: an element of the box, in both operands.
                unsafe {
                    to.offset(places[0] + at * to_step)
                        .write(from.offset(places[1] + at * from_step).read())
                };
            }
        });
    }
}

/// Writes the sum of several boxes, taken in their order.
///
/// # Safety
/// All operands must be valid for their whole boxes, hold values of `T`, and the target's box must not overlap the
/// others.
unsafe fn add<T: Sum>(nest: &Nest, to: *mut T, from: &[*const u8]) {
    let inner = nest.lengths.len() - 1;
    let length = nest.lengths[inner];
    let to_step = nest.steps[0][inner];
    let outer: Vec<usize> = (0..inner).collect();
    // Where an operand's elements are not neighbours in memory, they go through a block in which they are.
    let apart = nest.steps.iter().any(|steps| steps[inner] != 1);
    let mut loose = vec![T::default(); if apart { BLOCK * nest.steps.len() } else { 0 }];
    let mut blocks: Vec<&[T]> = Vec::with_capacity(from.len());
    nest.visit(&outer, |places| {
        for start in (0..length).step_by(BLOCK) {
            let block = BLOCK.min(length - start);
            blocks.clear();
            let mut spare = loose.as_mut_ptr();
            for (source, from) in from.iter().enumerate() {
                let step = nest.steps[source + 1][inner];
                // SAFETY: the block lies in the source's box, and with a step of 1 its elements are neighbours.
                // Otherwise they are copied to the spare block of this source, of which no reference is left from the
                // block before.
                blocks.push(unsafe {
                    let first = from.cast::<T>().offset(places[source + 1] + start as isize * step);
                    if step == 1 {
                        std::slice::from_raw_parts(first, block)
                    } else {
                        (0..block).for_each(|at| spare.add(at).write(first.offset(at as isize * step).read()));
                        let copied = std::slice::from_raw_parts(spare, block);
                        spare = spare.add(BLOCK);
                        copied
                    }
                });
            }
            // SAFETY: the block lies in the target's box, which no one else uses; with a step other than 1 (its
            // innermost dimension has length 1 in this box) it goes through the last spare block, as there is one for
            // every operand.
            unsafe {
                let first = to.offset(places[0] + start as isize * to_step);
                let out = if to_step == 1 { first } else { spare };
                T::sum(std::slice::from_raw_parts_mut(out.cast(), block), &blocks);
                if to_step != 1 {
                    (0..block).for_each(|at| first.offset(at as isize * to_step).write(spare.add(at).read()));
                }
            }
        }
    });
}
