//! The flags that all programs share, and those of training; each may also stand in a configuration file.

use std::path::{Path, PathBuf};

use clap::{Args, Parser, ValueEnum};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::InputError;

/// How ranks run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// As threads of this process.
    #[default]
    Threads,
    /// As processes over MPI, started by mpirun.
    Mpi,
    /// As processes with a CUDA device each, over NCCL.
    Nccl,
}

impl From<Engine> for burn_sp::Engine {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Threads => burn_sp::Engine::Threads,
            Engine::Mpi => burn_sp::Engine::Mpi,
            Engine::Nccl => burn_sp::Engine::Nccl,
        }
    }
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Burn's CPU backend.
    #[default]
    Flex,
    /// GPUs through Vulkan, Metal or WebGPU.
    Wgpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// How the ring axis moves keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kv {
    /// From rank to rank.
    #[default]
    Ring,
    /// All of them at once.
    Gather,
}

/// The shape of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// Rotary positions, RMSNorm, SwiGLU.
    #[default]
    Llama,
    /// Learned positions, LayerNorm, GELU, tied output.
    Gpt2,
}

/// What backward computes again, instead of forward keeping it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// Whole blocks.
    Blocks,
    /// Attention, with its norm and the projections before it.
    Attention,
    /// All of a block that comes after attention.
    AllButAttention,
}

/// What ranks share out that would otherwise be the same on all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// Nothing.
    #[default]
    None,
    /// The optimizer's state.
    Optimizer,
    /// Parameters, their gradients and the optimizer's state; a block's parameters are gathered while it runs.
    Parameters,
}

/// Where the inputs of what is computed again wait for backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// On their device.
    #[default]
    Device,
    /// In host memory.
    Host,
}

/// What a value is called on the command line.
pub(crate) fn name(value: impl ValueEnum) -> String {
    let named = value.to_possible_value().expect("no value is hidden");
    named.get_name().into()
}

const MESH: &str = "Mesh (if no axis is given, one is chosen, and the reason printed)";

const MEMORY: &str = "Memory (no loss depends on these)";

const STATE: &str = "Saving and resuming";

const CHECKPOINT: &str = "Hugging Face checkpoints (Llama and GPT-2)";

const TOKENS: &str = "Tokens (without a tokenizer, a byte is a token)";

/// The flags of every program: the ranks, the size of the run, and where it is written down.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
pub struct RunFlags {
    /// How ranks run [default: threads]
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,

    /// Number of ranks [default: the product of the mesh, else 2]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,

    /// Data-parallel ranks: each has other samples
    #[arg(long, value_name = "N", help_heading = MESH)]
    pub dp: Option<usize>,

    /// Sequence-parallel ranks between which keys and values travel
    #[arg(long, value_name = "N", help_heading = MESH)]
    pub ring: Option<usize>,

    /// Sequence-parallel ranks that exchange tokens for heads around attention
    #[arg(long, value_name = "N", help_heading = MESH)]
    pub ulysses: Option<usize>,

    /// Tensor-parallel ranks: each has slices of the weights, and of the tokens in between
    #[arg(long, value_name = "N", help_heading = MESH)]
    pub tp: Option<usize>,

    /// How the ring axis, if there is one, moves keys and values [default: ring]
    #[arg(long, value_enum, help_heading = MESH)]
    pub kv: Option<Kv>,

    /// Where tensors live [default: flex]
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,

    /// Tokens of a sequence, at most 134217728 [default: 1024; train-video-dit: those of a clip]
    #[arg(long, value_name = "N")]
    pub seq_len: Option<usize>,

    /// Sequences of a micro-step, over all ranks; dp splits them [default: 2; train-video-dit: 1 for each rank of dp]
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,

    /// Micro-steps of a step, whose gradients are added [default: 1]
    #[arg(long, value_name = "N")]
    pub accumulate: Option<usize>,

    /// Steps in total [default: 60]
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,

    /// Fixes initial weights, data order and dropout, on any mesh [default: 7]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// How long a rank waits for the others before all fail with a report [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,

    /// A JSON file with any of these flags, `seq_len` for --seq-len; flags win over it. The "config" of a report is one
    #[arg(long, value_name = "FILE.json")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Write a machine-readable report here
    #[arg(long, value_name = "FILE.json")]
    #[serde(skip)]
    pub report: Option<PathBuf>,

