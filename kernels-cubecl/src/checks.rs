//! What the row kernels refuse, in the same words on every backend.

use burn::backend::{DType, TensorMetadata};

use crate::{DropoutSpec, Positions};

/// Panics unless the tensor has this shape and dtype; `why` says where they come from.
pub fn expect(op: &str, name: &str, tensor: &impl TensorMetadata, shape: &[usize], dtype: DType, why: &str) {
    let found = tensor.shape();
    assert!(
        found.as_slice() == shape,
        "{op}: {name} has shape {:?}, expected {shape:?} ({why})",
        found.as_slice()
    );
    assert!(
        tensor.dtype() == dtype,
        "{op}: {name} is {:?}, expected {dtype:?} ({why}); cast it",
        tensor.dtype()
    );
}

/// The dtype in which a kernel on tensors of `dtype` accumulates and returns statistics: f32, or what is wider.
pub fn accumulation(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Size of the last dimension.
pub fn features(op: &str, x: &impl TensorMetadata) -> usize {
    let shape = x.shape();
    *shape
        .as_slice()
        .last()
        .unwrap_or_else(|| panic!("{op}: x has no dimensions, expected [..., features]"))
}

/// How many rows of the last dimension there are.
pub fn row_count(x: &impl TensorMetadata) -> usize {
    let shape = x.shape();
    let (_, outer) = shape.as_slice().split_last().expect("checked by features");
    outer.iter().product()
}

/// What a message says of the tensor that the others must fit.
fn origin(name: &str, tensor: &impl TensorMetadata) -> String {
    format!("{name} {:?} {:?}", tensor.dtype(), tensor.shape().as_slice())
}

/// A norm over the last dimension of `x`.
pub fn norm<T: TensorMetadata>(op: &str, x: &T, weight: &T, bias: Option<&T>) {
    let len = features(op, x);
    let why = origin("x is", x);
    expect(op, "weight", weight, &[len], x.dtype(), &why);
    if let Some(bias) = bias {
        expect(op, "bias", bias, &[len], x.dtype(), &why);
    }
}

/// A norm of `x` and something more.
pub fn residual_norm<T: TensorMetadata>(x: &T, update: &T, weight: &T, bias: Option<&T>) {
    elementwise("residual_norm", ("x", x), &[("update", update)]);
    norm("residual_norm", x, weight, bias);
}

/// The gradient of a norm; `statistics` with their names.
pub fn norm_backward<T: TensorMetadata>(op: &str, x: &T, weight: &T, statistics: &[(&str, &T)], grad: &T) {
    norm(op, x, weight, None);
    let why = origin("x is", x);
    expect(op, "grad", grad, x.shape().as_slice(), x.dtype(), &why);
    for (name, statistic) in statistics {
        expect(op, name, *statistic, &[row_count(x)], accumulation(x.dtype()), &why);
    }
}

/// An elementwise kernel: the others, with their names, fit the first.
pub fn elementwise<T: TensorMetadata>(op: &str, (name, first): (&str, &T), others: &[(&str, &T)]) {
    let why = origin(&format!("{name} is"), first);
    for (name, other) in others {
        expect(op, name, *other, first.shape().as_slice(), first.dtype(), &why);
    }
}

/// Rotary embedding; returns batch, tokens, heads and head dimension.
pub fn rotary<T: TensorMetadata>(x: &T, cos: &T, sin: &T) -> [usize; 4] {
    let shape = x.shape();
    let &[batch, tokens, heads, head_dim] = shape.as_slice() else {
        panic!(
            "rotary: x has shape {:?}, expected [batch, tokens, heads, head_dim]",
            shape.as_slice()
        );
    };
    assert!(
        head_dim.is_multiple_of(2),
        "rotary: head_dim is {head_dim}, expected an even number: elements turn in pairs"
    );
    let why = origin("x is", x);
    let dtype = accumulation(x.dtype());
    expect("rotary", "cos", cos, &[tokens, head_dim / 2], dtype, &why);
    expect("rotary", "sin", sin, &[tokens, head_dim / 2], dtype, &why);
    [batch, tokens, heads, head_dim]
}

/// Cross entropy, all but the targets' values; returns rows and classes.
pub fn cross_entropy<T: TensorMetadata>(
    logits: &T,
    targets: &impl TensorMetadata,
    weights: &T,
    statistics: Option<&T>,
) -> [usize; 2] {
    const OP: &str = "cross_entropy";
    let shape = logits.shape();
    let &[rows, classes] = shape.as_slice() else {
        panic!(
            "{OP}: logits have shape {:?}, expected [rows, classes]; flatten the dimensions before the classes",
            shape.as_slice()
        );
    };
    let why = origin("logits are", logits);
    let wide = accumulation(logits.dtype());
    expect(OP, "targets", targets, &[rows], targets.dtype(), &why);
    expect(OP, "weights", weights, &[rows], wide, &why);
    if let Some(statistics) = statistics {
        expect(OP, "statistics", statistics, &[3, rows], wide, &why);
    }
    [rows, classes]
}

/// The targets of cross entropy, each with whether its row is ignored.
pub fn cross_entropy_targets(targets: impl IntoIterator<Item = (i64, bool)>, total: usize) {
    for (row, (target, ignored)) in targets.into_iter().enumerate() {
        assert!(
            ignored || usize::try_from(target).is_ok_and(|target| target < total),
            "cross_entropy: target {target} of row {row} is not among the {total} classes; give an ignored row weight 0"
        );
    }
}

/// Dropout of `x`.
pub fn dropout(x: &impl TensorMetadata, spec: &DropoutSpec) {
    let positions: Vec<&Positions> = spec.positions.iter().collect();
    crate::dropout::check(spec.probability, &spec.shape, &positions, x.shape().as_slice())
        .unwrap_or_else(|wrong| panic!("dropout: {wrong} ({})", origin("x is", x)));
}
