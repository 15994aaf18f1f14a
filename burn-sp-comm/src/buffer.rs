//! One tensor, as engines see it.

use crate::copy::dense;
use crate::{CommError, DeviceTensor};
use burn_std::{BoolStore, Bytes, DType, Element};
use std::any::Any;
use std::sync::Arc;

/// One tensor, in host memory or on a device. Cloning shares what it holds.
///
/// What is shared is never changed, so that ranks of one process may read each other's tensors in place.
#[derive(Clone, Debug)]
pub struct Buffer {
    shape: Vec<usize>,
    dtype: DType,
    storage: Storage,
}

/// Where the elements of a [`Buffer`] are.
#[derive(Clone, Debug)]
pub enum Storage {
    /// In host memory.
    Host(HostView),
    /// In the memory of a device that the buffer's backend knows how to reach.
    Device(Arc<dyn DeviceTensor>),
}

/// Strided elements in shared bytes.
///
/// Any view that a backend makes is fine: sliced (offset), permuted, expanded (stride 0), flipped (negative stride).
/// Element `[i, j, ..]` lies at `offset + i * strides[0] + j * strides[1] + ..`, counted in elements.
#[derive(Clone, Debug)]
pub struct HostView {
    /// The bytes of which this is a view.
    pub bytes: Arc<Bytes>,
    /// The distance between neighbours along every dimension, in elements; may be 0 or negative.
    pub strides: Vec<isize>,
    /// Where element `[0, 0, ..]` lies, in elements from the start of the bytes.
    pub offset: usize,
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
        let view = HostView { bytes, strides, offset };
        match view.fault(&shape, dtype) {
            None => Ok(Buffer {
                shape,
                dtype,
                storage: Storage::Host(view),
            }),
            Some(fault) => Err(CommError::invalid(format!(
                "buffer of shape {shape:?}, strides {:?}, offset {offset}, {}: {fault}",
                view.strides,
                dtype_name(dtype)
            ))),
        }
    }

    /// A tensor in a device's memory.
    pub fn on_device(tensor: Arc<dyn DeviceTensor>) -> Self {
        Buffer {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
            storage: Storage::Device(tensor),
        }
    }

    /// Row-major bytes of exactly this shape.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the number of bytes is another than the shape's, or as [`new`](Self::new).
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

    /// The length of every dimension, in elements.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The kind of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the elements are.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The view, if the tensor is in host memory.
    pub fn host(&self) -> Option<&HostView> {
        match &self.storage {
            Storage::Host(view) => Some(view),
            Storage::Device(_) => None,
        }
    }

    /// The tensor, if it is on a device and of this type.
    pub fn device<T: DeviceTensor>(&self) -> Option<&T> {
        match &self.storage {
            Storage::Host(_) => None,
            Storage::Device(tensor) => (&**tensor as &dyn Any).downcast_ref(),
        }
    }

    /// Storage, shape (in elements) and dtype.
    pub fn into_parts(self) -> (Storage, Vec<usize>, DType) {
        (self.storage, self.shape, self.dtype)
    }

    /// The number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The elements in row-major order; the buffer's own bytes if they are all of these and nobody else holds them.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the tensor is on a device.
    pub fn into_bytes(self) -> Result<Bytes, CommError> {
        let row_major = |view: &HostView| {
            let needed = self.num_elements() * self.dtype.size();
            view.offset == 0 && view.bytes.len() == needed && view.strides == row_major(&self.shape)
        };
        let buffer = match self.host() {
            None => {
                return Err(CommError::invalid(
                    "the bytes of a tensor on a device are not in host memory",
                ));
            }
            Some(view) if row_major(view) => self,
            Some(_) => dense(&self)?,
        };
        match buffer.storage {
            Storage::Host(view) => Ok(Arc::try_unwrap(view.bytes).unwrap_or_else(|shared| (*shared).clone())),
            Storage::Device(_) => unreachable!("it was in host memory"),
        }
    }

    /// The elements in row-major order; for tests and small things.
    ///
    /// # Panics
    /// If `E` is not the buffer's dtype (`u8` may read booleans), or the tensor is on a device.
    pub fn to_vec<E: Element>(&self) -> Vec<E> {
        let byte_bool = matches!(self.dtype, DType::Bool(BoolStore::Native | BoolStore::U8));
        let fits = E::dtype() == self.dtype || (byte_bool && matches!(E::dtype(), DType::U8 | DType::Bool(_)));
        assert!(fits, "to_vec: the buffer holds {:?}, not {:?}", self.dtype, E::dtype());
        let view = self.host().expect("to_vec: the tensor is on a device");
        let size = self.dtype.size();
        let element = |flat: usize| {
            let (mut rest, mut at) = (flat, view.offset as isize);
            for (&length, &stride) in self.shape.iter().zip(&view.strides).rev() {
                at += (rest % length) as isize * stride;
                rest /= length;
            }
            let start = at as usize * size;
            bytemuck::checked::pod_read_unaligned(&view.bytes[start..start + size])
        };
        (0..self.num_elements()).map(element).collect()
    }
}

impl HostView {
    fn fault(&self, shape: &[usize], dtype: DType) -> Option<String> {
        if matches!(dtype, DType::QFloat(_)) {
            return Some("quantised tensors cannot travel, dequantise first".into());
        }
        if shape.len() != self.strides.len() {
            return Some("as many strides as dimensions are needed".into());
        }
        if shape.contains(&0) {
            return None; // No element, so nothing is ever read.
        }
        let size = dtype.size();
        // In i128 no product of a usize and an isize overflows; the sum of a few dimensions does not either.
        let (mut first, mut last) = (self.offset as i128, self.offset as i128);
        for (&length, &stride) in shape.iter().zip(&self.strides) {
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
