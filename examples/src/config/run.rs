//! The flags of every program.

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::Device;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::tensor::DeviceType;
use burn_sp::LaunchConfig;
use burn_sp::attention::KvMove;
use burn_sp::layout::{MeshChoice, MeshError, MeshShape};
use indicatif::HumanCount;
use serde::{Deserialize, Serialize};

use super::{MAX_TOKENS, at_least_one, check_output, refuse};
use crate::flags::{DeviceKind, Engine, Kv, RunFlags};
use crate::progress::Progress;
use crate::{InputError, memory};

/// What every program needs to know of a run. Its fields have the names of the flags, so that a report's `config` can
/// be given to `--config`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // They are documented where they are flags.
pub struct RunConfig {
    pub engine: Engine,
    pub device: DeviceKind,
    pub ranks: usize,
    pub dp: usize,
    pub ring: usize,
    pub ulysses: usize,
    pub tp: usize,
    pub kv: Kv,
    pub seq_len: usize,
    pub batch: usize,
    pub accumulate: usize,
    pub steps: usize,
    pub seed: u64,
    pub timeout: u64,
    /// Why the mesh was chosen, if no axis was given.
    #[serde(skip)]
    pub chosen: Option<String>,
}

impl RunFlags {
    /// Completes the flags and checks them. `choose` is asked for a mesh if no axis is given, by a configuration with
    /// all but the mesh; none is for more ranks than there are tokens.
    ///
    /// # Errors
    /// One line: what cannot work, and what would.
    pub fn resolve(&self, choose: impl FnOnce(&RunConfig) -> Option<MeshChoice>) -> Result<RunConfig, InputError> {
        if !self.silent {
            check_output("--report", self.report.as_deref())?;
        }
        check_output("--trace", self.trace.as_deref())?;
        if self.trace.is_some() && self.trace == self.report {
            return refuse("--trace and --report name the same file; use two");
        }
        let given = self.mesh()?;
        let seq_len = at_least_one("--seq-len", self.seq_len, 1024)?;
        if seq_len > MAX_TOKENS {
            let most = HumanCount(MAX_TOKENS as u64);
            return refuse(format!("--seq-len {seq_len}: use at most {most} tokens"));
        }
        let mut config = RunConfig {
            engine: self.engine.unwrap_or_default(),
            device: self.device(),
            ranks: given.map_or(self.ranks.unwrap_or(2), |mesh| mesh.ranks()),
            dp: 1,
            ring: 1,
            ulysses: 1,
            tp: 1,
            kv: self.kv.unwrap_or_default(),
            seq_len,
            batch: at_least_one("--batch", self.batch, 2)?,
            accumulate: at_least_one("--accumulate", self.accumulate, 1)?,
            steps: at_least_one("--steps", self.steps, 60)?,
            seed: self.seed.unwrap_or(7),
            timeout: match self.timeout {
                Some(0) => refuse("--timeout 0: ranks must be given time to wait, at least 1 second")?,
                timeout => timeout.unwrap_or(60),
            },
            chosen: None,
        };
        let mesh = match given {
            Some(mesh) => mesh,
            None => match choose(&config) {
                Some(choice) => {
                    config.chosen = Some(choice.reason);
                    choice.mesh
                }
                // Refused below, for want of tokens.
                None => MeshShape::ulysses(config.ranks),
            },
        };
        let MeshShape { dp, ring, ulysses, tp } = mesh;
        let config = RunConfig {
            dp,
            ring,
            ulysses,
            tp,
            ..config
        };
        config.check_shares()?;
        if config.engine == Engine::Nccl && config.device != DeviceKind::Cuda {
            return refuse("--engine nccl: it moves tensors of CUDA devices; use --device cuda, or --engine mpi");
        }
        config.device.check_built()?;
        Ok(config)
    }

    /// What is given, else what the engine is for.
    fn device(&self) -> DeviceKind {
        let natural = match self.engine {
            Some(Engine::Nccl) => DeviceKind::Cuda,
            _ => DeviceKind::default(),
        };
        self.device.unwrap_or(natural)
    }

