use std::collections::BTreeMap;
use std::fs;

use burn_sp::layout::MeshShape;
use burn_sp::train::{SavedState, saved_states};
use safetensors::SafeTensors;

use super::model::{Run, SHARED, Shared, gpt2, llama, tensors};
use crate::common::mesh;
use crate::folder;

/// Of 4 ranks, each axis among them, and two.
fn fours() -> [MeshShape; 5] {
    [
        mesh(4, 1, 1),
        mesh(1, 4, 1),
        mesh(2, 1, 2),
        MeshShape::tp(2).with_ulysses(2),
        MeshShape::tp(4),
    ]
}

/// After one step from nothing AdamW's moments are `(1 - beta_1) g` and `(1 - beta_2) g^2`.
#[test]
fn moments_are_those_of_the_gradients() {
    let folder = folder("moments");
    let run = Run::new(gpt2(), MeshShape::default(), Shared::Nothing, 0..1).save(&folder);
    let gradients = run.run().remove(0).gradients;
    let saved = tensors(&folder.join("step-000001"));
    // Beside each gradient's parameter, its two moments.
    assert_eq!(saved.len(), 3 * gradients.len());
    for (path, gradient) in gradients {
        let of = |moment: &str| &saved[&format!("optimizer/{path}/momentum.{moment}")];
        let elements = gradient.elements.iter();
        for ((g, m1), m2) in elements.zip(&of("moment_1").elements).zip(&of("moment_2").elements) {
            assert!((m1 - 0.1 * g).abs() <= 1e-6 * g.abs(), "{path}: {g}, {m1}");
            assert!(
                (m2 - 0.001 * g * g).abs() <= 2e-5 * 0.001 * g * g + 1e-30,
                "{path}: {g}, {m2}"
            );
        }
    }
    let state = SavedState::open(&folder).unwrap();
    assert_eq!((state.info().step, state.info().seed), (1, 5));
    assert_eq!(state.info().config["name"], "tiny");
}

/// Every rank's share, put together, to the bit: where the steps themselves are the same.
#[test]
fn a_state_is_whole_however_it_was_shared_out() {
    let bytes = |mesh, shared| {
        let folder = folder(&format!("whole-{mesh}-{shared:?}"));
        Run::new(llama(), mesh, shared, 0..2).save(&folder).run();
        fs::read(folder.join("step-000002").join("state.safetensors")).unwrap()
    };
    for mesh in fours().into_iter().chain([MeshShape::default(), mesh(1, 3, 1)]) {
        let whole = bytes(mesh, Shared::Nothing);
        assert!(whole == bytes(mesh, Shared::Moments), "{mesh}: moments");
        assert!(whole == bytes(mesh, Shared::Parameters), "{mesh}: parameters");
    }
}

#[test]
fn a_state_does_not_depend_on_the_mesh() {
    for (name, model) in [("gpt2", gpt2()), ("llama", llama())] {
        let saved = |mesh, shared| {
            let folder = folder(&format!("{name}-{mesh}-{shared:?}"));
            Run::new(model.clone(), mesh, shared, 0..3).save(&folder).run();
            tensors(&folder.join("step-000003"))
        };
        let one = saved(MeshShape::default(), Shared::Nothing);
        for mesh in fours() {
            for shared in SHARED {
                let other = saved(mesh, shared);
                let names = |tensors: &BTreeMap<_, _>| tensors.keys().cloned().collect::<Vec<String>>();
                assert_eq!(names(&one), names(&other), "{name}, {mesh}, {shared:?}");
                for (tensor, one) in &one {
                    let (other, context) = (&other[tensor], format!("{name}, {mesh}, {shared:?}: {tensor}"));
                    assert_eq!((&one.shape, one.dtype), (&other.shape, other.dtype), "{context}");
                    let pairs = one.elements.iter().zip(&other.elements);
                    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    // Adam's step magnifies the rounding of a gradient near 0.
                    let most = if tensor.starts_with("optimizer/") { 1e-6 } else { 2e-3 };
                    assert!(worst <= most * one.peak().max(1.0), "{context} is off by {worst}");
                }
            }
        }
    }
}

