//! What ranks tell each other between items.

use burn_sp_comm::{Buffer, Collective, CommError, Communicator, Parts, Site, Transfer, raise};

/// What every rank says, by rank. Collective.
pub(super) fn everyones<const N: usize>(own: [u64; N], world: &dyn Communicator, site: Site) -> Vec<[u64; N]> {
    if world.size() == 1 {
        return vec![own];
    }
    let op = Collective::AllGather {
        dim: 0,
        parts: Parts::contiguous(N * world.size(), world.size()),
    };
    let all = run(op, Buffer::from_slice(&own, [N]), world, site).to_vec::<u64>();
    let (ranks, _) = all.as_chunks::<N>();
    ranks.to_vec()
}

/// Whether any rank says so. Collective.
pub(super) fn anyone(own: bool, world: &dyn Communicator, site: Site) -> bool {
    everyones([u64::from(own)], world, site).contains(&[1])
}

/// The words of a rank, which that rank gives. Collective.
pub(super) fn words_of(rank: usize, own: Option<String>, world: &dyn Communicator, site: Site) -> String {
    let own = own.map_or_else(Buffer::empty, |words| {
        Buffer::from_slice(words.as_bytes(), [words.len()])
    });
    let words = run(Collective::Broadcast { root: rank }, own, world, site).to_vec::<u8>();
    String::from_utf8_lossy(&words).into_owned()
}

/// Fails the run, with the same words on every rank, if ranks were given different numbers of these names. Collective.
pub(super) fn alike<const N: usize>(given: [(&str, f64); N], world: &dyn Communicator, site: Site) {
    let all = everyones(given.map(|(_, number)| number.to_bits()), world, site);
    let Some(rank) = all.iter().position(|other| *other != all[0]) else {
        return;
    };
    let different = (0..N).filter(|at| all[rank][*at] != all[0][*at]).map(|at| {
        let [here, there] = [0, rank].map(|rank| f64::from_bits(all[rank][at]));
        format!("{} is {here} on rank 0 and {there} on rank {rank}", given[at].0)
    });
    let different: Vec<_> = different.collect();
    let error = format!("the ranks were started differently: {}", different.join(", "));
    raise(CommError::failed(rank, error));
}

fn run(op: Collective, buffer: Buffer, world: &dyn Communicator, site: Site) -> Buffer {
    match world.run(vec![Transfer { op, buffer }], site) {
        Ok(mut buffers) => buffers.remove(0),
        Err(error) => raise(error),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::{LaunchConfig, SpDevice, launch, layout::MeshShape};

    #[test]
    fn what_differs_is_named() {
        let config = LaunchConfig::new(MeshShape::ulysses(3));
        let started = |other: usize, rates: [f64; 2]| {
            launch(&config, &Device::flex(), |device: SpDevice| {
                let rate = if device.rank() == other { rates[1] } else { rates[0] };
                let given = [("the first epoch", 1.0), ("the learning rate", rate)];
                alike(given, device.mesh().world().as_ref(), Site::here());
            })
        };
        assert!(started(2, [0.001; 2]).is_ok());
        assert_eq!(
            started(2, [0.001, 0.002]).unwrap_err().to_string(),
            "rank 2 failed: the ranks were started differently: the learning rate is 0.001 on rank 0 and 0.002 on rank 2"
        );
    }

    #[test]
    fn words_reach_all() {
        let config = LaunchConfig::new(MeshShape::ulysses(3));
        let heard = launch(&config, &Device::flex(), |device: SpDevice| {
            let own = (device.rank() == 1).then(|| "not enough: \u{2192}".to_owned());
            words_of(1, own, device.mesh().world().as_ref(), Site::here())
        });
        assert_eq!(heard.unwrap(), ["not enough: \u{2192}"; 3]);
    }
}
