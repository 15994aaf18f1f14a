/// An edit to a right sharded step, as people make it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// None either: the closure sums the gradients and takes an optimizer's step.
    OwnStep,
    /// Each rank differentiates the loss of all.
    LossOnAllRanks,
    GradientsAveraged,
    GradientsNotSummed,
    GradientsSummedTwice,
    /// Each rank divides by its own count, and the shares are added.
    MeanOfMeans,
    /// Each rank differentiates its own mean, and the gradients are averaged.
    MeansAveraged,
    /// Each rank reports its own share.
    LossNotSummed,
    /// As `MeansAveraged`, in plain tensors: the mean over no labels is 0/0.
    PlainMeans,
    /// The gradients of the last norm stay on their tp rank.
    NormNotSummedOverTp,
    LabelsShiftedLocally,
    /// A position embedding, or a rotary table, that starts anew on each rank.
    LocalPositions,
    LocalAttention,
    /// The keys are gathered; the mask compares their positions with those in the rank's own slice.
    LocalMask,
    /// Another slice of the tokens than the layout says.
    WrongSlices,
    /// Key/value heads a, b for four query heads as a, b, a, b.
    TiledHeads,
    BiasOnEveryRank,
    /// The row-parallel product stays a term.
    ProductNotSummed,
    LocalDropout,
    /// One rank starts with another head.
    OtherHead,
    /// The optimizer's rate depends on the rank.
    OtherRates,
    /// Of no known kind, from here on: one rank's layer is 1.001 times the right one.
    ScaledOnOneRank,
    /// Some elements of one rank are no numbers.
    NotANumber,
    /// Parts of attention are added without their weights.
    WrongMerge,
    /// Another activation function on later ranks.
    OtherActivation,
    /// The embedding's negative elements are lost on later ranks.
    Clipped,
}
