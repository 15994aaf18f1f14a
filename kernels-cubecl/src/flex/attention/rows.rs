//! The only file that knows strides and storage dtypes: reads rows of a tensor into the accumulation type, and
//! writes rows of results from several threads.

use std::{marker::PhantomData, ops::Range};

use burn::tensor::{DType, Element, Shape};
use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;
use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::{gemm::Matrix, real::Real};

enum Storage<'a> {
    F64(&'a [f64]),
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

/// A `[batch, tokens, heads, width]` tensor of any strides, read as `A`.
pub struct Rows<'a, A> {
    storage: Storage<'a>,
    offset: isize,
    strides: [isize; 4],
    width: usize,
    accumulator: PhantomData<A>,
}

impl<'a, A: Real> Rows<'a, A> {
    pub fn new(tensor: &'a FlexTensor) -> Self {
        let layout = tensor.layout();
        let strides = layout.strides().try_into().expect("rank was checked before");
        Self::with(tensor, strides, layout.shape()[3])
    }

    /// One plane of a `[planes, batch, heads, tokens]` tensor, as rows of one number.
    pub fn of_plane(tensor: &'a FlexTensor, plane: usize) -> Self {
        let [planes, batch, head, token] = tensor.layout().strides().try_into().expect("rank was checked before");
        let mut rows = Self::with(tensor, [batch, token, head, 1], 1);
        rows.offset += plane as isize * planes;
        rows
    }

    fn with(tensor: &'a FlexTensor, strides: [isize; 4], width: usize) -> Self {
        let storage = match tensor.dtype() {
            DType::F64 => Storage::F64(tensor.storage()),
            DType::F32 => Storage::F32(tensor.storage()),
            DType::F16 => Storage::F16(tensor.storage()),
            DType::BF16 => Storage::BF16(tensor.storage()),
            other => unreachable!("{other:?} was refused before"),
        };
        Self {
            storage,
            offset: tensor.layout().start_offset() as isize,
            strides,
            width,
            accumulator: PhantomData,
        }
    }

    /// Copies the rows of one head to `into`, `[tokens, width]`.
    pub fn load(&self, batch: usize, head: usize, tokens: &Range<usize>, into: &mut [A]) {
        for (i, token) in tokens.clone().enumerate() {
            let row = &mut into[i * self.width..(i + 1) * self.width];
            let start = self.start(batch, token, head);
            // A dimension of one element may have any stride.
            if self.strides[3] == 1 || self.width == 1 {
                self.load_run(start as usize, row);
            } else {
                for (j, x) in row.iter_mut().enumerate() {
                    self.load_run((start + j as isize * self.strides[3]) as usize, std::slice::from_mut(x));
                }
            }
        }
    }

    /// The rows of one head where they are, or in `buffer` if they need conversion or an ordering of their own.
    pub fn borrow<'b>(
        &'b self,
        batch: usize,
        head: usize,
        tokens: &Range<usize>,
        buffer: &'b mut [A],
    ) -> Matrix<'b, A> {
        let stored: Option<&[A]> = match self.storage {
            Storage::F64(data) => bytemuck::try_cast_slice(data).ok().filter(|_| A::dtype() == DType::F64),
            Storage::F32(data) => bytemuck::try_cast_slice(data).ok().filter(|_| A::dtype() == DType::F32),
            _ => None,
        };
        // Rows one element apart would be a transposed matrix to the product, which may then add in another order:
        // a view has to give the same bits as its contiguous copy.
        if let Some(data) = stored
            && self.width > 1
            && self.strides[3] == 1
            && self.strides[1] > 1
        {
            let first = self.start(batch, tokens.start, head) as usize;
            return Matrix {
                data: &data[first..],
                stride: self.strides[1] as usize,
            };
        }
        self.load(batch, head, tokens, buffer);
        Matrix {
            data: buffer,
            stride: self.width,
        }
    }

    fn start(&self, batch: usize, token: usize, head: usize) -> isize {
        let [b, t, h, _] = self.strides;
        self.offset + batch as isize * b + token as isize * t + head as isize * h
    }

    fn load_run(&self, start: usize, into: &mut [A]) {
        let range = start..start + into.len();
        match self.storage {
            Storage::F64(data) => bytemuck::cast_slice_mut(into).copy_from_slice(&data[range]),
            Storage::F32(data) => bytemuck::cast_slice_mut(into).copy_from_slice(&data[range]),
            Storage::F16(data) => data[range].convert_to_f32_slice(bytemuck::cast_slice_mut(into)),
            Storage::BF16(data) => data[range].convert_to_f32_slice(bytemuck::cast_slice_mut(into)),
        }
    }
}