    /// What this process is in the run. With processes for ranks, their number is that of the ranks if no flag says so.
    ///
    /// # Errors
    /// If the engine cannot be used, or other ranks are asked for than processes were started.
    pub fn this_process(&mut self) -> Result<ThisProcess, InputError> {
        let engine = burn_sp::Engine::from(self.engine.unwrap_or_default());
        let Some((rank, processes)) = engine.process().map_err(engine_fault)? else {
            return Ok(ThisProcess { rank: None });
        };
        let mesh = self.mesh()?;
        let ranks = *self.ranks.get_or_insert(mesh.map_or(processes, |mesh| mesh.ranks()));
        if ranks != processes {
            let mesh = mesh.unwrap_or(MeshShape::ulysses(ranks));
            return refuse(MeshError::Processes { mesh, processes });
        }
        self.silent = rank > 0;
        Ok(ThisProcess { rank: Some(rank) })
    }

    /// Refuses engines whose ranks are processes, for programs that compare several runs in one.
    ///
    /// # Errors
    /// One line.
    pub fn threads_only(&self, program: &str) -> Result<(), InputError> {
        match self.engine.unwrap_or_default() {
            Engine::Threads => Ok(()),
            other => {
                let engine = burn_sp::Engine::from(other);
                refuse(format!(
                    "--engine {engine}: {program} runs its ranks as threads; leave it out"
                ))
            }
        }
    }

    /// The same flags with this mesh.
    pub(crate) fn with_mesh(self, mesh: MeshShape) -> Self {
        let MeshShape { dp, ring, ulysses, tp } = mesh;
        Self {
            ranks: None,
            dp: Some(dp),
            ring: Some(ring),
            ulysses: Some(ulysses),
            tp: Some(tp),
            ..self
        }
    }

    /// The mesh, if an axis is given.
    pub(crate) fn mesh(&self) -> Result<Option<MeshShape>, InputError> {
        let axes = [
            ("--dp", self.dp),
            ("--ring", self.ring),
            ("--ulysses", self.ulysses),
            ("--tp", self.tp),
        ];
        for (flag, ranks) in [("--ranks", self.ranks)].into_iter().chain(axes) {
            match ranks {
                Some(0) => return refuse(format!("{flag} 0: give it at least 1, or leave it out")),
                Some(ranks) if ranks > memory::MAX_RANKS => {
                    return refuse(format!("{flag} {ranks}: at most {} ranks run", memory::MAX_RANKS));
                }
                _ => {}
            }
        }
        if axes.iter().all(|(_, ranks)| ranks.is_none()) {
            return Ok(None);
        }
        let [dp, ring, ulysses, tp] = axes.map(|(_, ranks)| ranks.unwrap_or(1));
        let mesh = MeshShape { dp, ring, ulysses, tp };
        let ranks = self.ranks.unwrap_or(mesh.ranks());
        if mesh.ranks() > memory::MAX_RANKS {
            return refuse(format!(
                "mesh: {mesh} needs {} ranks; at most {} run",
                mesh.ranks(),
                memory::MAX_RANKS
            ));
        }
        match mesh.check(ranks) {
            Ok(()) => Ok(Some(mesh)),
            Err(error) => refuse(error),
        }
    }
}

impl RunConfig {
    /// Every rank needs a sequence and a token. Not every operation of Burn takes an empty tensor: `reshape` reads a
    /// length of 0 as "as it was", and a `dp` rank without sequences has nothing to multiply.
    fn check_shares(&self) -> Result<(), InputError> {
        if self.batch < self.dp {
            return refuse(format!(
                "--batch {} --dp {}: a rank would have no sequence; use --batch {} at least",
                self.batch, self.dp, self.dp
            ));
        }
        let sequence = self.mesh().with_dp(1);
        if !sequence.fits(self.seq_len) {
            return refuse(format!(
                "--seq-len {} on {} ranks ({sequence}): a rank would have no token; use --seq-len {} at least",
                self.seq_len,
                sequence.ranks(),
                sequence.ranks()
            ));
        }
        Ok(())
    }

    /// Each rank of `tp` has entries of the vocabulary.
    pub(crate) fn check_vocabulary(&self, entries: usize) -> Result<(), InputError> {
        match self.tp {
            tp if tp > entries => refuse(format!(
                "--tp {tp}: the vocabulary has {entries} entries; use --tp {entries} at most"
            )),
            _ => Ok(()),
        }
    }

    /// Ranks on each axis.
    pub fn mesh(&self) -> MeshShape {
        MeshShape {
            dp: self.dp,
            ring: self.ring,
            ulysses: self.ulysses,
            tp: self.tp,
        }
    }

    /// The mesh and why, in one line.
    pub fn mesh_line(&self) -> String {
        let mesh = self.mesh();
        match &self.chosen {
            Some(reason) => format!("mesh: {mesh} (chosen: {reason})"),
            None => format!("mesh: {mesh} (as given)"),
        }
    }

