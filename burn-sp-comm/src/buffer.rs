//! The bytes of one tensor.

use crate::CommError;
use burn_std::{BoolStore, Bytes, DType, Element};
use std::sync::Arc;

/// Strided, dtype-tagged, shared bytes of one tensor. Cloning shares the bytes.
///
/// Any view that a backend makes is fine: sliced (offset), permuted, expanded (stride 0), flipped (negative stride).
/// Element
/// `[i, j, ..]` lies at `offset + i * strides[0] + j * strides[1] + ..`, counted in elements.
///
/// The bytes are never changed while they are shared, so that ranks of one process may read them in place. Only host
/// memory for now; a device's handle joins as a second kind of storage behind the same methods.
#[derive(Clone, Debug)]
pub struct Buffer {
    bytes: Arc<Bytes>,
    shape: Vec<usize>,
    strides: Vec<isize>,
    offset: usize,
    dtype: DType,
}

impl Buffer {
    /// A view of `bytes`; `strides` and `offset` in elements.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if an element of the view lies outside the bytes, if the bytes are not aligned for the
    /// dtype, or if the dtype is a quantised one.
    pub fn new(
        bytes: Arc<Bytes>,
        shape: Vec<usize>,
        strides: Vec<isize>,
        offset: usize,
        dtype: DType,
    ) -> Result<Self, CommError> {
        let buffer = Buffer {
            bytes,
            shape,
            strides,
            offset,
            dtype,
        };
        match buffer.fault() {
            None => Ok(buffer),
            Some(fault) => Err(CommError::invalid(format!(
                "buffer of shape {:?}, strides {:?}, offset {}, {}: {fault}",
                buffer.shape,
                buffer.strides,
                buffer.offset,
                dtype_name(dtype)
            ))),
        }
    }

    /// Row-major bytes of exactly this shape.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the number of bytes is another than the shape's.
    pub fn contiguous(bytes: Bytes, shape: Vec<usize>, dtype: DType) -> Result<Self, CommError> {
        let (length, strides) = (bytes.len(), row_major(&shape));
        let buffer = Self::new(Arc::new(bytes), shape, strides, 0, dtype)?;
        let needed = buffer.num_elements() * dtype.size();
        if length != needed {
            return Err(CommError::invalid(format!(
                "buffer of shape {:?}, {}: has {length} bytes, needs {needed}",
                buffer.shape,
                dtype_name(dtype)
            )));
        }
        Ok(buffer)
    }

    /// A row-major copy of `values`; for tests and small things.
    ///
    /// # Panics
    /// If the number of values is another than the shape's.
    pub fn from_slice<E: Element>(values: &[E], shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        match Self::contiguous(Bytes::from_elems(values.to_vec()), shape, E::dtype()) {
            Ok(buffer) => buffer,
            Err(error) => panic!("{error}"),
        }
    }

    /// Nothing, shape `[0]`: what a rank passes where its tensor is ignored.
    pub fn empty() -> Self {
        Self::from_slice::<u8>(&[], [0])
    }

    fn fault(&self) -> Option<String> {
        if matches!(self.dtype, DType::QFloat(_)) {
            return Some("quantised tensors cannot travel, dequantise first".into());
        }
        if self.shape.len() != self.strides.len() {
            return Some("as many strides as dimensions are needed".into());
        }
        if self.shape.contains(&0) {
            return None; // No element, so nothing is ever read.
        }
        let size = self.dtype.size();
        // In i128 no product of a usize and an isize overflows; the sum of a few dimensions does not either.
        let (mut first, mut last) = (self.offset as i128, self.offset as i128);
        for (&length, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = (length as i128 - 1) * stride as i128;
            if reach < 0 { first += reach } else { last += reach }
        }
        let elements = (self.bytes.len() / size) as i128;
        if first < 0 || last >= elements {
            return Some(format!("reaches elements {first}..={last}, but there are {elements}"));
        }
        if !(self.bytes.as_ptr() as usize).is_multiple_of(size.min(align_of::<u64>())) {
            return Some(format!("bytes are not aligned to {size}"));
        }
        None
    }

    /// The length of every dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The distance between neighbours along every dimension, in elements; may be 0 or negative.
    pub fn strides(&self) -> &[isize] {
        &self.strides
    }

    /// Where element `[0, 0, ..]` lies, in elements from the start of the bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The kind of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The bytes of which this is a view.
    pub fn bytes(&self) -> &Arc<Bytes> {
        &self.bytes
    }

    /// Bytes, shape, strides, offset, dtype.
    pub fn into_parts(self) -> (Arc<Bytes>, Vec<usize>, Vec<isize>, usize, DType) {
        (self.bytes, self.shape, self.strides, self.offset, self.dtype)
    }

    /// The number of elements of the view.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie in row-major order without gaps (from the offset on).
    pub fn is_contiguous(&self) -> bool {
        self.shape.contains(&0)
            || (self.shape.iter().zip(&self.strides))
                .zip(row_major(&self.shape))
                .all(|((&length, &stride), expected)| length == 1 || stride == expected)
    }

    /// The elements in row-major order; for tests and small things.
    ///
    /// # Panics
    /// If `E` is not the buffer's dtype (`u8` may read booleans).
    pub fn to_vec<E: Element>(&self) -> Vec<E> {
        let byte_bool = matches!(self.dtype, DType::Bool(BoolStore::Native | BoolStore::U8));
        let fits = E::dtype() == self.dtype || (byte_bool && matches!(E::dtype(), DType::U8 | DType::Bool(_)));
        assert!(fits, "to_vec: the buffer holds {:?}, not {:?}", self.dtype, E::dtype());
        let size = self.dtype.size();
        let element = |flat: usize| {
            let (mut rest, mut at) = (flat, self.offset as isize);
            for (&length, &stride) in self.shape.iter().zip(&self.strides).rev() {
                at += (rest % length) as isize * stride;
                rest /= length;
            }
            let start = at as usize * size;
            bytemuck::checked::pod_read_unaligned(&self.bytes[start..start + size])
        };
        (0..self.num_elements()).map(element).collect()
    }
}

/// The strides of a row-major tensor, in elements.
pub(crate) fn row_major(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; shape.len()];
    for dim in (1..shape.len()).rev() {
        // Wrapping, as a nonsensical shape is refused later, by its bounds.
        strides[dim - 1] = strides[dim].wrapping_mul(shape[dim] as isize);
    }
    strides
}

/// `f32`, `bf16`, `bool`, ...
pub(crate) fn dtype_name(dtype: DType) -> String {
    match dtype {
        DType::Bool(_) => "bool".into(),
        other => format!("{other:?}").to_lowercase(),
    }
}
