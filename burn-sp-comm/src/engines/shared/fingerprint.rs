//! What a rank called, without its tensors' elements: what ranks compare before anything moves, and show in reports.

use crate::buffer::dtype_name;
use crate::{Collective, Site, Transfer};
use burn_std::DType;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// A call of a collective, as others need to know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fingerprint {
    pub place: Place,
    /// One a tensor; never empty.
    pub tensors: Vec<Signature>,
}

/// A [`Site`] that can travel between processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    file: Cow<'static, str>,
    line: u32,
    column: u32,
    backward: bool,
}

/// A transfer without its elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Signature {
    pub op: Collective,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub on_device: bool,
}

impl From<Site> for Place {
    fn from(site: Site) -> Self {
        Place {
            file: Cow::Borrowed(site.location.file()),
            line: site.location.line(),
            column: site.location.column(),
            backward: site.backward,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = if self.backward { "backward of " } else { "" };
        write!(f, "{prefix}{}:{}:{}", self.file, self.line, self.column)
    }
}

impl Fingerprint {
    pub fn new(place: Place, transfers: &[Transfer]) -> Self {
        let signature = |transfer: &Transfer| Signature {
            op: transfer.op.clone(),
            shape: transfer.buffer.shape().to_vec(),
            dtype: transfer.buffer.dtype(),
            on_device: transfer.buffer.host().is_none(),
        };
        Fingerprint {
            place,
            tensors: transfers.iter().map(signature).collect(),
        }
    }

    /// What makes it impossible for the two to be one collective.
    pub fn difference(&self, other: &Fingerprint) -> Option<&'static str> {
        let (own, others) = (&self.tensors, &other.tensors);
        if own[0].op.name() != others[0].op.name() {
            return Some("operation");
        }
        if own.len() != others.len() {
            return Some("number of tensors");
        }
        own.iter().zip(others).find_map(|(own, other)| {
            let (op, shape, other_shape) = (&own.op, &own.shape, &other.shape);
            let (any_shape, any_dtype) = match op {
                Collective::Shift { .. } => (true, false),
                Collective::Broadcast { .. } | Collective::Barrier => (true, true),
                _ => (false, false),
            };
            let alike = |(dim, (a, b)): (usize, (&usize, &usize))| a == b || op.varying_dim() == Some(dim);
            if !any_dtype && own.dtype != other.dtype {
                Some("dtype")
            } else if !any_dtype && own.on_device != other.on_device {
                Some("memory")
            } else if *op != other.op {
                Some("parameters")
            } else if any_shape
                || shape.len() == other_shape.len() && shape.iter().zip(other_shape).enumerate().all(alike)
            {
                None
            } else {
                Some("shape")
            }
        })
    }

    /// `all_gather over ulysses [2, 3, f32] at src/a.rs:1:2`
    pub fn describe(&self, axis: &str, difference: &str) -> String {
        let op = &self.tensors[0].op;
        let mut text = op.name().to_string();
        if difference == "parameters" {
            let parameters: Vec<_> = self.tensors.iter().map(|tensor| tensor.op.parameters()).collect();
            text += &format!(" {}", parameters.join(", "));
        }
        text += &format!(" over {axis}");
        for tensor in self.tensors.iter().filter(|_| *op != Collective::Barrier) {
            let lengths: String = tensor.shape.iter().map(|length| format!("{length}, ")).collect();
            text += &format!(" [{lengths}{}]", dtype_name(tensor.dtype));
        }
        if difference == "memory" {
            text += if self.tensors[0].on_device {
                " on a device"
            } else {
                " in host memory"
            };
        }
        text + &format!(" at {}", self.place)
    }
}
