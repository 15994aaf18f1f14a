use std::io::Write;
use std::sync::Mutex;
use std::time::Instant;

use burn_sp::comm::{CommError, raise};
use burn_sp::launch_module;
use burn_sp::layout::MeshShape;
use burn_sp_models::transformer::generate;
use bytesize::ByteSize;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::SampleConfig;
use crate::RunError;
use crate::everyone::{agree, everyones};
use crate::flags::{DeviceKind, Engine};

/// What was written, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleReport {
    /// Which program.
    pub program: String,
    /// Of this package.
    pub version: String,
    /// How ranks ran.
    pub engine: Engine,
    /// Where tensors were.
    pub device: DeviceKind,
    /// How the ranks were arranged.
    pub mesh: MeshShape,
    /// The prompt and what was added to it.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// The tokens that were added.
    pub tokens: Vec<u32>,
    /// Whether the model ended the text.
    pub stopped: bool,
    /// Until the first token came.
    pub prompt_seconds: f64,
    /// From the first token to the last.
    pub seconds: f64,
    /// Keys and values, by rank.
    pub cache_bytes_per_rank: Vec<u64>,
}

/// Writes the prompt and what the model adds to `out`, as it comes. Of ranks that are processes, the first one writes, and has
/// the text in its report.
///
/// # Errors
/// If the weights cannot be read (before any rank starts), or the ranks fail.
pub fn sample(config: SampleConfig, out: &mut (dyn Write + Send)) -> Result<SampleReport, RunError> {
    let SampleConfig {
        run,
        source,
        vocabulary,
        prompt,
        tokens,
        options,
    } = config;
    let (model, devices) = (source.load()?, run.devices()?);
    let same = json!({ "prompt": tokens, "options": format!("{options:?}"), "mesh": run.mesh() });
    let out = Mutex::new(out);
    let mut all = launch_module(&run.launch(), &devices, model, |device, model| {
        let world = device.mesh().world().clone();
        agree(&same, "", world.as_ref());
        let (model, _) = model.shard(&device);
        let failed = |error: &dyn std::fmt::Display| -> ! { raise(CommError::failed(device.rank(), error)) };
        // Only rank 0 writes; a reader that has gone ends the run of all.
        let writes = (device.rank() == 0).then(|| vocabulary.writer(&tokens));
        let mut writer = writes.map(|writer| writer.unwrap_or_else(|error| failed(&error)));
        let mut text = String::new();
        let mut write = |part: String| {
            let mut out = out.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let written = out.write_all(part.as_bytes()).and_then(|()| out.flush());
            written.unwrap_or_else(|error| failed(&format!("the text could not be written: {error}")));
            text.push_str(&part);
        };
        if writer.is_some() {
            write(prompt.clone());
        }
        let begin = Instant::now();
        let mut first = None;
        let added = generate(&model, &tokens, &options, &device, |token| {
            first.get_or_insert_with(|| begin.elapsed());
            if let Some(writer) = &mut writer {
                write(writer(token).unwrap_or_else(|error| failed(&error)));
            }
        });
        let whole = begin.elapsed();
        if writer.is_some() {
            write("\n".into());
        }
        let prompt_seconds = first.unwrap_or(whole).as_secs_f64();
        SampleReport {
            program: "sample".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            engine: run.engine,
            device: run.device,
            mesh: run.mesh(),
            prompt_tokens: tokens.len(),
            tokens: added.tokens,
            stopped: added.stopped,
            prompt_seconds,
            seconds: whole.as_secs_f64() - prompt_seconds,
            cache_bytes_per_rank: everyones(&(added.cache_bytes as u64), world.as_ref()),
            text,
        }
    })?;
    Ok(all.swap_remove(0))
}

impl SampleReport {
    /// Speed and memory, in lines.
    pub fn summary(&self) -> String {
        // The first token came with the prompt.
        let added = self.tokens.len().saturating_sub(1);
        let rate = |tokens: usize, seconds: f64| match tokens {
            0 => "none".into(),
            _ => format!("{tokens} at {:.1} tokens/s", tokens as f64 / seconds),
        };
        let bytes = self
            .cache_bytes_per_rank
            .iter()
            .map(|bytes| ByteSize(*bytes).to_string());
        format!(
            "prompt: {}; after the first: {}\ncache a rank: {}",
            rate(self.prompt_tokens, self.prompt_seconds),
            rate(added, self.seconds),
            bytes.collect::<Vec<_>>().join(", ")
        )
    }
}
