//! What fits, and what to choose: forecasts for every way to run a configuration.

mod block;
mod check;
mod flags;
mod memory;
mod table;
mod traffic;
mod walk;

pub use check::{Checked, check, check_table};
pub use flags::{PlanFlags, Rates};
pub use table::{plan_table, recommendation};
pub use walk::Bytes;

use burn_sp::layout::MeshShape;
use serde::{Deserialize, Serialize};

use crate::InputError;
use crate::config::TrainConfig;
use crate::flags::{LearningFlags, Recompute, Shard, TrainFlags};
use memory::Step;

/// One way to run a configuration, and what it will take.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Way {
    /// The whole configuration.
    pub config: TrainConfig,
    /// Bytes of the rank that holds most, when it holds most.
    pub memory: Bytes,
    /// Bytes that a rank sends in a step.
    pub bytes_sent: u64,
    /// Of a step: computing and sending, one after the other.
    pub seconds: f64,
    /// The longest sequence that fits; none if memory is not limited, 0 if no sequence does.
    pub longest: Option<usize>,
    /// Whether the sequence of the configuration fits.
    pub fits: bool,
}

/// What a configuration will hold, in bytes of the rank that holds most.
pub fn forecast(config: &TrainConfig) -> Bytes {
    Step::new(config).forecast()
}

impl Way {
    fn new(config: TrainConfig, budget: Option<u64>, rates: Rates) -> Self {
        let step = Step::new(&config);
        let (memory, bytes_sent) = (step.forecast(), step.bytes_sent());
        Self {
            memory,
            bytes_sent,
            seconds: step.flop() / rates.flops + bytes_sent as f64 / rates.bandwidth,
            longest: budget.map(|budget| longest(&config, budget)),
            fits: budget.is_none_or(|budget| memory.total() <= budget),
            config,
        }
    }

    /// The mesh.
    pub fn mesh(&self) -> MeshShape {
        self.config.run.mesh()
    }
}

/// The longest sequence that fits, to 1 %.
fn longest(config: &TrainConfig, budget: u64) -> usize {
    let fits = |seq_len: usize| {
        let mut config = config.clone();
        config.run.seq_len = seq_len;
        forecast(&config).total() <= budget
    };
    let ranks = config.run.mesh().with_dp(1).ranks();
    let (mut low, mut high) = (0, ranks);
    while high < crate::config::MAX_TOKENS && fits(high) {
        (low, high) = (high, 2 * high);
    }
    while high - low > (low / 128).max(1) {
        let middle = low.midpoint(high);
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

/// Every way to run what the flags leave open, the fastest that fits first; then those that do not fit, the one that takes
/// the longest sequence first.
///
/// # Errors
/// One line, if no way can work.
pub fn ways(flags: &PlanFlags) -> Result<Vec<Way>, InputError> {
    let (budget, rates) = (flags.budget()?, flags.rates()?);
    let mut refused = None;
    let mut ways = Vec::new();
    for mesh in meshes(&flags.train)? {
        for recompute in all_or(flags.train.learning.recompute, &RECOMPUTE) {
            for shard in all_or(flags.train.learning.shard, &SHARD) {
                for tiles in all_or(flags.train.learning.mlp_tiles, &TILES) {
                    let way = TrainFlags {
                        run: flags.train.run.clone().with_mesh(mesh),
                        learning: LearningFlags {
                            recompute: Some(recompute),
                            shard: Some(shard),
                            mlp_tiles: Some(tiles),
                            ..flags.train.learning.clone()
                        },
                        ..flags.train.clone()
                    };
                    match way.resolve() {
                        // One rank has none to share with.
                        Ok(config)
                            if shard != Shard::None
                                && flags.train.learning.shard.is_none()
                                && Step::new(&config).replicas() == 1 => {}
                        Ok(config) => ways.push(Way::new(config, budget, rates)),
                        Err(error) => refused = Some(error),
                    }
                }
            }
        }
    }
    if let (true, Some(error)) = (ways.is_empty(), refused) {
        return Err(error);
    }
    ways.sort_by(|a, b| {
        let by_length = || b.longest.cmp(&a.longest);
        let by_time = || a.seconds.total_cmp(&b.seconds);
        let by_memory = || a.memory.total().cmp(&b.memory.total());
        match (a.fits, b.fits) {
            (true, true) => by_time().then_with(by_memory),
            (false, false) => by_length().then_with(by_time),
            _ => b.fits.cmp(&a.fits),
        }
    });
    Ok(ways)
}

const RECOMPUTE: [Recompute; 4] = [
    Recompute::None,
    Recompute::Attention,
    Recompute::AllButAttention,
    Recompute::Blocks,
];
const SHARD: [Shard; 3] = [Shard::None, Shard::Optimizer, Shard::Parameters];
const TILES: [usize; 2] = [1, 8];

fn all_or<T: Copy>(given: Option<T>, all: &[T]) -> Vec<T> {
    given.map_or_else(|| all.to_vec(), |given| vec![given])
}

/// Every mesh of as many ranks; the one that is given, if an axis is.
fn meshes(flags: &TrainFlags) -> Result<Vec<MeshShape>, InputError> {
    // Refuses what no mesh can make work.
    let run = flags.resolve()?.run;
    if flags.run.mesh()?.is_some() {
        return Ok(vec![run.mesh()]);
    }
    let ranks = run.ranks;
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut meshes = Vec::new();
    for dp in divisors(ranks) {
        for ring in divisors(ranks / dp) {
            for ulysses in divisors(ranks / dp / ring) {
                let tp = ranks / dp / ring / ulysses;
                meshes.push(MeshShape { dp, ring, ulysses, tp });
            }
        }
    }
    Ok(meshes)
}
