//! Burn's own training loop with ranks as processes: the program's logs are those of threads, rank 0 alone writes and talks,
//! and what ranks were given differently, or happens to one of them, is said by all.
//!
//! What the program does not let happen, processes of this very file do.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, exit};
use std::time::Duration;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::{Dataset, DatasetError};
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::Device;
use burn::train::logger::TrainingProgressLogger;
use burn::train::{Interrupter, Learner, SupervisedTraining};
use burn_sp::layout::MeshShape;
use burn_sp::learner::{SequenceParallel, SpModel, SpStep, TokenBatcher, TokenItem, TokenMetric, TokenOutput};
use burn_sp::train::{LossShare, ParamLayouts, valid_tokens};
use burn_sp::{Engine, LaunchConfig, SpDevice, seeded};
use burn_sp_models::transformer::{ForwardOptions, Transformer, TransformerConfig};

use crate::{Run, folder, text};

const LEARNER: &str = env!("CARGO_BIN_EXE_learner");
const FLAGS: &str =
    "--hidden 16 --layers 1 --heads 2 --seq-len 21 --steps 3 --batch 2 --lr 0.01 --epochs 2 --timeout 20";

fn logs(folder: &Path) -> Vec<String> {
    let of = |split: &str, epoch: usize| folder.join(split).join(format!("epoch-{epoch}")).join("Loss.log");
    let files = [of("train", 1), of("valid", 1), of("train", 2), of("valid", 2)];
    files.map(|file| fs::read_to_string(file).unwrap_or_default()).to_vec()
}

/// The program in two processes, each after these lines.
fn program(folder: &Path, flags: &str, lines: &str) -> Run {
    let lines = format!("shift; set -- {LEARNER} \"$@\"; [ $RANK = 1 ] && exec > said.1\n{lines}");
    let flags = format!("{FLAGS} --text {} {flags}", text(folder).display());
    Run::start_with(folder, 2, &flags, &lines)
}

#[test]
fn the_logs_are_those_of_threads_and_of_rank_0_alone() {
    for mesh in ["--ulysses 2", "--dp 2", "--tp 2"] {
        let folder = folder("learner");
        let own = "set -- \"$@\" --folder rank-$RANK";
        let mut run = program(&folder, mesh, own);
        run.succeeds();
        for said in [run.errors(1), fs::read_to_string(folder.join("said.1")).unwrap()] {
            assert_eq!(said, "", "{mesh}");
        }
        assert!(!folder.join("rank-1/train").exists());
        assert!(!folder.join("rank-1/experiment.log").exists());
        assert!(!folder.join("rank-1/checkpoint/model-2.bpk").exists());
        assert!(folder.join("rank-0/checkpoint/model-2.bpk").exists());

        let line = format!(
            "{FLAGS} {mesh} --text {} --folder threads",
            folder.join("text.txt").display()
        );
        let threads = Command::new(LEARNER)
            .args(line.split_whitespace())
            .current_dir(&folder)
            .output()
            .unwrap();
        assert!(threads.status.success(), "{}", String::from_utf8_lossy(&threads.stderr));
        let [processes, threads] = ["rank-0", "threads"].map(|name| logs(&folder.join(name)));
        assert!(threads.iter().all(|log| log.contains(",final")), "{threads:?}");
        assert_eq!(processes, threads, "{mesh}");
    }
}

#[test]
fn a_rank_of_the_program_with_another_rate_is_named() {
    let mut run = program(
        &folder("learner-rate"),
        "--ulysses 2",
        "[ $RANK = 1 ] && set -- \"$@\" --lr 0.02",
    );
    run.fails(
        0..2,
        &["different configurations: lr is 0.01 on rank 0 and 0.02 on rank 1"],
    );
}

