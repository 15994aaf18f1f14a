use safetensors::SafeTensors;

use super::VideoDit;
pub use crate::import::ImportError;
use crate::import::{find, load};

/// Under which names a checkpoint has a model's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// Those of Hugging Face's diffusers.
    Diffusers,
    /// Those of Wan's own code.
    Wan,
}

/// Module by module: the path in the model, or in a block, and the names that diffusers and Wan have for it.
const MODULES: [(&str, [&str; 2]); 22] = [
    ("patch", ["patch_embedding", "patch_embedding"]),
    (
        "time.first",
        ["condition_embedder.time_embedder.linear_1", "time_embedding.0"],
    ),
    (
        "time.second",
        ["condition_embedder.time_embedder.linear_2", "time_embedding.2"],
    ),
    ("time.projection", ["condition_embedder.time_proj", "time_projection.1"]),
    (
        "text.first",
        ["condition_embedder.text_embedder.linear_1", "text_embedding.0"],
    ),
    (
        "text.second",
        ["condition_embedder.text_embedder.linear_2", "text_embedding.2"],
    ),
    ("head.output", ["proj_out", "head.head"]),
    ("attention.query", ["attn1.to_q", "self_attn.q"]),
    ("attention.key", ["attn1.to_k", "self_attn.k"]),
    ("attention.value", ["attn1.to_v", "self_attn.v"]),
    ("attention.output", ["attn1.to_out.0", "self_attn.o"]),
    ("attention.query_norm", ["attn1.norm_q", "self_attn.norm_q"]),
    ("attention.key_norm", ["attn1.norm_k", "self_attn.norm_k"]),
    // Diffusers counts the norms in another order than Wan.
    ("text_norm", ["norm2", "norm3"]),
    ("text_attention.query", ["attn2.to_q", "cross_attn.q"]),
    ("text_attention.key", ["attn2.to_k", "cross_attn.k"]),
    ("text_attention.value", ["attn2.to_v", "cross_attn.v"]),
    ("text_attention.output", ["attn2.to_out.0", "cross_attn.o"]),
    ("text_attention.query_norm", ["attn2.norm_q", "cross_attn.norm_q"]),
    ("text_attention.key_norm", ["attn2.norm_k", "cross_attn.norm_k"]),
    ("mlp.up", ["ffn.net.0.proj", "ffn.0"]),
    ("mlp.down", ["ffn.net.2", "ffn.2"]),
];

impl Naming {
    /// The name of the tensor that the parameter at a path of [`VideoDit`] is, `blocks.0.mlp.up.weight` say; none if there
    /// is no such parameter. Weights of linear layers lie transposed, `[outputs, inputs...]`.
    pub fn tensor(self, path: &str) -> Option<String> {
        let pick = |names: [&'static str; 2]| names[usize::from(self == Naming::Wan)];
        let (block, path) = match path.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
            Some((number, rest)) => (format!("blocks.{number}."), rest),
            None => (String::new(), path),
        };
        let own = match (path, block.is_empty()) {
            ("modulation", false) => pick(["scale_shift_table", "modulation"]).to_owned(),
            ("head.modulation", true) => pick(["scale_shift_table", "head.modulation"]).to_owned(),
            _ => {
                let (module, parameter) = path.rsplit_once('.')?;
                let (_, names) = MODULES.iter().find(|(ours, _)| *ours == module)?;
                // Norms have gamma and beta here, weight and bias there.
                let parameter = match parameter {
                    "gamma" => "weight",
                    "beta" => "bias",
                    other => other,
                };
                format!("{}.{parameter}", pick(*names))
            }
        };
        Some(block + &own)
    }

    fn of(files: &[SafeTensors<'_>]) -> Result<Self, ImportError> {
        let name = |naming: Naming| naming.tensor("time.projection.weight").expect("a parameter");
        let named = |naming: &Naming| find(files, &name(*naming)).is_some();
        let known = [Naming::Diffusers, Naming::Wan];
        known
            .into_iter()
            .find(named)
            .ok_or_else(|| ImportError::Naming(name(Naming::Diffusers), name(Naming::Wan)))
    }
}

impl VideoDit {
    /// The model with the weights of a checkpoint, under the names of diffusers or of Wan, in the dtype that the model has.
    ///
    /// # Errors
    /// If a parameter is missing, of another shape or dtype, or the files have a tensor that is no parameter.
    pub fn load(self, files: &[SafeTensors<'_>]) -> Result<Self, ImportError> {
        let naming = Naming::of(files)?;
        load(self, files, |path| naming.tensor(path))
    }
}
