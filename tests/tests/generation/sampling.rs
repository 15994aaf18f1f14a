//! Which token is chosen: exact at every edge, and as often as it is likely.

use burn_sp_models::transformer::Sampling;

use crate::common::noise;

/// Logits of these probabilities, which are powers of two, so that nothing is rounded.
fn logits(probabilities: &[f64]) -> Vec<f64> {
    probabilities.iter().map(|p| p.ln()).collect()
}

fn kept(sampling: Sampling, logits: &[f64]) -> Vec<u32> {
    sampling.candidates(logits).iter().map(|(id, _)| *id).collect()
}

fn drawn() -> Sampling {
    Sampling::with_seed(3)
}

fn top_p(top_p: f64) -> Sampling {
    Sampling { top_p, ..drawn() }
}

fn top_k(top_k: usize) -> Sampling {
    Sampling {
        top_k: Some(top_k),
        ..drawn()
    }
}

#[test]
fn candidates_are_in_order() {
    let some = [0.5, 2.0, -1.0, 2.0, 0.5];
    assert_eq!(kept(drawn(), &some), [1, 3, 0, 4, 2]);
    let sum: f64 = drawn()
        .candidates(&some)
        .iter()
        .map(|(_, probability)| probability)
        .sum();
    assert!((sum - 1.0).abs() < 1e-15);
    // Half the temperature squares them: 1, 1/4, 1/4.
    let cold = Sampling {
        temperature: 0.5,
        ..drawn()
    };
    let found: Vec<f64> = cold
        .candidates(&logits(&[0.5, 0.25, 0.25]))
        .iter()
        .map(|(_, p)| *p)
        .collect();
    for (found, expected) in found.iter().zip([2.0 / 3.0, 1.0 / 6.0, 1.0 / 6.0]) {
        assert!((found - expected).abs() < 1e-15);
    }
}

#[test]
fn ties_go_to_the_smaller_id() {
    let tied = [1.0, 2.0, 2.0, 0.0, 2.0];
    assert_eq!(kept(top_k(1), &tied), [1]);
    assert_eq!(kept(top_k(2), &tied), [1, 2]);
    assert_eq!(kept(top_k(9), &tied), [1, 2, 4, 0, 3]);
    assert_eq!(kept(Sampling::greedy(), &tied), [1]);
    assert_eq!(kept(Sampling::greedy(), &[-0.0, 0.0]), [0]);
    // Four of a quarter each.
    assert_eq!(kept(top_p(0.5), &[0.0; 4]), [0, 1]);
}

/// The shortest run whose sum reaches it.
#[test]
fn top_p_at_its_edges() {
    // 1, 1/2 and 1/2 of the first.
    let some = [0.0, 0.5f64.ln(), 0.5f64.ln()];
    for (p, count) in [
        (1e-9, 1),
        (0.5, 1),
        (0.5 + 1e-12, 2),
        (0.75, 2),
        (0.75 + 1e-12, 3),
        (1.0, 3),
    ] {
        assert_eq!(kept(top_p(p), &some).len(), count, "{p}");
    }
    // It is of what top_k leaves: 2/3 and 1/3.
    let both = |p| Sampling {
        top_k: Some(2),
        ..top_p(p)
    };
    assert_eq!(kept(both(0.6), &some).len(), 1);
    assert_eq!(kept(both(0.7), &some).len(), 2);
    // What is left counts as all.
    assert_eq!(both(0.6).candidates(&some), [(0, 1.0)]);
    // All stay at 1, also what is too unlikely to change the sum.
    assert_eq!(kept(top_p(1.0), &[0.0, -1000.0]).len(), 2);
}

#[test]
fn one_of_one_is_greedy() {
    for position in 0..200 {
        let logits = noise(position, 50);
        let greedy = Sampling::greedy().choose(&logits, 0);
        assert_eq!(top_k(1).choose(&logits, position as usize), greedy);
        assert_eq!(top_p(1e-9).choose(&logits, position as usize), greedy);
        let largest = logits.iter().copied().fold(f64::MIN, f64::max);
        assert_eq!(logits[greedy as usize], largest);
    }
}

/// Each token as often as it is likely, within three standard deviations.
#[track_caller]
fn frequencies(sampling: Sampling, logits: &[f64], expected: &[f64]) {
    const DRAWS: usize = 40_000;
    let mut counts = vec![0; logits.len()];
    for position in 0..DRAWS {
        counts[sampling.choose(logits, position) as usize] += 1;
    }
    for (id, (count, p)) in counts.into_iter().zip(expected).enumerate() {
        let (mean, sigma) = (p * DRAWS as f64, (p * (1.0 - p) * DRAWS as f64).sqrt());
        let off = (count as f64 - mean).abs();
        assert!(
            off <= 3.0 * sigma,
            "token {id}: {count} of {DRAWS}, {mean} expected, {sigma} the deviation"
        );
    }
}

#[test]
fn tokens_are_as_frequent_as_they_are_likely() {
    let four = logits(&[0.125, 0.5, 0.25, 0.125]);
    frequencies(drawn(), &four, &[0.125, 0.5, 0.25, 0.125]);
    frequencies(Sampling::with_seed(u64::MAX), &four, &[0.125, 0.5, 0.25, 0.125]);
    frequencies(top_k(2), &four, &[0.0, 2.0 / 3.0, 1.0 / 3.0, 0.0]);
    frequencies(top_p(0.8), &four, &[1.0 / 7.0, 4.0 / 7.0, 2.0 / 7.0, 0.0]);
    let hot = Sampling {
        temperature: 2.0,
        ..drawn()
    };
    let roots: Vec<f64> = [0.125f64, 0.5, 0.25, 0.125].map(f64::sqrt).to_vec();
    let sum: f64 = roots.iter().sum();
    frequencies(hot, &four, &roots.iter().map(|root| root / sum).collect::<Vec<_>>());
    frequencies(drawn(), &[0.0, f64::NEG_INFINITY], &[1.0, 0.0]);
    // So cold that only the largest is left.
    let cold = Sampling {
        temperature: 1e-300,
        ..drawn()
    };
    frequencies(cold, &four, &[0.0, 1.0, 0.0, 0.0]);
}

/// A function of seed and position.
#[test]
fn draws_depend_on_seed_and_position_alone() {
    let even = [0.0; 64];
    let draw = |seed: u64| -> Vec<u32> { (0..50).map(|at| Sampling::with_seed(seed).choose(&even, at)).collect() };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    let mut again: Vec<u32> = (0..50)
        .rev()
        .map(|at| Sampling::with_seed(1).choose(&even, at))
        .collect();
    again.reverse();
    assert_eq!(draw(1), again);
}

#[test]
fn what_cannot_work_is_refused() {
    let problem = |sampling: Sampling| sampling.problem().expect("a problem");
    for temperature in [-1.0, f64::NAN, f64::INFINITY] {
        let found = problem(Sampling { temperature, ..drawn() });
        assert!(found.contains(&format!("temperature {temperature}: use 0")), "{found}");
    }
    assert!(problem(top_k(0)).contains("top_k 0"));
    for p in [0.0, -0.5, 1.5, f64::NAN] {
        assert!(problem(top_p(p)).contains(&format!("top_p {p}: use a number above 0")));
    }
    assert_eq!(drawn().problem(), None);
    for broken in [[0.0, f64::NAN], [f64::INFINITY, 0.0], [f64::NEG_INFINITY; 2]] {
        let failed = std::panic::catch_unwind(|| Sampling::greedy().choose(&broken, 0));
        assert!(failed.is_err(), "{broken:?}");
    }
}
