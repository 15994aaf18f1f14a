use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors};

/// A `.safetensors` file in memory, and what its `.json` says.
pub struct Fixture<'a> {
    tensors: SafeTensors<'a>,
}

impl<'a> Fixture<'a> {
    /// Reads a file's bytes, say from `include_bytes!`.
    ///
    /// # Panics
    /// If they are no safetensors file.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            tensors: SafeTensors::deserialize(bytes).expect("the bytes of a safetensors file"),
        }
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<&str> {
        self.tensors.names()
    }

    /// A tensor's bytes as Burn reads them.
    ///
    /// # Shapes
    /// - returns that of the tensor in the file
    ///
    /// # Panics
    /// If there is none of that name, or of a dtype that no fixture has.
    pub fn data(&self, name: &str) -> TensorData {
        let view = self
            .tensors
            .tensor(name)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let shape = view.shape().to_vec();
        let bytes = view.data();
        match view.dtype() {
            Dtype::F32 => TensorData::new(numbers(bytes, f32::from_le_bytes), shape),
            Dtype::F64 => TensorData::new(numbers(bytes, f64::from_le_bytes), shape),
            Dtype::I64 => TensorData::new(numbers(bytes, i64::from_le_bytes), shape),
            other => panic!("{name} is of {other:?}; fixtures are of F32, F64 and I64"),
        }
    }

    /// A tensor's elements as f64.
    ///
    /// # Panics
    /// As [`data`](Self::data).
    pub fn f64s(&self, name: &str) -> Vec<f64> {
        self.data(name).iter::<f64>().collect()
    }

    /// A float tensor in a dtype.
    ///
    /// # Shapes
    /// - returns that of the tensor in the file
    ///
    /// # Panics
    /// As [`data`](Self::data), or if it has another number of dimensions.
    pub fn float<const D: usize>(&self, name: &str, dtype: DType, device: &Device) -> Tensor<D> {
        Tensor::from_data(self.data(name).convert_dtype(dtype), (device, dtype))
    }

    /// An int tensor.
    ///
    /// # Shapes
    /// - returns that of the tensor in the file
    ///
    /// # Panics
    /// As [`data`](Self::data), or if it has another number of dimensions.
    pub fn int<const D: usize>(&self, name: &str, device: &Device) -> Tensor<D, Int> {
        Tensor::from_data(self.data(name), device)
    }
}

fn numbers<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| read(*chunk)).collect()
}