#[test]
fn a_run_goes_on_on_any_mesh() {
    let others = [
        (MeshShape::default(), Shared::Nothing),
        (MeshShape::default(), Shared::Moments),
        (mesh(2, 1, 1), Shared::Parameters),
        (mesh(1, 1, 2), Shared::Moments),
        (MeshShape::tp(2), Shared::Nothing),
        (mesh(1, 2, 2), Shared::Moments),
        (MeshShape::tp(2).with_dp(2), Shared::Parameters),
        (MeshShape::tp(4), Shared::Moments),
    ];
    for (name, model) in [("gpt2", gpt2()), ("llama", llama())] {
        let unbroken = Run::new(model.clone(), MeshShape::default(), Shared::Nothing, 0..6)
            .clip(0.5)
            .losses();
        for mesh in fours() {
            for shared in SHARED {
                let folder = folder(&format!("resume-{name}-{mesh}-{shared:?}"));
                let first = Run::new(model.clone(), mesh, shared, 0..3).clip(0.5).save(&folder);
                let before = first.losses();
                for (mesh_then, shared_then) in others {
                    let second = Run::new(model.clone(), mesh_then, shared_then, 3..6)
                        .clip(0.5)
                        .from(&folder);
                    for (step, loss) in before.iter().chain(&second.losses()).enumerate() {
                        let expected = unbroken[step];
                        assert!(
                            (loss - expected).abs() <= 1e-5 * expected,
                            "{name}, {mesh}, {shared:?}, then {mesh_then}, {shared_then:?}: step {step}: {loss}, {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// On the same mesh there is no rounding.
#[test]
fn a_run_goes_on_as_if_it_had_not_ended() {
    for (mesh, shared) in [(mesh(2, 1, 2), Shared::Moments), (MeshShape::tp(2), Shared::Nothing)] {
        let folder = folder(&format!("unbroken-{mesh}"));
        let unbroken = Run::new(gpt2(), mesh, shared, 0..5).save(&folder.join("unbroken"));
        let first = Run::new(gpt2(), mesh, shared, 0..2).save(&folder.join("broken"));
        let second = Run::new(gpt2(), mesh, shared, 2..5)
            .from(&folder.join("broken"))
            .save(&folder.join("broken"));
        assert_eq!(unbroken.losses(), [first.losses(), second.losses()].concat());
        let [one, other] =
            ["unbroken", "broken"].map(|run| fs::read(folder.join(run).join("step-000005/state.safetensors")).unwrap());
        assert!(one == other, "{mesh}");
    }
}

#[test]
fn the_newest_two_are_kept_and_leftovers_are_removed() {
    let folder = folder("kept");
    let store = folder.join("deep/down");
    let run = |steps| Run::new(llama(), mesh(2, 1, 1), Shared::Nothing, steps).save(&store);
    run(0..1).run();
    run(0..2).run();
    // A kill, while one was written and one removed.
    for half in [".step-000003.tmp", ".step-000001.tmp"] {
        fs::create_dir(store.join(half)).unwrap();
        fs::write(store.join(half).join("state.safetensors"), "half").unwrap();
    }
    fs::write(store.join("notes.txt"), "not ours").unwrap();
    run(0..4).run();
    let states = ["step-000002", "step-000004"].map(|state| store.join(state));
    assert_eq!(saved_states(&store), Ok(states.to_vec()));
    let mut left: Vec<_> = fs::read_dir(&store)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["notes.txt", "step-000002", "step-000004"]);
    assert_eq!(saved_states(folder.join("none")), Ok(vec![]));
    assert_eq!(SavedState::open(&store).unwrap().folder(), store.join("step-000004"));
    let older = store.join("step-000002");
    assert_eq!(SavedState::open(&older).unwrap().folder(), older);
}

/// Some readers take a tensor where it lies.
#[test]
fn tensors_are_aligned_and_the_file_is_whole() {
    let folder = folder("aligned");
    Run::new(gpt2(), MeshShape::default(), Shared::Nothing, 0..1)
        .save(&folder)
        .run();
    let bytes = fs::read(folder.join("step-000001/state.safetensors")).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    for (name, info) in metadata.tensors() {
        assert_eq!(info.data_offsets.0 % (info.dtype.bitsize() / 8), 0, "{name}");
    }
    let times = metadata
        .offset_keys()
        .into_iter()
        .filter(|name| name.ends_with("/momentum.time"));
    assert_eq!(times.count(), metadata.tensors().len() / 4);
}
