//! The longest sequence that can be trained in 1 GiB a rank: a Llama of 8 layers, 512 wide, with 8 heads, by plain Burn
//! (which keeps the scores of every head) and by burn-sp with everything on that saves memory.
//!
//! `cargo bench --workspace --bench longest` looks for Burn's by training two steps at each length, and forecasts burn-sp's
//! on one rank and on four. A step of such a length takes long on a CPU, so the forecast is checked where it is at most 24
//! times Burn's, with attention to a window of 1,024 tokens: what is held is the same. It takes about 15 minutes.

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
    SwiGlu, SwiGluConfig,
};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor, module::attention, ops::AttentionModuleOptions};
use burn_sp_examples::flags;
use burn_sp_examples::memory::{self, Tracking};
use burn_sp_examples::plan::{PlanFlags, forecast, ways};
use burn_sp_examples::progress::Progress;
use burn_sp_examples::text::Text;
use burn_sp_examples::train::train;
use indicatif::{HumanBytes, HumanCount};

#[global_allocator]
static ALLOCATOR: Tracking = Tracking;

const BUDGET: usize = 1 << 30;
/// What forecasts are made for: they are within a tenth of what is measured.
const FORECAST: usize = BUDGET / 100 * 92;
const VOCABULARY: usize = 256;
const HIDDEN: usize = 512;
const LAYERS: usize = 8;
const HEADS: usize = 8;
const FFN: usize = 1376;

/// As a Burn user writes it.
#[derive(Module, Debug)]
struct Plain {
    embedding: Embedding,
    blocks: Vec<PlainBlock>,
    norm: RmsNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct PlainBlock {
    norm1: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm2: RmsNorm,
    gated: SwiGlu,
    down: Linear,
}

impl Plain {
    fn new(device: &Device) -> Self {
        let linear = |input, output| LinearConfig::new(input, output).with_bias(false).init(device);
        let norm = || RmsNormConfig::new(HIDDEN).init(device);
        let block = |_| PlainBlock {
            norm1: norm(),
            query: linear(HIDDEN, HIDDEN),
            key: linear(HIDDEN, HIDDEN),
            value: linear(HIDDEN, HIDDEN),
            output: linear(HIDDEN, HIDDEN),
            norm2: norm(),
            gated: SwiGluConfig::new(HIDDEN, FFN).init(device),
            down: linear(FFN, HIDDEN),
        };
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, HIDDEN).init(device),
            blocks: (0..LAYERS).map(block).collect(),
            norm: norm(),
            head: linear(HIDDEN, VOCABULARY),
        }
    }
}

impl PlainBlock {
    fn forward(&self, x: Tensor<3>, rotary: &RotaryEncoding) -> Tensor<3> {
        let y = self.norm1.forward(x.clone());
        let [batch, tokens, _] = y.dims();
        let heads = |linear: &Linear| {
            let y = linear.forward(y.clone());
            y.reshape([batch, tokens, HEADS, HIDDEN / HEADS]).swap_dims(1, 2)
        };
        let (q, k, v) = (
            rotary.forward(heads(&self.query)),
            rotary.forward(heads(&self.key)),
            heads(&self.value),
        );
        let options = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        let attended = attention(q, k, v, None, None, options).swap_dims(1, 2);
        let x = x + self.output.forward(attended.reshape([batch, tokens, HIDDEN]));
        let y = self.norm2.forward(x.clone());
        x + self.down.forward(self.gated.forward(y))
    }
}

/// The most bytes that plain Burn holds in two steps.
fn plain(text: &Text, tokens: usize) -> usize {
    let account = memory::enter(0);
    account.reset_peak();
    let before = account.live();
    let device = Device::flex().autodiff();
    let mut model = Plain::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let rotary = RotaryEncodingConfig::new(tokens, HIDDEN / HEADS).init(&device);
    for step in 0..2 {
        let windows = text.windows(7, step, 0..1, tokens, &device);
        let mut x = model.embedding.forward(windows.clone().narrow(1, 0, tokens));
        for block in &model.blocks {
            x = block.forward(x, &rotary);
        }
        let logits = model.head.forward(model.norm.forward(x)).reshape([tokens, VOCABULARY]);
        let labels = windows.narrow(1, 1, tokens).reshape([tokens]);
        let loss = CrossEntropyLossConfig::new().init(&device).forward(logits, labels);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, grads);
    }
    account.peak() - before
}

/// The longest for which `bytes` stays within the budget, to 16 tokens, and its bytes.
fn longest(bytes: impl Fn(usize) -> usize) -> (usize, usize) {
    let (mut low, mut high) = ((0, 0), 256);
    loop {
        let held = bytes(high);
        if held > BUDGET {
            break;
        }
        (low, high) = ((high, held), 2 * high);
    }
    while high - low.0 > 16 {
        let middle = low.0.midpoint(high);
        let held = bytes(middle);
        if held > BUDGET {
            high = middle;
        } else {
            low = (middle, held);
        }
    }
    low
}

/// The longest on so many ranks, as forecast; and how far the forecast is off at `checked` tokens, if it is so long.
fn ours(ranks: usize, checked: usize) -> usize {
    let line = format!(
        "plan --ranks {ranks} --hidden {HIDDEN} --layers {LAYERS} --heads {HEADS} --batch 1 --seq-len 4096 --steps 2 \
         --window 1024 --timeout 600 --memory {FORECAST}B"
    );
    let flags: PlanFlags = flags::parse(line.split_whitespace().map(Into::into)).expect("flags");
    let ways = ways(&flags).expect("there are ways");
    let best = ways.into_iter().max_by_key(|way| way.longest).expect("there are ways");
    let longest = best.longest.expect("memory is limited");
    let mut config = best.config;
    config.run.seq_len = longest.min(checked);
    config.validate = false;
    let report = train(&config, &Progress::quiet()).expect("two steps");
    let held = report.memory.peak_bytes_per_rank.iter().max().copied().unwrap_or(0);
    println!(
        "{}, recompute {:?}, shared {:?}, {} tiles: at {} tokens {} are forecast, {} were held",
        config.run.mesh(),
        config.learning.recompute,
        config.learning.shard,
        config.learning.mlp_tiles,
        HumanCount(config.run.seq_len as u64),
        HumanBytes(forecast(&config).total()),
        HumanBytes(held)
    );
    longest
}

fn main() {
    let text = Text::read(None).expect("the workspace has text");
    memory::unranked_work_for(Some(0));
    let (burn, held) = longest(|tokens| plain(&text, tokens));
    println!(
        "plain Burn: {} tokens, {} held",
        HumanCount(burn as u64),
        HumanBytes(held as u64)
    );
    for ranks in [1, 4] {
        let tokens = ours(ranks, 24 * burn);
        println!(
            "burn-sp, ranks {ranks}: {} tokens, {:.1} times Burn's",
            HumanCount(tokens as u64),
            tokens as f64 / burn as f64
        );
    }
}
