//! `config.json` as transformers writes it; what is left out there is as its `LlamaConfig` and `GPT2Config` have it.

use burn_sp::nn::RotaryScaling;
use serde_json::{Map, Value, json};

use super::names::Family;
use super::settings::Settings;
use crate::import::ImportError;
use crate::transformer::{MlpKind, NormKind, PositionKind, TransformerConfig};

/// What says which of transformers' classes and which dtype the tensors are of.
const OF_THE_TENSORS: [&str; 3] = ["architectures", "dtype", "torch_dtype"];

/// How Llama's keys are called here.
const LLAMA: [(&str, &str); 7] = [
    ("heads", "num_attention_heads"),
    ("kv_heads", "num_key_value_heads"),
    ("ffn_size", "intermediate_size"),
    ("theta", "rope_theta"),
    ("original_length", "original_max_position_embeddings"),
    ("epsilon", "rms_norm_eps"),
    ("init_std", "initializer_range"),
];

/// How GPT-2's are.
const GPT2: [(&str, &str); 8] = [
    ("hidden_size", "n_embd"),
    ("heads", "n_head"),
    ("ffn_size", "n_inner"),
    ("max_positions", "n_positions"),
    ("dropout", "resid_pdrop"),
    ("attention_dropout", "attn_pdrop"),
    ("epsilon", "layer_norm_epsilon"),
    ("init_std", "initializer_range"),
];

/// The model that a configuration describes.
pub(super) fn read(settings: &Settings<'_>) -> Result<(Family, TransformerConfig), ImportError> {
    let kind: String = settings.require("model_type")?;
    if settings.within("quantization_config")?.is_some() {
        return Err(settings.refuse(
            "quantization_config",
            "what can be read is a checkpoint of plain floats",
        ));
    }
    let (family, config) = match kind.as_str() {
        "llama" => (Family::Llama, llama(settings)?),
        "gpt2" => (Family::Gpt2, gpt2(settings)?),
        _ => return Err(settings.refuse("model_type", "what can be read is \"llama\" or \"gpt2\"")),
    };
    match config.problem() {
        Some(problem) => Err(settings.wrong(by_keys(family, &problem))),
        None => Ok((family, config)),
    }
}

/// Whether a key says nothing of the model that the configuration describes, whatever its value was and is.
pub(super) fn is_free(key: &str, before: &Settings<'_>, after: &Settings<'_>) -> Result<bool, ImportError> {
    Ok(!OF_THE_TENSORS.contains(&key) && read(before)? == read(after)?)
}

/// A problem of a model's configuration, by the keys of the file.
fn by_keys(family: Family, problem: &str) -> String {
    let keys: &[(&str, &str)] = match family {
        Family::Llama => &LLAMA,
        Family::Gpt2 => &GPT2,
    };
    let spoken = |word: &str| {
        let bare = word.trim_end_matches(';');
        let key = keys.iter().find(|(ours, _)| *ours == bare);
        key.map_or(word.to_owned(), |(ours, key)| word.replace(ours, key))
    };
    problem.split(' ').map(spoken).collect::<Vec<_>>().join(" ")
}

fn llama(settings: &Settings<'_>) -> Result<TransformerConfig, ImportError> {
    settings.only("hidden_act", &["silu"])?;
    // "pretraining_tp" says in how many slices Llama 2 was computed, which changes no result.
    let bias = settings.get("attention_bias", false)?;
    if settings.get("mlp_bias", false)? != bias {
        return Err(settings.refuse("mlp_bias", format!("what can be read is {bias}, as attention_bias is")));
    }
    let (hidden, heads) = (
        settings.get("hidden_size", 4096)?,
        settings.get("num_attention_heads", 32)?,
    );
    let (theta, rotary_scaling) = rotary(settings)?;
    Ok(TransformerConfig {
        kv_heads: settings.get("num_key_value_heads", heads)?,
        head_dim: settings.get("head_dim", hidden / heads.max(1))?,
        positions: PositionKind::Rotary { theta },
        rotary_scaling,
        bias,
        tie_embeddings: settings.get("tie_word_embeddings", false)?,
        epsilon: settings.get("rms_norm_eps", 1e-6)?,
        attention_dropout: settings.get("attention_dropout", 0.0)?,
        init_std: settings.get("initializer_range", 0.02)?,
        ..TransformerConfig::llama(
            settings.get("vocab_size", 32000)?,
            hidden,
            settings.get("num_hidden_layers", 32)?,
            heads,
            settings.get("intermediate_size", 11008)?,
        )
    })
}

