//! What sharding costs where there is nothing to shard: a training step (forward and backward) of the default model on
//! one rank, against the same model written with plain Burn modules and the same fused kernels.
//!
//! `cargo bench --workspace --bench step` measures both in turn and prints their ratio; at most 1.03 is the aim.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::{Embedding, Linear};
use burn::tensor::{Device, Int, Tensor};
use burn_sp::kernels::{self, AttentionSpec, HeadMap, Mask, Positions, RotaryStyle};
use burn_sp::layout::MeshShape;
use burn_sp::{LaunchConfig, SpDevice, launch};
use burn_sp_examples::text::Text;
use burn_sp_models::transformer::{ForwardOptions, Norm, Transformer, TransformerConfig, tokens_and_labels};
use criterion::Criterion;

// Fresh pages from the system cost several times the copy of their bytes; this allocator keeps its pages.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TOKENS: usize = 2048;
const HEADS: usize = 8;
const HEAD_DIM: usize = 32;

/// The same weights without burn-sp.
#[derive(Module, Debug)]
struct Plain {
    embedding: Embedding,
    blocks: Vec<PlainBlock>,
    norm: PlainNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct PlainNorm {
    gamma: burn::module::Param<Tensor<1>>,
    epsilon: f64,
}

#[derive(Module, Debug)]
struct PlainBlock {
    norm1: PlainNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm2: PlainNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl PlainNorm {
    fn from(norm: &Norm) -> Self {
        match norm {
            Norm::Rms(norm) => Self {
                gamma: norm.gamma.clone(),
                epsilon: norm.epsilon,
            },
            Norm::Layer(_) => unreachable!("the model has Llama's shape"),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        kernels::rms_norm(x, self.gamma.val(), self.epsilon)
    }
}

impl PlainBlock {
    fn forward(&self, x: Tensor<3>, cos: &Tensor<2>, sin: &Tensor<2>) -> Tensor<3> {
        let y = self.norm1.forward(x.clone());
        let [batch, tokens, hidden] = y.dims();
        let heads = |linear: &Linear| linear.forward(y.clone()).reshape([batch, tokens, HEADS, HEAD_DIM]);
        let turned = |x| kernels::rotary(x, cos.clone(), sin.clone(), RotaryStyle::Halves);
        let spec = AttentionSpec {
            mask: Mask::Causal,
            q_positions: Positions::whole(tokens),
            k_positions: Positions::whole(tokens),
            scale: 1.0 / (HEAD_DIM as f64).sqrt(),
            heads: HeadMap::new(HEADS, HEADS),
            dropout: None,
            wide: false,
        };
        let (q, k, v) = (turned(heads(&self.query)), turned(heads(&self.key)), heads(&self.value));
        let (attended, _) = kernels::attention(q, k, v, spec);
        let x = x + self.output.forward(attended.reshape([batch, tokens, hidden]));
        let y = self.norm2.forward(x.clone());
        x + self
            .down
            .forward(kernels::swiglu(self.gate.forward(y.clone()), self.up.forward(y)))
    }
}

impl Plain {
    /// A fork of the weights, so that the two graphs have nothing in common.
    fn from(model: &Transformer, device: &Device) -> Self {
        let block = |block: &burn_sp_models::transformer::Block| PlainBlock {
            norm1: PlainNorm::from(&block.norm1),
            query: block.attention.query.clone(),
            key: block.attention.key.clone(),
            value: block.attention.value.clone(),
            output: block.attention.output.clone(),
            norm2: PlainNorm::from(&block.norm2),
            gate: block.mlp.gate.clone().expect("Llama has a gate"),
            up: block.mlp.up.clone(),
            down: block.mlp.down.clone(),
        };
        Self {
            embedding: model.embedding.clone(),
            blocks: model.blocks.iter().map(block).collect(),
            norm: PlainNorm::from(&model.norm),
            head: model.head.clone().expect("Llama has an output layer"),
        }
        .fork(device)
    }

    fn loss(
        &self,
        tokens: Tensor<2, Int>,
        labels: Tensor<2, Int>,
        tables: &(Tensor<2>, Tensor<2>),
        loss: &CrossEntropyLoss,
    ) -> Tensor<1> {
        let mut x = self.embedding.forward(tokens);
        for block in &self.blocks {
            x = block.forward(x, &tables.0, &tables.1);
        }
        let logits = self.head.forward(self.norm.forward(x));
        let [batch, tokens, classes] = logits.dims();
        loss.forward(
            logits.reshape([batch * tokens, classes]),
            labels.reshape([batch * tokens]),
        )
    }
}

/// Cosines and sines, made once, as Burn's own rotary encoding does.
fn tables(device: &Device) -> (Tensor<2>, Tensor<2>) {
    let pairs = HEAD_DIM / 2;
    let angle = |index: usize| {
        let (token, pair) = (index / pairs, index % pairs);
        (token as f64 * 10000f64.powf(-2.0 * pair as f64 / HEAD_DIM as f64)) as f32
    };
    let angles: Vec<f32> = (0..TOKENS * pairs).map(angle).collect();
    let table = |f: fn(f32) -> f32| {
        let values: Vec<f32> = angles.iter().map(|angle| f(*angle)).collect();
        Tensor::<1>::from_floats(values.as_slice(), device).reshape([TOKENS, pairs])
    };
    (table(f32::cos), table(f32::sin))
}

fn bench(device: SpDevice) {
    let plain_device = device.device();
    let model = device.seeded(7, |device| {
        TransformerConfig::llama(256, HEADS * HEAD_DIM, 4, HEADS, 688).init(device)
    });
    let plain = Plain::from(&model, plain_device);
    let (tables, cross_entropy) = (tables(plain_device), CrossEntropyLossConfig::new().init(plain_device));
    let text = Text::read(None).expect("the workspace has text");
    let windows = text.windows(7, 0, 0..1, TOKENS, plain_device);
    let (tokens, labels) = tokens_and_labels(windows.clone(), &device);
    let own_tokens = windows.clone().narrow(1, 0, TOKENS);
    let own_labels = windows.narrow(1, 1, TOKENS);

    let sharded_step = || {
        let loss = model.loss(tokens.clone(), &labels, TOKENS as u64, &ForwardOptions::default());
        black_box(loss.backward());
        loss.value()
    };
    let plain_step = || {
        let loss = plain.loss(own_tokens.clone(), own_labels.clone(), &tables, &cross_entropy);
        black_box(loss.backward());
        f64::from(loss.into_scalar::<f32>())
    };
    // The same work: the same loss.
    let (ours, theirs) = (sharded_step(), plain_step());
    assert!((ours - theirs).abs() < 1e-4, "losses {ours} and {theirs}");

    // Each turn runs both, the other one second, so that both meet the machine in the same state.
    let mut seconds: [Vec<f64>; 2] = Default::default();
    let mut turn = |which: usize| {
        let mut times = [Duration::ZERO; 2];
        for index in [which, 1 - which] {
            let start = Instant::now();
            black_box(if index == 0 { sharded_step() } else { plain_step() });
            times[index] = start.elapsed();
            seconds[index].push(times[index].as_secs_f64());
        }
        times[which]
    };
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_secs(2))
        .measurement_time(Duration::from_secs(20))
        .configure_from_args();
    for (which, name) in ["step/burn-sp", "step/plain"].into_iter().enumerate() {
        criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| (0..iterations).map(|_| turn(which)).sum());
        });
    }
    let [ours, theirs] = seconds.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    });
    if let (Some(ours), Some(theirs)) = (ours, theirs) {
        println!(
            "medians: burn-sp {:.1} ms, plain Burn {:.1} ms, ratio {:.3} (aim: at most 1.03); {:.0} tokens/s",
            1e3 * ours,
            1e3 * theirs,
            ours / theirs,
            TOKENS as f64 / ours
        );
    }
}

fn main() {
    let config = LaunchConfig::new(MeshShape::default());
    if let Err(error) = launch(&config, &Device::flex().autodiff(), bench) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}
