use crate::import::{Form, Place};

/// A family of checkpoints: how its library names and shapes the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Gpt2,
}

/// Module by module: the path in the model, or in a block, and the name in a checkpoint of Llama.
const LLAMA: [(&str, &str); 11] = [
    ("embedding", "embed_tokens"),
    ("norm1", "input_layernorm"),
    ("attention.query", "self_attn.q_proj"),
    ("attention.key", "self_attn.k_proj"),
    ("attention.value", "self_attn.v_proj"),
    ("attention.output", "self_attn.o_proj"),
    ("norm2", "post_attention_layernorm"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
    ("norm", "norm"),
];

/// That of GPT-2, which has queries, keys and values in one.
const GPT2: [(&str, &str); 11] = [
    ("embedding", "wte"),
    ("positions", "wpe"),
    ("norm1", "ln_1"),
    ("attention.query", "attn.c_attn"),
    ("attention.key", "attn.c_attn"),
    ("attention.value", "attn.c_attn"),
    ("attention.output", "attn.c_proj"),
    ("norm2", "ln_2"),
    ("mlp.up", "mlp.c_fc"),
    ("mlp.down", "mlp.c_proj"),
    ("norm", "ln_f"),
];

/// The output layer, where it is not the token embedding; some checkpoints have it where it is, too.
pub(super) const HEAD: &str = "lm_head.weight";

/// What older checkpoints have beside the parameters, by the ends of the names: masks of attention and wavelengths.
const BUFFERS: [&str; 3] = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];

impl Family {
    /// What all names but the output layer's begin with in a checkpoint of the whole language model.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Llama => "model.",
            Self::Gpt2 => "transformer.",
        }
    }

    /// The token embedding, without the prefix.
    pub fn embedding(self) -> &'static str {
        match self {
            Self::Llama => "embed_tokens.weight",
            Self::Gpt2 => "wte.weight",
        }
    }

    /// Whether a tensor is no parameter.
    pub fn is_buffer(name: &str) -> bool {
        BUFFERS.iter().any(|end| name.ends_with(end))
    }

    /// Where the parameter at a path of [`Transformer`](crate::transformer::Transformer) is, `blocks.0.mlp.up.weight` say,
    /// in a checkpoint with that prefix.
    pub fn place(self, prefix: &str, path: &str) -> Place {
        // Which kind of norm it is stands in the path.
        let path = path.replace(".Rms.", ".").replace(".Layer.", ".");
        let (module, parameter) = path.rsplit_once('.').expect("a parameter is in a module");
        // Norms have gamma and beta here, weight and bias there.
        let parameter = match parameter {
            "gamma" => "weight",
            "beta" => "bias",
            other => other,
        };
        if module == "head" {
            return Place {
                name: HEAD.into(),
                form: Form::Transposed,
            };
        }
        let (modules, blocks) = match self {
            Self::Llama => (&LLAMA, "layers"),
            Self::Gpt2 => (&GPT2, "h"),
        };
        let (block, module) = match module.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
            Some((number, rest)) => (format!("{blocks}.{number}."), rest),
            None => (String::new(), module),
        };
        let (_, name) = modules
            .iter()
            .find(|(ours, _)| *ours == module)
            .expect("every module is in the list of its family");
        let part = |index| Form::Part { index, of: 3 };
        let form = match (self, module) {
            (Self::Gpt2, "attention.query") => part(0),
            (Self::Gpt2, "attention.key") => part(1),
            (Self::Gpt2, "attention.value") => part(2),
            // GPT-2's other linear layers are [inputs, outputs], as Burn's.
            (Self::Llama, module) if parameter == "weight" && module.contains('.') => Form::Transposed,
            _ => Form::Same,
        };
        Place {
            name: format!("{prefix}{block}{name}.{parameter}"),
            form,
        }
    }
}
