//! Whether a ring hop hides behind compute: forward and backward of ring attention on 4 ranks whose shifts take half as long
//! as attention to one block, against shifts that take no time.
//!
//! Of the 9 shifts of a rank (3 forward; 3 of keys and values and 3 of their gradients backward) only the last, which
//! brings the gradients home, has nothing to hide behind. `cargo bench --workspace --bench overlap` measures both in
//! turn and prints which share of the time on the links was hidden; at least 0.8 is the aim. (With more ranks than cores
//! even the last may hide: behind what other ranks compute.)

use std::hint::black_box;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Distribution, Tensor};
use burn_sp::attention::{AttentionOptions, Mask, attention};
use burn_sp::comm::engines::threads::{ThreadsConfig, launch};
use burn_sp::comm::{Buffer, Collective, CommError, Communicator, Counter, Pending, Site, Transfer};
use burn_sp::layout::{Mesh, MeshShape};
use burn_sp::{SpDevice, SpTensor};
use criterion::Criterion;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const RANKS: usize = 4;
const SHAPE: [usize; 4] = [1, 4096, 8, 64];

/// A communicator whose shifts arrive a while after they were sent, as over a link.
#[derive(Debug)]
struct Link {
    inner: Arc<dyn Communicator>,
    time: Duration,
}

struct OnTheWay {
    inner: Box<dyn Pending>,
    arrival: Instant,
}

impl Pending for OnTheWay {
    fn wait(self: Box<Self>) -> Result<Vec<Buffer>, CommError> {
        let buffers = self.inner.wait()?;
        sleep(self.arrival.saturating_duration_since(Instant::now()));
        Ok(buffers)
    }
}

impl Communicator for Link {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> &[usize] {
        self.inner.ranks()
    }

    fn axis(&self) -> &str {
        self.inner.axis()
    }

    fn start(&self, transfers: Vec<Transfer>, site: Site) -> Result<Box<dyn Pending>, CommError> {
        let shift = matches!(transfers[0].op, Collective::Shift { .. });
        let inner = self.inner.start(transfers, site)?;
        let arrival = Instant::now() + if shift { self.time } else { Duration::ZERO };
        Ok(Box::new(OnTheWay { inner, arrival }))
    }

    fn subgroup(&self, ranks: &[usize], axis: &str) -> Result<Arc<dyn Communicator>, CommError> {
        let inner = self.inner.subgroup(ranks, axis)?;
        Ok(Arc::new(Link { inner, time: self.time }))
    }

    fn statistics(&self) -> Vec<Counter> {
        self.inner.statistics()
    }

    fn reset_statistics(&self) {
        self.inner.reset_statistics();
    }

    fn abort(&self, error: CommError) {
        self.inner.abort(error);
    }
}

/// The seconds of forward and backward, each rank's slowest, over links of this speed.
fn run(time: Duration) -> f64 {
    let config = ThreadsConfig {
        ranks: RANKS,
        ..ThreadsConfig::default()
    };
    let seconds = launch(&config, |world| {
        let world: Arc<dyn Communicator> = Arc::new(Link { inner: world, time });
        let mesh = Mesh::new(MeshShape::ring(RANKS), world).expect("the mesh fits the ranks");
        let device = SpDevice::new(Device::flex().autodiff(), Arc::new(mesh));
        let layout = device.sequence_layout(SHAPE);
        let local: [usize; 4] = layout.local_shape(device.mesh()).try_into().expect("four dimensions");
        let leaf = || Tensor::<4>::random(local, Distribution::Default, device.device()).require_grad();
        let leaves = [leaf(), leaf(), leaf()];
        let options = AttentionOptions {
            mask: Mask::Full,
            ..AttentionOptions::default()
        };
        device
            .mesh()
            .world()
            .run(barrier(), Site::here())
            .expect("all ranks start together");
        let start = Instant::now();
        let [q, k, v] = leaves.map(|leaf| SpTensor::from_local(leaf, layout.clone(), &device));
        let out = attention(q, k, v, &options);
        black_box(out.local().clone().sum().backward());
        start.elapsed().as_secs_f64()
    });
    seconds.expect("no rank fails").into_iter().fold(0.0, f64::max)
}

fn barrier() -> Vec<Transfer> {
    vec![Transfer {
        op: Collective::Barrier,
        buffer: Buffer::from_slice(&[0.0f32], [1]),
    }]
}

fn main() {
    run(Duration::ZERO);
    // Forward and backward to all blocks are about 3 times forward, of 4 blocks; backward's blocks take twice as long.
    let block = run(Duration::ZERO) / 12.0;
    let link = Duration::from_secs_f64(0.5 * block);
    let mut seconds: [Vec<f64>; 2] = Default::default();
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(1))
        .measurement_time(Duration::from_secs(10))
        .configure_from_args();
    for (name, which) in [("ring/links take no time", 0), ("ring/links take half a block", 1)] {
        criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let turn = |_| {
                    let times = [run(Duration::ZERO), run(link)];
                    (0..2).for_each(|index| seconds[index].push(times[index]));
                    Duration::from_secs_f64(times[which])
                };
                (0..iterations).map(turn).sum()
            });
        });
    }
    let [free, linked] = seconds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    });
    if let (Some(free), Some(linked)) = (free, linked) {
        let shifts = 3 * (RANKS - 1);
        let on_links = shifts as f64 * link.as_secs_f64();
        println!(
            "medians: {:.1} ms with links that take no time, {:.1} ms with {shifts} shifts of {:.1} ms; hidden share {:.2} (aim: \
             at least 0.8)",
            1e3 * free,
            1e3 * linked,
            1e3 * link.as_secs_f64(),
            1.0 - (linked - free) / on_links
        );
    }
}