    /// This process is not the one that writes what is asked for.
    #[arg(skip)]
    #[serde(skip)]
    pub silent: bool,

    /// Write a timeline of all ranks here, for Perfetto
    #[arg(long, value_name = "FILE.json")]
    #[serde(skip)]
    pub trace: Option<PathBuf>,
}

/// The size of a model.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    /// llama: rotary positions, RMSNorm, SwiGLU; gpt2: learned positions, LayerNorm, GELU [default: llama]
    #[arg(long, value_enum)]
    pub shape: Option<Shape>,

    /// Width [default: 256]
    #[arg(long, value_name = "N")]
    pub hidden: Option<usize>,

    /// Blocks [default: 4]
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,

    /// Query heads [default: 8]
    #[arg(long, value_name = "N")]
    pub heads: Option<usize>,

    /// Key/value heads, a divisor of the heads [default: as many]
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,

    /// Hidden units of the MLP [default: llama 8/3 of the width (688 at 256), gpt2 4 times the width]
    #[arg(long, value_name = "N")]
    pub ffn: Option<usize>,

    /// Tokens that a token sees: itself and those before it [default: all before it]
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,

    /// Share of elements dropped in training [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub dropout: Option<f64>,

    /// Share of attention weights dropped in training [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub attention_dropout: Option<f64>,
}

/// What a language model's tokens are.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[command(next_help_heading = TOKENS)]
pub struct DataFlags {
    /// A tokenizer.json. The text is tokenized once, a file a document, or of a .jsonl file each line of {"text": "..."}, and
    /// the tokens are kept. A file's document of more than a MiB is tokenized in pieces; a line is held whole
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,

    /// Where tokens are kept, and never written over: if text or tokenizer are others, name another file. Without --text,
    /// train on it as it is [default: beside the first --text, .tokens]
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,

    /// What stands between the documents of a file
    #[arg(long, value_name = "STRING", allow_hyphen_values = true)]
    pub document_separator: Option<String>,

    /// A token of the tokenizer to end each document with, such as `</s>`
    #[arg(long, value_name = "TOKEN")]
    pub eos: Option<String>,

    /// No token sees another document, and the last of a document has nothing to predict
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub pack: Option<bool>,

    /// Text, or without --tokenizer a file of tokens, to validate with [default: the last tenth of the sequences]
    #[arg(long, value_name = "PATH")]
    pub held_out: Option<PathBuf>,
}

/// How a program learns, and how it needs less memory.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
pub struct LearningFlags {
    /// Learning rate of AdamW, constant [default: 0.001]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Training")]
    pub lr: Option<f64>,

    /// Largest global norm of the gradients; 0 turns clipping off [default: 1]
    #[arg(long, value_name = "NORM", allow_negative_numbers = true, help_heading = "Training")]
    pub clip: Option<f64>,

    /// What backward computes again, instead of forward keeping it [default: none; blocks with --shard parameters]
    #[arg(long, value_enum, value_name = "WHAT", help_heading = MEMORY)]
    pub recompute: Option<Recompute>,

    /// Where the inputs of what is computed again wait for backward; all the same on flex [default: device]
    #[arg(long, value_enum, value_name = "WHERE", help_heading = MEMORY)]
    pub keep: Option<Keep>,

    /// In how many tiles the MLP takes a rank's tokens, one after the other, forward and backward [default: 1]
    #[arg(long, value_name = "N", help_heading = MEMORY)]
    pub mlp_tiles: Option<usize>,

    /// What ranks share out that would otherwise be the same on all of them [default: none]
    #[arg(long, value_enum, value_name = "WHAT", help_heading = MEMORY)]
    pub shard: Option<Shard>,
}

/// Where training state goes and comes from.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
pub struct StateFlags {
    /// Save training state in this folder after the last step, and keep the newest two. Ranks wait for rank 0's disk, as
    /// for all else no longer than --timeout
    #[arg(long, value_name = "DIR", help_heading = STATE)]
    pub save: Option<PathBuf>,

    /// Save it after every so many steps, and after the last [default: after the last]
    #[arg(long, value_name = "N", help_heading = STATE)]
    pub save_every: Option<usize>,

    /// Go on from the newest state in this folder, or from this one (.../step-000010), on any mesh. Data and model must be
    /// as they were; --steps counts the steps before too
    #[arg(long, value_name = "DIR", help_heading = STATE)]
    pub resume: Option<PathBuf>,
}

