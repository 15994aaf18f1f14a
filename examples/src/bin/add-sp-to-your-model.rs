//! Trains a language model of plain Burn on one device, and the same with its sequences split over four ranks.

use std::error::Error;
use std::path::Path;

use burn_sp_examples::add_sp::{after, before};

fn main() -> Result<(), Box<dyn Error>> {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    println!("plain Burn, one device:");
    before::run(&text)?;
    println!("the same model with 15 lines changed, on 4 ranks:");
    after::run(&text)
}
