use std::iter;

/// The label of a token that has none; the loss passes it over.
pub const IGNORED: i64 = -100;

/// A sequence of a fixed length into which documents are packed one after another.
///
/// Attention and labels end where a document ends: with [`documents`](Self::documents) for
/// [`Mask::documents`](crate::attention::Mask::documents) no token sees another document, and the last token of each has no
/// label. A document that is longer than what is left of a sequence goes on in the next one: its last token here has the
/// first one there as its label, but tokens there see none of those here.
///
/// If tokens run out before the sequence is full, the rest is filled with token 0, a document of its own without labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSequence {
    /// As long as the sequence.
    pub tokens: Vec<u32>,
    /// Each token's successor in its document, or [`IGNORED`].
    pub labels: Vec<i64>,
    /// How many tokens each document has in this sequence; together all of them.
    pub documents: Vec<usize>,
}

impl PackedSequence {
    /// From the tokens of a sequence (fewer than `len` if they run out), the token after them if there is one, and after how
    /// many tokens documents end.
    ///
    /// # Panics
    /// If there are more tokens than `len`, or the ends descend or lie beyond the tokens.
    pub fn new(tokens: &[u32], next: Option<u32>, ends: &[usize], len: usize) -> Self {
        let held = tokens.len();
        assert!(held <= len, "packing: {held} tokens in a sequence of {len}");
        let successors = tokens.iter().copied().skip(1).map(Some).chain([next]);
        let mut labels: Vec<i64> = successors.map(|label| label.map_or(IGNORED, i64::from)).collect();
        labels.truncate(held);
        let mut documents = Vec::new();
        let mut start = 0;
        for end in ends.iter().copied().chain([held, len]) {
            assert!(
                start <= end && end <= len,
                "packing: ends {ends:?} of documents in {held} tokens"
            );
            if end > start {
                documents.push(end - start);
            }
            start = end;
        }
        for end in ends.iter().filter(|end| **end > 0) {
            labels[end - 1] = IGNORED;
        }
        let mut tokens = tokens.to_vec();
        tokens.resize(len, 0);
        labels.resize(len, IGNORED);
        Self {
            tokens,
            labels,
            documents,
        }
    }

    /// A sequence without labels, for a replica that has no sample where others have one: every rank has to take part.
    ///
    /// A step in which no sequence has a label has the loss 0 and no gradients, but an optimizer that decays weights, as
    /// AdamW does, decays them all the same.
    pub fn ignored(len: usize) -> Self {
        Self::new(&[], None, &[], len)
    }
}

/// Packs documents in memory into sequences of `len` tokens, in their order; only the last sequence may need filling up.
///
/// # Panics
/// If `len` is 0.
pub fn pack(documents: impl IntoIterator<Item = impl AsRef<[u32]>>, len: usize) -> Vec<PackedSequence> {
    assert!(len > 0, "packing: sequences of 0 tokens hold no documents");
    let (mut tokens, mut ends) = (Vec::new(), Vec::new());
    for document in documents {
        tokens.extend_from_slice(document.as_ref());
        ends.push(tokens.len());
    }
    let sequence = |start: usize| {
        let end = (start + len).min(tokens.len());
        // They ascend.
        let [first, last] = [start, end].map(|place| ends.partition_point(|at| *at <= place));
        let ends: Vec<usize> = ends[first..last].iter().map(|at| at - start).collect();
        PackedSequence::new(&tokens[start..end], tokens.get(end).copied(), &ends, len)
    };
    iter::successors(Some(0), |start| Some(start + len))
        .take_while(|start| *start < tokens.len())
        .map(sequence)
        .collect()
}