    /// Where the ranks' tensors live, without autodiff; see [`RankDevices`](burn_sp::RankDevices).
    ///
    /// # Errors
    /// One line: that this build or this machine has none, and what would help.
    pub fn devices(&self) -> Result<Vec<Device>, InputError> {
        self.device.check_built()?;
        let found: Vec<Device> = match self.device {
            DeviceKind::Flex => vec![Device::flex()],
            #[cfg(feature = "wgpu")]
            DeviceKind::Wgpu => {
                let any = !Device::enumerate(DeviceType::Wgpu).is_empty();
                // The best adapter, as wgpu sees it; they are too unlike each other to share a model.
                any.then(|| Device::wgpu(Default::default())).into_iter().collect()
            }
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda => {
                let all = Device::enumerate(DeviceType::Cuda).to_vec();
                let own = burn_sp::Engine::from(self.engine).cuda_device().map_err(engine_fault)?;
                match own {
                    Some(own) => all.into_iter().skip(own).take(1).collect(),
                    None => all,
                }
            }
            #[allow(unreachable_patterns, reason = "refused above")]
            _ => Vec::new(),
        };
        match self.device {
            _ if !found.is_empty() => Ok(found),
            DeviceKind::Cuda => {
                refuse("--device cuda: no NVIDIA driver, or no device, is found; use --device wgpu or --device flex")
            }
            _ => refuse(
                "--device wgpu: no adapter of Vulkan, Metal or DirectX is found; install a driver (without a GPU, Mesa's \
                 lavapipe), or use --device flex",
            ),
        }
    }

    /// How to start the ranks.
    pub fn launch(&self) -> LaunchConfig {
        LaunchConfig::new(self.mesh())
            .with_engine(self.engine.into())
            .with_timeout(Duration::from_secs(self.timeout))
    }

    /// The rank of this process, if it has only one.
    ///
    /// # Errors
    /// If the engine cannot be used.
    pub fn only_rank(&self) -> Result<Option<usize>, InputError> {
        let process = burn_sp::Engine::from(self.engine).process().map_err(engine_fault)?;
        Ok(process.map(|(rank, _)| rank).or((self.ranks == 1).then_some(0)))
    }

    /// How the ring axis moves keys and values.
    pub fn kv_move(&self) -> KvMove {
        match self.kv {
            Kv::Ring => KvMove::Ring,
            Kv::Gather => KvMove::Gather,
        }
    }

    /// Tokens of one step, over all ranks and micro-steps.
    pub fn tokens_per_step(&self) -> usize {
        self.batch * self.accumulate * self.seq_len
    }
}

/// What a process is in a run.
#[derive(Clone, Copy, Debug)]
pub struct ThisProcess {
    /// Its rank, if others have theirs in processes of their own.
    rank: Option<usize>,
}

impl ThisProcess {
    /// Whether it is the one that talks to people and writes what they asked for.
    pub fn speaks(self) -> bool {
        self.rank.unwrap_or(0) == 0
    }

    /// What shows a run of so many steps, on the process that speaks.
    pub fn progress(self, steps: usize) -> Progress {
        if self.speaks() {
            Progress::new(steps)
        } else {
            Progress::quiet()
        }
    }

    /// Where this process writes what each writes for itself: the file that was asked for, or `name.rank-1.json` beside it.
    pub fn own_file(self, file: Option<&Path>) -> Option<PathBuf> {
        let file = file?;
        let Some(rank) = self.rank.filter(|rank| *rank > 0) else {
            return Some(file.to_path_buf());
        };
        let extension = file
            .extension()
            .map(|extension| extension.to_string_lossy().into_owned());
        Some(file.with_extension(match extension {
            Some(extension) => format!("rank-{rank}.{extension}"),
            None => format!("rank-{rank}"),
        }))
    }
}

fn engine_fault(error: burn_sp::Error) -> InputError {
    InputError(format!("--engine {error}").replacen("--engine engine ", "--engine ", 1))
}

impl DeviceKind {
    /// Refuses a device that this program was built without.
    fn check_built(self) -> Result<(), InputError> {
        let (name, built) = match self {
            DeviceKind::Flex => ("flex", true),
            DeviceKind::Wgpu => ("wgpu", cfg!(feature = "wgpu")),
            DeviceKind::Cuda => ("cuda", cfg!(feature = "cuda")),
        };
        if built {
            return Ok(());
        }
        refuse(format!(
            "--device {name}: this program was built without it; build it with --features {name}, or use --device flex"
        ))
    }
}
