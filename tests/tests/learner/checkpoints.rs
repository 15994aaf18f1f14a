use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer, OptimizerRecord};
use burn::store::ModuleRecord;
use burn_sp::layout::MeshShape;

use super::model::{Hook, Language, llama};
use super::run::{Run, whole};
use crate::common::{device, mesh};

/// Copies what was saved, as if the run had ended there.
fn copied(from: &Path, to: &Path) {
    let (from, to) = (from.join("checkpoint"), to.join("checkpoint"));
    fs::create_dir_all(&to).unwrap();
    for file in fs::read_dir(&from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn saving(name: &str, mesh: Option<MeshShape>) -> Run {
    Run {
        checkpoints: true,
        clipping: Some(0.5),
        ..Run::new(name, mesh)
    }
}

/// After epoch 1 on one mesh, epoch 2 on another, by another model until the checkpoint is loaded.
fn resumed(name: &str, from: &Run, mesh: Option<MeshShape>) -> Run {
    let run = Run {
        resumed: Some(1),
        seed: 6,
        ..saving(name, mesh)
    };
    copied(&from.folder, &run.folder);
    whole(run.run());
    run
}

#[test]
fn a_checkpoint_goes_on_anywhere() {
    let unbroken = saving("unbroken", None);
    whole(unbroken.run());
    let meshes = [
        None,
        Some(mesh(1, 1, 2)),
        Some(mesh(2, 2, 1)),
        Some(MeshShape::tp(2)),
        Some(MeshShape::tp(3)),
    ];
    for (index, from) in meshes.into_iter().enumerate() {
        let first = Run {
            epochs: 1,
            ..saving(&format!("first-{index}"), from)
        };
        whole(first.run());
        first.same_epoch(&unbroken, 1);
        for (other, to) in meshes.into_iter().enumerate() {
            // All pairs with tp, and a ring of the others.
            let tp = |mesh: Option<MeshShape>| mesh.is_some_and(|mesh| mesh.tp > 1);
            if !(tp(from) || tp(to) || other == (index + 1) % meshes.len()) {
                continue;
            }
            let second = resumed(&format!("second-{index}"), &first, to);
            second.same_epoch(&unbroken, 2);
        }
    }
}

/// Without any of this: Burn reads the model and the optimizer's state, in whole shapes.
#[test]
fn a_checkpoint_is_burns_own() {
    for mesh in [mesh(2, 1, 1), MeshShape::tp(2)] {
        let run = Run {
            epochs: 1,
            ..saving("own", Some(mesh))
        };
        let trained = whole(run.run());
        let file = |name| run.folder.join("checkpoint").join(format!("{name}-1.bpk"));
        let record = ModuleRecord::load(file("model")).unwrap();
        let plain = Language {
            transformer: llama().init(&device()),
            hook: Hook::default(),
        };
        let plain = plain.load_record(record);
        let weight = |model: &Language| model.transformer.embedding.weight.val().into_data();
        assert_eq!(weight(&plain), weight(trained.inner()), "{mesh}");

        let record = OptimizerRecord::load(file("optim")).unwrap();
        let moments = record.len();
        let optimizer: ModuleOptimizer = AdamWConfig::new().init();
        assert_eq!(optimizer.load_record(record).to_record().len(), moments);
        // Two for each parameter.
        let mut parameters = 0;
        burn_sp_tests::parameters_by_path(&plain)
            .iter()
            .for_each(|_| parameters += 1);
        assert_eq!(moments, 2 * parameters, "{mesh}");
    }
}

/// Burn keeps the newest two, whatever the mesh.
#[test]
fn old_checkpoints_go() {
    let run = Run {
        epochs: 4,
        count: 2,
        ..saving("kept", Some(mesh(1, 1, 2)))
    };
    whole(run.run());
    let there = |epoch| {
        run.folder
            .join("checkpoint")
            .join(format!("model-{epoch}.bpk"))
            .exists()
    };
    assert!(there(4) && there(3));
    assert!(!there(1) || !there(2));
}
