//! What ranks tell each other beside tensors, wherever they run.

use burn_sp::comm::{Buffer, CommError, Communicator, Parts, raise};
use serde::{Serialize, de::DeserializeOwned};

/// What every rank of the group has to say, by rank. All ranks call it.
///
/// Floats arrive as the nearest to what was sent, not always as the same bits.
pub(crate) fn everyones<T: Serialize + DeserializeOwned>(own: &T, group: &dyn Communicator) -> Vec<T> {
    let text = serde_json::to_vec(own).unwrap_or_else(|error| raise(CommError::failed(group.rank(), error)));
    let gather = |own: Buffer, parts: &Parts| group.all_gather(own, 0, parts).unwrap_or_else(|error| raise(error));
    let length = Buffer::from_slice(&[text.len() as u64], [1]);
    let lengths = gather(length, &Parts::contiguous(group.size(), group.size())).to_vec::<u64>();
    let mut start = 0;
    let ranges: Vec<_> = lengths
        .into_iter()
        .map(|length| {
            start += length as usize;
            vec![start - length as usize..start]
        })
        .collect();
    let parts = Parts::new(ranges);
    let bytes = text.len();
    let all = gather(Buffer::from_slice(&text, [bytes]), &parts).to_vec::<u8>();
    let read = |rank: usize| {
        serde_json::from_slice(&all[parts.of(rank)[0].clone()])
            .unwrap_or_else(|error| raise(CommError::failed(group.rank(), error)))
    };
    (0..group.size()).map(read).collect()
}

/// Fails the run, with the same words on every rank, if ranks were started with different configurations, or found
/// different data under the same names.
pub(crate) fn agree(config: &serde_json::Value, data: &str, group: &dyn Communicator) {
    let mut own = config.clone();
    own["data"] = data.into();
    // Equal text, or the same text would not be read from it.
    let configs: Vec<serde_json::Value> = everyones(&own, group);
    let differs = |rank: &usize| configs[*rank] != configs[0];
    let Some(other) = (1..configs.len()).find(differs) else {
        return;
    };
    let fields = configs[0].as_object().into_iter().flatten();
    let different: Vec<String> = fields
        .filter(|(name, value)| configs[other].get(name.as_str()) != Some(value))
        .map(|(name, value)| {
            let theirs = configs[other].get(name).map_or("nothing".into(), ToString::to_string);
            format!("{name} is {value} on rank 0 and {theirs} on rank {other}")
        })
        .collect();
    let different = match different.is_empty() {
        true => format!("rank {other} has fields that rank 0 has not"),
        false => different.join(", "),
    };
    raise(CommError::failed(
        other,
        format!("the ranks were started with different configurations: {different}"),
    ));
}
