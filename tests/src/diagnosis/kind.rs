use std::fmt;

/// A kind of fault that sharded training steps have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Loss or gradients are a number of ranks times too large or too small.
    Scale,
    /// A sum over ranks is missing: each has its own term of what should be the sum.
    MissingSum,
    /// Ranks weigh their tokens differently: a mean of means where counts differ.
    LossWeights,
    /// Labels were shifted after the sequence was cut, so the label of a slice's last token is lost or wrong.
    LocalLabels,
    /// Positions count from the start of a rank's slice.
    LocalPositions,
    /// Tokens do not see those of some other ranks: of all, or of one, as when a hop of a ring is lost.
    LocalTokens,
    /// The mask compares positions of different kinds: tokens see others than on one rank.
    LocalMask,
    /// The right numbers are at the wrong places.
    Layout,
    /// A bias is added once a rank.
    RepeatedBias,
    /// Random numbers depend on the rank or on the run: of dropout, say.
    Random,
    /// Ranks start with other parameters than the unsharded module.
    OtherParameters,
    /// Ranks have other parameters after the step though their gradients are right.
    Diverging,
    /// A parameter has no gradient, or zeros.
    MissingGradient,
    /// In f64 all is right: what differs is rounding, or a backend.
    Rounding,
    /// None of these.
    Unknown,
}

impl FaultKind {
    /// How to mend it.
    pub fn advice(self) -> &'static str {
        match self {
            FaultKind::Scale => {
                "use a LossShare (each rank differentiates its own terms, divided by the global count) and sum gradients once, with \
                 sum_gradients: no mean, no second sum, no loss that every rank computes alike and differentiates"
            }
            FaultKind::MissingSum => {
                "redistribute what is partial; sum each gradient with sum_gradients over every axis on which its parameter is \
                 replicated, tp included; report LossShare::value, which is the sum of all shares"
            }
            FaultKind::LossWeights => "divide every rank's sum by the global count (valid_tokens), not by its own",
            FaultKind::LocalLabels => {
                "shift the labels of the whole batch before it is distributed (next_token_labels, tokens_and_labels)"
            }
            FaultKind::LocalPositions => {
                "take positions from SpTensor::positions, which are global, wherever a rotary table or a position embedding is made"
            }
            FaultKind::LocalTokens => {
                "let tokens meet: call burn_sp::attention::attention on the SpTensors, or redistribute before whatever mixes tokens"
            }
            FaultKind::LocalMask => {
                "give the mask to burn_sp::attention::attention, which applies it to global positions; a mask of your own must compare \
                 global positions of queries with global positions of keys"
            }
            FaultKind::Layout => {
                "compare the layout that is claimed (SpTensor::from_local, ParamLayouts) with the slice that is taken; let distribute and \
                 redistribute do both; repeat key/value heads, do not tile them"
            }
            FaultKind::RepeatedBias => {
                "add the bias after the sum over ranks, once, as row_linear does; Linear::forward on a shard of rows adds it on every rank"
            }
            FaultKind::Random => {
                "use burn_sp::nn::Dropout with a DropoutKey: its mask depends on seed, step, layer and global position only"
            }
            FaultKind::OtherParameters => {
                "give every rank the same module: launch_module, or SpDevice::seeded with one seed; shard it from the whole"
            }
            FaultKind::Diverging => {
                "let every rank decide the update alike: clip_by_global_norm, one learning rate, the same optimizer state"
            }
            FaultKind::MissingGradient => {
                "look for a detach, a value read back into a new tensor, or gradients that are not taken from this module's graph"
            }
            FaultKind::Rounding => {
                "keep sums over ranks and tokens in f32 (partial outputs, log-sum-exp, norms), and round once, after the last; if the \
                 device is not Flex, compare on Flex too"
            }
            FaultKind::Unknown => "record more outputs, in order, to see which layer is the first to differ",
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FaultKind::Scale => "scale by a number of ranks",
            FaultKind::MissingSum => "a missing sum over ranks",
            FaultKind::LossWeights => "tokens weighed differently by rank",
            FaultKind::LocalLabels => "labels shifted inside each slice",
            FaultKind::LocalPositions => "local positions",
            FaultKind::LocalTokens => "tokens of other ranks that are not seen",
            FaultKind::LocalMask => "a mask over local positions",
            FaultKind::Layout => "another layout than claimed",
            FaultKind::RepeatedBias => "a bias added on every rank",
            FaultKind::Random => "random numbers that depend on rank or run",
            FaultKind::OtherParameters => "other parameters",
            FaultKind::Diverging => "parameters that diverge",
            FaultKind::MissingGradient => "a missing gradient",
            FaultKind::Rounding => "more rounding than on one rank",
            FaultKind::Unknown => "none of the known faults",
        })
    }
}
