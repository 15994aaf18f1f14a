use std::fs;
use std::path::PathBuf;

use burn_sp::layout::MeshShape;
use burn_sp_models::transformer::{GenerateOptions, MemoryOptions, Sampling};
use clap::Parser;

use super::{Source, Vocabulary};
use crate::InputError;
use crate::config::{RunConfig, at_least_one, refuse};
use crate::flags::{DeviceKind, Engine, Kv, RunFlags};
use crate::memory::MAX_RANKS;

/// How many tokens are added if no flag says so and there is room for them.
const MAX_TOKENS: usize = 200;

const MESH: &str = "Mesh (if no axis is given, all ranks are on ulysses)";

const CHOICE: &str = "Choosing tokens";

/// Goes on from a prompt with a language model, the prompt's tokens and the cache split over ranks.
///
/// The same seed gives the same text on every mesh, up to rounding.
#[derive(Parser, Clone, Debug, Default)]
#[command(name = "sample", version, args_override_self = true)]
pub struct SampleFlags {
    /// The model: a folder that train-transformer --save wrote (its newest state), one of its states (.../step-000010), or a
    /// Hugging Face folder of Llama or GPT-2
    #[arg(long, value_name = "DIR")]
    pub from: PathBuf,

    /// The beginning of the text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,

    /// A file with the beginning of the text, UTF-8
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    /// A tokenizer.json [default: that of the model; without one a byte is a token, if the model has 256]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,

    /// How many tokens are added at most [default: 200, or as many as the model has positions for]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,

    /// How many tokens of the prompt are read at a time [default: all at once]
    #[arg(long, value_name = "N")]
    pub chunk: Option<usize>,

    /// Above 1 unlikely tokens become likelier, below 1 less likely; 0 takes the most likely one [default: 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = CHOICE)]
    pub temperature: Option<f64>,

    /// Draw from the K most likely tokens only [default: from all]
    #[arg(long, value_name = "K", help_heading = CHOICE)]
    pub top_k: Option<usize>,

    /// Draw from the most likely tokens whose probabilities together reach P only [default: 1, from all]
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = CHOICE)]
    pub top_p: Option<f64>,

    /// Fixes what is drawn, on any mesh [default: 7]
    #[arg(long, value_name = "N", help_heading = CHOICE)]
    pub seed: Option<u64>,

    /// How ranks run [default: threads]
    #[arg(long, value_enum)]
    pub engine: Option<Engine>,

    /// Number of ranks [default: the product of the mesh, else 1]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,

    /// Ranks between which the prompt's keys and values travel
    #[arg(long, value_name = "N", help_heading = MESH)]
    pub ring: Option<usize>,

    /// Ranks that exchange the prompt's tokens for heads around attention
    #[arg(long, value_name = "N", help_heading = MESH)]
    pub ulysses: Option<usize>,

    /// Tensor-parallel ranks: each has slices of the weights, and heads of the cache
    #[arg(long, value_name = "N", help_heading = MESH)]
    pub tp: Option<usize>,

    /// How the ring axis, if there is one, moves the prompt's keys and values [default: ring]
    #[arg(long, value_enum, help_heading = MESH)]
    pub kv: Option<Kv>,

    /// Where tensors live [default: flex]
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,

    /// How long a rank waits for the others before all fail with a report [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,

    /// Write a machine-readable report here
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
}

/// All that is needed to go on from a prompt.
pub struct SampleConfig {
    /// The ranks.
    pub run: RunConfig,
    /// The model.
    pub source: Source,
    /// What its tokens are.
    pub vocabulary: Vocabulary,
    /// The beginning of the text.
    pub prompt: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// How it goes on.
    pub options: GenerateOptions,
}

impl SampleFlags {
    /// The flags that all programs share.
    pub fn run(&self) -> RunFlags {
        let axis = [self.ring, self.ulysses, self.tp].iter().any(Option::is_some);
        RunFlags {
            engine: self.engine,
            ranks: self.ranks,
            ring: self.ring,
            // With processes their number is that of the ranks.
            ulysses: self.ulysses.or_else(|| self.ranks.filter(|_| !axis)),
            tp: self.tp,
            kv: self.kv,
            device: self.device,
            // The tokens of a prompt may be fewer than the ranks.
            seq_len: Some(MAX_RANKS),
            batch: Some(1),
            seed: self.seed,
            timeout: self.timeout,
            report: self.report.clone(),
            ..RunFlags::default()
        }
    }

    /// Completes the flags and checks them, opens the model and reads the prompt. `run` is from [`run`](Self::run), of this
    /// process.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self, run: &RunFlags) -> Result<SampleConfig, InputError> {
        let run = RunFlags {
            ranks: run.ranks.or(run.mesh()?.is_none().then_some(1)),
            ..run.clone()
        };
        let run = run.resolve(|_| None)?;
        let prompt = self.prompt()?;
        let source = Source::open(&self.from)?;
        let vocabulary = match self.tokenizer.as_ref().or(source.tokenizer.as_ref()) {
            Some(file) => Vocabulary::read(file)?,
            None if source.bytes => Vocabulary::Bytes,
            None => {
                return refuse(format!(
                    "--from {}: there is no tokenizer.json with the model; give --tokenizer FILE",
                    self.from.display()
                ));
            }
        };
        let entries = source.config().vocab_size;
        let tokens = vocabulary.encode(&prompt, source.begins_specially(), entries)?;
        let positions = source.positions();
        let room = positions.map_or(MAX_TOKENS, |positions| (positions + 1).saturating_sub(tokens.len()));
        let stop: Result<Vec<u32>, InputError> = source.end.iter().map(|end| vocabulary.token(end)).collect();
        let options = GenerateOptions {
            max_tokens: at_least_one("--max-tokens", self.max_tokens, MAX_TOKENS.min(room))?,
            stop: stop?,
            sampling: Sampling {
                temperature: self.temperature.unwrap_or(1.0),
                top_k: self.top_k,
                top_p: self.top_p.unwrap_or(1.0),
                seed: run.seed,
            },
            mask: source.mask().clone(),
            kv: run.kv_move(),
            chunk: self.chunk,
            memory: MemoryOptions::default(),
        };
        if let Some(problem) = options.problem(tokens.len(), positions) {
            return refuse(format!("sample: {problem}"));
        }
        run.check_vocabulary(entries)?;
        Ok(SampleConfig {
            run,
            source,
            vocabulary,
            prompt,
            tokens,
            options,
        })
    }

    fn prompt(&self) -> Result<String, InputError> {
        match (&self.prompt, &self.prompt_file) {
            (Some(prompt), None) => Ok(prompt.clone()),
            (None, Some(file)) => {
                let text = fs::read_to_string(file);
                text.map_err(|error| InputError(format!("--prompt-file {}: {error}", file.display())))
            }
            (Some(_), Some(_)) => refuse("--prompt and --prompt-file are both given; use one"),
            (None, None) => refuse("there is no prompt; give --prompt TEXT or --prompt-file FILE"),
        }
    }
}

impl SampleConfig {
    /// The mesh.
    pub fn mesh(&self) -> MeshShape {
        self.run.mesh()
    }
}