/// Two processes of [`one_of_the_processes`], told this and, the second, that too.
fn processes(name: &str, both: &str, second: &str) -> Run {
    let program = env::current_exe().unwrap();
    let lines = format!(
        "export {SAID}='{both}'; [ $RANK = 1 ] && export {SAID}='{both} {second}'\n\
         set -- {} learner::one_of_the_processes --exact --ignored --nocapture",
        program.display()
    );
    Run::start_with(&folder(name), 2, "", &lines)
}

#[test]
fn what_ranks_were_given_differently_is_named() {
    for (second, words) in [
        (
            "items=4",
            "rank 1 failed: it is at the end of its data where rank 0 is at item 6; ",
        ),
        (
            "rate=0.25",
            "the ranks were started differently: the learning rate is 0.5 on rank 0 and 0.25 on rank 1",
        ),
        (
            "halved=1",
            "rank 1 failed: its learning rate is 0.25 where that of rank 0 is 0.5",
        ),
        ("epochs=3", "the last epoch is 2 on rank 0 and 3 on rank 1"),
        (
            "accumulation=3",
            "the number of steps to an update is 1 on rank 0 and 3 on rank 1",
        ),
        ("clip=0.1", "the norm to clip at is inf on rank 0 and 0.1 on rank 1"),
        (
            "checkpoints=1",
            "the number of checkpoints an epoch is 0 on rank 0 and 1 on rank 1",
        ),
    ] {
        let mut run = processes("learner-given", "", second);
        run.fails(0..2, &[words]);
    }
}

#[test]
fn data_that_one_rank_cannot_read_fail_all() {
    let mut run = processes("learner-torn", "", "torn=3");
    run.fails([1], &["Dataset error: sample 3 is torn"]);
    run.fails([0], &["rank 1 failed: Dataset error: sample 3 is torn"]);
}

#[test]
fn a_stop_that_one_rank_asks_for_is_told_to_all() {
    let mut run = processes("learner-stop", "", "stop=1");
    run.succeeds();
    assert!(
        run.errors(0).contains("interrupted: rank 1 stopped: enough\n"),
        "{}",
        run.all()
    );
    assert!(run.errors(1).contains("interrupted: enough\n"), "{}", run.all());
}

/// Also where ranks share it out. Who asked for a logger of progress gets it on rank 0.
#[test]
fn every_process_gets_the_trained_model() {
    for mesh in ["tp=1", "tp=2"] {
        let mut run = processes("learner-model", mesh, "");
        run.succeeds();
        let weights = |rank: usize| {
            let errors = run.errors(rank);
            let line = errors.lines().find(|line| line.starts_with("weights "));
            line.unwrap_or_else(|| panic!("{}", run.all())).to_owned()
        };
        assert_eq!(weights(0), weights(1));
        assert!(!weights(0).contains("untrained"));
        assert_eq!(
            [0, 1].map(|rank| run.errors(rank).matches("progress\n").count()),
            [1, 0]
        );
        // A launcher's output only looks like a terminal to draw in.
        assert!(!run.errors(0).contains("panicked"), "{}", run.all());
    }
}

/// What a process is told, in words `name=number`.
const SAID: &str = "BURN_SP_TEST_LEARNER";

#[derive(Module, Debug)]
struct Language {
    transformer: Transformer,
}

impl SpStep for Language {
    type Input = TokenItem;
    type Output = TokenOutput;

    fn step(&self, item: TokenItem, device: &SpDevice) -> (LossShare, TokenOutput) {
        let batch = item.distribute(device);
        let count = valid_tokens([&batch.labels]);
        let options = ForwardOptions::default();
        let loss = self.transformer.loss(batch.tokens, &batch.labels, count, &options);
        let output = TokenOutput::new(&loss, count);
        (loss, output)
    }

    fn shard(self, device: &SpDevice) -> (Self, ParamLayouts) {
        let (transformer, layouts) = self.transformer.shard(device);
        (Self { transformer }, layouts)
    }
}

/// Windows, of which one may be torn.
struct Windows {
    items: usize,
    torn: Option<usize>,
}

