//! A box of a tensor in memory, as a message library needs to know it.

use crate::Buffer;
use crate::copy::{Nest, Target};

/// Runs of bytes, as few as possible.
#[derive(Clone, Debug)]
pub struct Area {
    /// The first run.
    pub start: *mut u8,
    /// Bytes of a run.
    pub run: usize,
    /// Turns and steps in bytes, outermost first.
    pub loops: Vec<(usize, isize)>,
}

// SAFETY: an area is only an address; who uses it vouches for the memory.
unsafe impl Send for Area {}

impl Area {
    /// So many bytes in a row.
    pub fn dense(start: *mut u8, bytes: usize) -> Area {
        Area {
            start,
            run: bytes,
            loops: Vec::new(),
        }
    }

    /// A box of a tensor in host memory; to be read only.
    pub fn of_buffer(buffer: &Buffer, start: &[usize], shape: &[usize]) -> Area {
        let view = buffer.host().expect("the tensor is in host memory");
        let size = buffer.dtype().size();
        let first = view.offset as isize + place(start, &view.strides);
        // Wrapping, as a box without elements may start anywhere.
        let start = view.bytes.as_ptr().wrapping_offset(first * size as isize);
        Area::new(start.cast_mut(), shape, &view.strides, size)
    }

    /// A box of a result in the making.
    pub fn of_target(target: &Target, start: &[usize], shape: &[usize]) -> Area {
        let size = target.dtype.size();
        let start = target
            .start
            .wrapping_offset(place(start, &target.strides) * size as isize);
        Area::new(start, shape, &target.strides, size)
    }

    fn new(start: *mut u8, shape: &[usize], strides: &[isize], size: usize) -> Area {
        if shape.contains(&0) {
            return Area::dense(start, 0);
        }
        let nest = Nest::new(shape, vec![strides.to_vec()]);
        let steps = &nest.steps[0];
        let mut loops: Vec<_> = nest
            .lengths
            .iter()
            .zip(steps)
            .map(|(length, step)| (*length, step * size as isize))
            .collect();
        let mut run = size;
        if let Some((length, _)) = loops.pop_if(|(_, step)| *step == size as isize) {
            run *= length;
        }
        loops.retain(|(length, _)| *length > 1);
        Area { start, run, loops }
    }

    pub fn is_dense(&self) -> bool {
        self.loops.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.run * self.loops.iter().map(|(length, _)| length).product::<usize>()
    }
}

fn place(start: &[usize], strides: &[isize]) -> isize {
    start
        .iter()
        .zip(strides)
        .map(|(at, stride)| *at as isize * stride)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_std::{Bytes, DType};
    use std::sync::Arc;

    #[test]
    fn boxes_become_as_few_runs_as_possible() {
        let bytes = Arc::new(Bytes::from_elems(vec![0f32; 120]));
        let of = |strides: [isize; 3], start: [usize; 3], shape: [usize; 3]| {
            let buffer = Buffer::new(bytes.clone(), vec![4, 5, 6], strides.to_vec(), 0, DType::F32).unwrap();
            let area = Area::of_buffer(&buffer, &start, &shape);
            let offset = area.start as usize - bytes.as_ptr() as usize;
            assert_eq!(area.bytes(), 4 * shape.iter().product::<usize>());
            (offset, area.run, area.loops)
        };
        // Row-major: all of it, whole rows, parts of rows, one element of each.
        assert_eq!(of([30, 6, 1], [0, 0, 0], [4, 5, 6]), (0, 480, vec![]));
        assert_eq!(of([30, 6, 1], [1, 0, 0], [2, 5, 6]), (120, 240, vec![]));
        assert_eq!(of([30, 6, 1], [0, 1, 0], [4, 2, 6]), (24, 48, vec![(4, 120)]));
        assert_eq!(of([30, 6, 1], [0, 1, 2], [4, 2, 3]), (32, 12, vec![(4, 120), (2, 24)]));
        assert_eq!(of([30, 6, 1], [0, 0, 5], [4, 5, 1]), (20, 4, vec![(20, 24)]));
        // Transposed and expanded.
        assert_eq!(
            of([1, 4, 20], [0, 0, 0], [4, 5, 6]),
            (0, 4, vec![(4, 4), (5, 16), (6, 80)])
        );
        assert_eq!(of([0, 6, 1], [0, 0, 0], [4, 5, 6]), (0, 120, vec![(4, 0)]));
        assert_eq!(of([30, 6, 1], [4, 0, 0], [0, 5, 6]), (480, 0, vec![]));
    }
}