enum Elements {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// A result tensor under construction, all zeros at first.
pub struct Output(Elements);

impl Output {
    pub fn zeros(len: usize, dtype: DType) -> Self {
        Self(match dtype {
            DType::F64 => Elements::F64(vec![0.0; len]),
            DType::F32 => Elements::F32(vec![0.0; len]),
            DType::F16 => Elements::F16(vec![f16::ZERO; len]),
            DType::BF16 => Elements::BF16(vec![bf16::ZERO; len]),
            other => unreachable!("{other:?} was refused before"),
        })
    }

    pub fn writer(&mut self) -> Writer<'_> {
        match &mut self.0 {
            Elements::F64(data) => Writer::new(data),
            Elements::F32(data) => Writer::new(data),
            Elements::F16(data) => Writer::new(data),
            Elements::BF16(data) => Writer::new(data),
        }
    }

    /// The elements, if they are of type `A`.
    pub fn as_slice<A: Real>(&self) -> &[A] {
        match &self.0 {
            Elements::F64(data) => bytemuck::cast_slice(data),
            Elements::F32(data) => bytemuck::cast_slice(data),
            _ => unreachable!("half-precision results are never read back"),
        }
    }

    pub fn into_tensor<const D: usize>(self, shape: [usize; D]) -> FlexTensor {
        let (bytes, dtype) = match self.0 {
            Elements::F64(data) => (Bytes::from_elems(data), DType::F64),
            Elements::F32(data) => (Bytes::from_elems(data), DType::F32),
            Elements::F16(data) => (Bytes::from_elems(data), DType::F16),
            Elements::BF16(data) => (Bytes::from_elems(data), DType::BF16),
        };
        FlexTensor::new(bytes, Layout::contiguous(Shape::from(shape)), dtype)
    }
}

/// Lets the tasks of one kernel, each at its own elements, write to one buffer.
pub struct Writer<'a> {
    pointer: *mut u8,
    len: usize,
    dtype: DType,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: the pointer is to plain numbers borrowed mutably for 'a, and is used only by `store`, whose callers promise
// that no two threads touch the same elements.
unsafe impl Sync for Writer<'_> {}

impl<'a> Writer<'a> {
    pub fn new<E: Element + Pod>(elements: &'a mut [E]) -> Self {
        Self {
            pointer: elements.as_mut_ptr().cast(),
            len: elements.len(),
            dtype: E::dtype(),
            lifetime: PhantomData,
        }
    }

    /// Writes `values`, rounded to the dtype of the buffer, to the elements from `start` on.
    ///
    /// # Safety
    /// No other thread may use these elements during the call.
    pub unsafe fn store<A: Real>(&self, start: usize, values: &[A]) {
        // SAFETY: exclusive by the promise of the caller.
        unsafe {
            match self.dtype {
                DType::F16 => self
                    .elements::<f16>(start, values.len())
                    .convert_from_f32_slice(bytemuck::cast_slice(values)),
                DType::BF16 => self
                    .elements::<bf16>(start, values.len())
                    .convert_from_f32_slice(bytemuck::cast_slice(values)),
                _ => self.elements::<A>(start, values.len()).copy_from_slice(values),
            }
        }
    }

    /// # Safety
    /// No one else may use these elements while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the promise of the caller")]
    unsafe fn elements<E: Element + Pod>(&self, start: usize, len: usize) -> &mut [E] {
        assert!(
            E::dtype() == self.dtype && start + len <= self.len,
            "write outside of the output"
        );
        // SAFETY: in bounds and of the dtype the pointer was made from; exclusive by the promise of the caller.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast::<E>().add(start), len) }
    }
}