impl Dataset<Vec<u32>> for Windows {
    fn get(&self, index: usize) -> Result<Vec<u32>, DatasetError> {
        match self.torn {
            Some(torn) if torn == index => Err(DatasetError::new(std::io::Error::other(format!(
                "sample {index} is torn"
            )))),
            _ => Ok((0..9).map(|i| (i * (index as u32 + 1)) % 11).collect()),
        }
    }

    fn len(&self) -> usize {
        self.items
    }
}

struct Loud;

impl TrainingProgressLogger for Loud {
    fn start(&mut self, _epochs: usize, _first: usize, _items: Option<usize>, _label: Option<&str>) {
        eprintln!("progress");
    }
    fn update_epoch(&mut self, _epoch: usize) {}
    fn start_split(&mut self, _split: &str, _items: usize) {}
    fn update_split(&mut self, _items: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _event: String) {}
}

fn weights(model: &Language) -> Vec<u32> {
    let weights = model
        .transformer
        .embedding
        .weight
        .val()
        .into_data()
        .try_to_vec::<f32>()
        .unwrap();
    weights.into_iter().map(f32::to_bits).collect()
}

#[test]
#[ignore = "the tests above start it, as two processes"]
fn one_of_the_processes() {
    let Ok(said) = env::var(SAID) else {
        return;
    };
    // The last word counts.
    let number = |name: &str| {
        let mut words = said.split_whitespace().rev().filter_map(|word| word.split_once('='));
        let value = words.find(|(other, _)| *other == name).map(|(_, value)| value);
        value.map(|value| value.parse::<f64>().unwrap())
    };
    let whole = |name: &str| number(name).map(|number| number as usize);
    let loader = |torn| {
        let items = whole("items").unwrap_or(6);
        DataLoaderBuilder::new(TokenBatcher::rows())
            .batch_size(2)
            .build(Windows { items, torn })
    };
    let interrupter = Interrupter::new();
    let training = SupervisedTraining::new("run", loader(whole("torn")), loader(None))
        .num_epochs(whole("epochs").unwrap_or(2))
        .grads_accumulation(whole("accumulation").unwrap_or(1))
        .metrics((TokenMetric::loss(),))
        .with_interrupter(interrupter.clone())
        .with_progress_logger(Loud)
        .with_application_logger(None);
    let training = match number("checkpoints") {
        Some(_) => training.with_default_checkpointers(),
        None => training,
    };
    if number("stop").is_some() {
        interrupter.stop(Some("enough"));
    }
    let model = Language {
        transformer: seeded(&Device::flex().autodiff(), 3, |device| {
            TransformerConfig::llama(11, 16, 1, 2, 16).init(device)
        }),
    };
    let first = weights(&model);
    let model = match number("clip") {
        Some(norm) => SpModel::new(model).with_clipping(norm),
        None => SpModel::new(model),
    };
    let rate = number("rate").unwrap_or(0.5);
    // Halved after so many updates.
    let rates = StepLrSchedulerConfig::new(rate, whole("halved").unwrap_or(100)).with_gamma(0.5);
    let learner = Learner::new(model, SgdConfig::new().init(), rates.init().unwrap());
    let mesh = match whole("tp") {
        Some(2) => MeshShape::tp(2),
        _ => MeshShape::ulysses(2),
    };
    let config = LaunchConfig::new(mesh)
        .with_engine(Engine::Mpi)
        .with_timeout(Duration::from_secs(20));
    let strategy = SequenceParallel::new(config, &Device::flex()).unwrap();
    let result = strategy.lead(training).launch(learner);
    if let Some(error) = result.error {
        eprintln!("error: {error}");
        exit(1);
    }
    if let Some(stop) = result.interrupted {
        eprintln!("interrupted: {}", stop.reason.unwrap_or_default());
    }
    let last = weights(result.model.inner());
    match last == first {
        true => eprintln!("weights untrained"),
        false => eprintln!("weights {last:?}"),
    }
}