/// Base and scaling of the angles: since version 5 of transformers in one object, before that in two places.
fn rotary(settings: &Settings<'_>) -> Result<(f64, RotaryScaling), ImportError> {
    let mut theta = settings.get("rope_theta", 10000.0)?;
    let inner = match settings.within("rope_parameters")? {
        Some(inner) => Some(inner),
        None => settings.within("rope_scaling")?,
    };
    let Some(inner) = inner else {
        return Ok((theta, RotaryScaling::None));
    };
    theta = inner.get("rope_theta", theta)?;
    if inner.get("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(inner.refuse("partial_rotary_factor", "what can be read is 1.0"));
    }
    let old = inner.get("type", "default".to_owned())?;
    let scaling = match inner.get("rope_type", old)?.as_str() {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear {
            factor: inner.require("factor")?,
        },
        "llama3" => RotaryScaling::Llama3 {
            factor: inner.require("factor")?,
            low_freq_factor: inner.require("low_freq_factor")?,
            high_freq_factor: inner.require("high_freq_factor")?,
            original_length: inner.require("original_max_position_embeddings")?,
        },
        _ => {
            let works = "what can be read is \"default\", \"linear\" or \"llama3\"";
            return Err(inner.refuse("rope_type", works));
        }
    };
    Ok((theta, scaling))
}

fn gpt2(settings: &Settings<'_>) -> Result<TransformerConfig, ImportError> {
    // Three names, one function: the tanh approximation. Plain "gelu" is another.
    settings.only("activation_function", &["gelu_new", "gelu_pytorch_tanh", "gelu_fast"])?;
    settings.only("scale_attn_weights", &[true])?;
    settings.only("scale_attn_by_inverse_layer_idx", &[false])?;
    settings.only("add_cross_attention", &[false])?;
    // "reorder_and_upcast_attn" asks for attention in f32, which it always is.
    let dropout = settings.get("resid_pdrop", 0.1)?;
    if settings.get("embd_pdrop", 0.1)? != dropout {
        return Err(settings.refuse(
            "embd_pdrop",
            format!("what can be read is {dropout}, as resid_pdrop is"),
        ));
    }
    let hidden = settings.get("n_embd", 768)?;
    Ok(TransformerConfig {
        ffn_size: settings.get("n_inner", 4 * hidden)?,
        tie_embeddings: settings.get("tie_word_embeddings", true)?,
        epsilon: settings.get("layer_norm_epsilon", 1e-5)?,
        dropout,
        attention_dropout: settings.get("attn_pdrop", 0.1)?,
        init_std: settings.get("initializer_range", 0.02)?,
        ..TransformerConfig::gpt2(
            settings.get("vocab_size", 50257)?,
            hidden,
            settings.get("n_layer", 12)?,
            settings.get("n_head", 12)?,
            settings.get("n_positions", 1024)?,
        )
    })
}

/// The configuration that describes a model. Tokens that begin and end a text are not known here.
pub(super) fn write(config: &TransformerConfig) -> Result<(Family, Map<String, Value>), ImportError> {
    let (family, json) = match (config.positions, config.norm, config.mlp) {
        (PositionKind::Rotary { theta }, NormKind::Rms, MlpKind::SwiGlu) => (
            Family::Llama,
            json!({
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.ffn_size,
                "num_hidden_layers": config.layers,
                "num_attention_heads": config.heads,
                "num_key_value_heads": config.kv_heads,
                "head_dim": config.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": config.epsilon,
                "rope_theta": theta,
                "rope_scaling": scaling(&config.rotary_scaling),
                "attention_bias": config.bias,
                "mlp_bias": config.bias,
                "attention_dropout": config.attention_dropout,
                "tie_word_embeddings": config.tie_embeddings,
                "initializer_range": config.init_std,
                "bos_token_id": null,
                "eos_token_id": null,
            }),
        ),
        (PositionKind::Learned { max }, NormKind::Layer, MlpKind::Gelu)
            if config.bias
                && config.kv_heads == config.heads
                && config.heads * config.head_dim == config.hidden_size =>
        {
            (
                Family::Gpt2,
                json!({
                    "architectures": ["GPT2LMHeadModel"],
                    "model_type": "gpt2",
                    "vocab_size": config.vocab_size,
                    "n_embd": config.hidden_size,
                    "n_inner": config.ffn_size,
                    "n_layer": config.layers,
                    "n_head": config.heads,
                    "n_positions": max,
                    "activation_function": "gelu_new",
                    "layer_norm_epsilon": config.epsilon,
                    "resid_pdrop": config.dropout,
                    "embd_pdrop": config.dropout,
                    "attn_pdrop": config.attention_dropout,
                    "tie_word_embeddings": config.tie_embeddings,
                    "initializer_range": config.init_std,
                    "bos_token_id": null,
                    "eos_token_id": null,
                }),
            )
        }
        _ => {
            return Err(ImportError::Config(
                "it is neither of Llama's shape (rotary positions, RMSNorm, SwiGLU) nor of GPT-2's (learned positions, \
                 LayerNorm, GELU, biases, as many key/value heads as query heads, which fill the residual stream)"
                    .into(),
            ));
        }
    };
    match json {
        Value::Object(values) => Ok((family, values)),
        _ => unreachable!("it is written as an object"),
    }
}

fn scaling(scaling: &RotaryScaling) -> Value {
    match scaling {
        RotaryScaling::None => Value::Null,
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RotaryScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_length,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_length,
        }),
    }
}
