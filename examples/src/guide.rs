//! The guide's chapters, so that its programs are compiled and run with the tests.

macro_rules! chapters {
    ($($name:ident: $file:literal,)*) => {
        $(
            #[doc = include_str!(concat!("../../docs/src/", $file))]
            struct $name;
        )*
    };
}

chapters! {
    Introduction: "introduction.md",
    AddToYourModel: "add-to-your-model.md",
    TheOneRule: "the-one-rule.md",
    Layouts: "layouts.md",
    ChoosingAMesh: "choosing-a-mesh.md",
    Masks: "masks.md",
    Losses: "losses.md",
    Memory: "memory.md",
    Learner: "learner.md",
    Data: "data.md",
    Checkpoints: "checkpoints.md",
    Generating: "generating.md",
    Launch: "launch.md",
    FindingFaults: "finding-faults.md",
    OwnClips: "train-on-your-own-clips.md",
    WhatItDoesNotSave: "what-it-does-not-save.md",
}