/// Models that others trained, or will use.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[command(next_help_heading = CHECKPOINT)]
pub struct CheckpointFlags {
    /// Start from the model in this folder (config.json and safetensors), and with its tokenizer.json, if it has one
    #[arg(long, value_name = "DIR")]
    pub pretrained: Option<PathBuf>,

    /// Write the trained model to this folder in the end, as transformers reads it
    #[arg(long, value_name = "DIR")]
    pub export: Option<PathBuf>,
}

/// Trains a language model on text, its sequences split over ranks.
///
/// With no flags: 2 ranks, a small Llama, and the sources and documentation of the workspace as its text.
#[derive(Parser, Clone, Debug, Default, Serialize, Deserialize)]
#[command(name = "train-transformer", version, args_override_self = true)]
pub struct TrainFlags {
    /// The run.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunFlags,

    /// UTF-8 files or folders to learn from [default: this workspace's sources and documentation]
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = "Training")]
    pub text: Option<Vec<PathBuf>>,

    /// What its tokens are.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataFlags,

    /// What it starts from and becomes.
    #[command(flatten)]
    #[serde(flatten)]
    pub checkpoint: CheckpointFlags,

    /// How it learns.
    #[command(flatten)]
    #[serde(flatten)]
    pub learning: LearningFlags,

    /// Where its state goes and comes from.
    #[command(flatten)]
    #[serde(flatten)]
    pub state: StateFlags,

    /// The model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelFlags,
}

impl AsMut<RunFlags> for TrainFlags {
    fn as_mut(&mut self) -> &mut RunFlags {
        &mut self.run
    }
}

/// Parses a command line. Asking for help or the version prints it and ends the process.
///
/// # Errors
/// Clap's message, in one line.
pub fn parse<F: Parser>(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> Result<F, InputError> {
    F::try_parse_from(arguments).map_err(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        let text = error.to_string();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let telling = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
        let line = telling.collect::<Vec<_>>().join("; ");
        InputError(format!(
            "{}; --help lists all flags",
            line.trim_start_matches("error: ")
        ))
    })
}

/// The flags of this process: its command line, over the file that it may name.
///
/// # Errors
/// As [`parse`] and [`with_file`].
pub fn read<F>() -> Result<F, InputError>
where
    F: Parser + AsMut<RunFlags> + Serialize + DeserializeOwned + Default,
{
    let mut flags: F = parse(std::env::args_os())?;
    // These three are the command line's alone.
    let RunFlags {
        config, report, trace, ..
    } = flags.as_mut().clone();
    let mut flags = with_file(flags, config.as_deref())?;
    flags.as_mut().report = report;
    flags.as_mut().trace = trace;
    Ok(flags)
}

/// The flags of the file, where one is given, under those of the command line.
///
/// # Errors
/// If the file cannot be read, is no JSON object, or has a field that no flag has or of another type.
pub fn with_file<F>(flags: F, file: Option<&Path>) -> Result<F, InputError>
where
    F: Serialize + DeserializeOwned + Default,
{
    let Some(file) = file else {
        return Ok(flags);
    };
    let wrong = |what: String| InputError(format!("--config {}: {what}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let fields: Map<String, Value> =
        serde_json::from_str(&text).map_err(|error| wrong(format!("not a JSON object: {error}")))?;

    let known = fields_of(&F::default());
    let mut merged = Map::new();
    for (name, value) in fields {
        if !known.contains_key(&name) {
            let names: Vec<_> = known.keys().map(String::as_str).collect();
            return Err(wrong(format!("unknown field {name:?}; use {}", names.join(", "))));
        }
        // Alone first, so that the message can name it.
        let alone = Map::from_iter([(name.clone(), value.clone())]);
        F::deserialize(Value::Object(alone)).map_err(|error| wrong(format!("{name}: {error}")))?;
        merged.insert(name, value);
    }
    merged.extend(fields_of(&flags).into_iter().filter(|(_, value)| !value.is_null()));
    F::deserialize(Value::Object(merged)).map_err(|error| wrong(error.to_string()))
}

/// Every flag by name, null where it is not given.
fn fields_of<F: Serialize>(flags: &F) -> Map<String, Value> {
    match serde_json::to_value(flags) {
        Ok(Value::Object(fields)) => fields,
        // Flags are a struct of plain values.
        other => unreachable!("flags are no object: {other:?}"),
    }
}
