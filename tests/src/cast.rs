use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

/// The module with every float parameter in another dtype, trainable as before.
pub fn cast<M: Module>(module: M, dtype: DType) -> M {
    module.map(&mut Cast(dtype))
}

/// The dtype of the module's first float parameter, if it has one.
pub fn dtype_of<M: Module>(module: &M) -> Option<DType> {
    let mut first = First(None);
    module.visit(&mut first);
    first.0
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            // A cast is an operation; its result must be a leaf again.
            let tracked = tensor.is_require_grad();
            tensor.detach().cast(self.0).detach().set_require_grad(tracked)
        })
    }
}

struct First(Option<DType>);

impl ModuleVisitor for First {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.get_or_insert_with(|| param.val().dtype());
    }
}
