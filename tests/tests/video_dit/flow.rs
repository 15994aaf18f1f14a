//! Noise levels and solvers.

use burn::tensor::{DType, Device, Tensor};
use burn_sp_models::video_dit::{FlowSchedule, FlowSolver, Solver};

use crate::common::{f64s, near, tensor};

#[test]
fn levels_are_warped_and_weighted() {
    let schedule = FlowSchedule::new(5.0);
    assert_eq!(schedule.levels(), 1000);
    assert_eq!((schedule.level(0), schedule.time(0)), (1.0, 1000.0));
    // 5 s / (1 + 4 s) of a half, and of the smallest level, 0.001.
    near(&[schedule.level(500)], &[2.5 / 3.0], 1e-15, "level");
    near(&[schedule.time(999)], &[5.0 / 1.004], 1e-12, "time");
    let weights: Vec<f64> = (0..1000).map(|index| schedule.weight(index)).collect();
    let mean = weights.iter().sum::<f64>() / 1000.0;
    near(&[mean], &[1.0], 1e-12, "mean weight");
    assert!(weights.iter().all(|weight| *weight >= 0.0));
    // The time furthest from 500 is 1000, which weighs nothing.
    assert_eq!(weights[0], 0.0);
    // Weights are in proportion to a bell around 500 less its least value.
    let bell = |time: f64| f64::exp(-2.0 * ((time - 500.0) / 1000.0).powi(2)) - f64::exp(-0.5);
    let ratio = bell(schedule.time(700)) / bell(schedule.time(200));
    near(&[weights[700] / weights[200]], &[ratio], 1e-9, "ratio");
    let steps = FlowSchedule::new(1.0).steps(4);
    near(&steps, &[1.0, 0.75, 0.5, 0.25, 0.0], 1e-15, "steps");
}

/// Diffusers' UniPCMultistepScheduler with flow_prediction, bh2, order 2, on a velocity that is no straight line.
#[test]
fn unipc_takes_diffusers_steps() {
    let levels = [
        0.9999989867210388,
        0.9615828394889832,
        0.9092148542404175,
        0.8336109519004822,
        0.7148972749710083,
        0.5014970302581787,
        0.0,
    ];
    let reference = [
        [1.491453622634935, -0.6284227018950632, 0.18215023411704456],
        [1.4841377596303704, -0.5314247208454632, 0.1628526282961017],
        [1.4821045763719107, -0.40053743820354487, 0.14298240586858488],
        [1.494244809012417, -0.23254720891743969, 0.12111110863218132],
        [1.5669200259312384, -0.07265411223852147, 0.10552728820309723],
        [1.824753011784793, 0.20451148238212175, 0.0733102484999616],
    ];
    let mut solver = FlowSolver::new(Solver::UniPc, levels.to_vec());
    let mut x: Tensor<1> = tensor(&[1.5, -0.7, 0.2], [3], DType::F64, &Device::flex());
    for expected in reference {
        let level = solver.level().expect("a step is left");
        let velocity = (x.clone() * 3.0).sin() + x.clone() * level - 0.3;
        x = solver.step(x, velocity);
        // Its levels are f32, and so are some factors made of them.
        near(&f64s(&x), &expected, 2e-6, "latents");
    }
    assert_eq!(solver.level(), None);
}

/// Clean latents that are normal with standard deviation 0.5: then the velocity of every latent is known, and where its path
/// leads, which keeps its distance in standard deviations.
fn error(solver: Solver, levels: Vec<f64>) -> f64 {
    let variance = |level: f64| (0.5 * (1.0 - level)).powi(2) + level.powi(2);
    let (first, last) = (levels[0], levels[levels.len() - 1]);
    let mut solver = FlowSolver::new(solver, levels);
    let mut x: Tensor<1> = tensor(&[1.0], [1], DType::F64, &Device::flex());
    while let Some(level) = solver.level() {
        let velocity = x.clone() * ((level - 0.25 * (1.0 - level)) / variance(level));
        x = solver.step(x, velocity);
    }
    (f64s(&x)[0] - (variance(last) / variance(first)).sqrt()).abs()
}

#[test]
fn solvers_are_of_their_order() {
    let inner = |steps: usize| -> Vec<f64> {
        let level = |step| 0.95 - 0.9 * step as f64 / steps as f64;
        (0..=steps).map(level).collect()
    };
    for (solver, order) in [(Solver::Euler, 1), (Solver::UniPc, 2)] {
        // Half as long steps.
        let ratio = error(solver, inner(320)) / error(solver, inner(640)) / 2f64.powi(order);
        assert!((0.9..1.1).contains(&ratio), "{solver:?}: {ratio}");
    }
    // From noise alone, at level 1, to no noise at all: where logarithms have no end.
    let whole = |solver| error(solver, FlowSchedule::new(3.0).steps(20));
    assert!(
        whole(Solver::UniPc) < 0.3 * whole(Solver::Euler),
        "{}",
        whole(Solver::UniPc)
    );
    for solver in [Solver::Euler, Solver::UniPc] {
        // In one step to where all are alike.
        assert_eq!(error(solver, vec![1.0, 0.0]), 0.5, "{solver:?}");
    }
}

#[test]
fn what_cannot_work_is_refused() {
    let message = |work: fn()| {
        let panic = std::panic::catch_unwind(work).expect_err("a panic");
        panic.downcast_ref::<String>().expect("a message").clone()
    };
    let found = message(|| drop(FlowSolver::<1>::new(Solver::Euler, vec![0.0, 1.0])));
    assert!(found.contains("descending from 1 to 0"), "{found}");
    let found = message(|| drop(FlowSchedule::new(0.0)));
    assert!(found.contains("use one above 0"), "{found}");
}
