//! The causal video VAE: its layers against PyTorch's numbers and by hand, and whole clips split over ranks against one.

mod common;

#[path = "vae/diffusers.rs"]
mod diffusers;
#[path = "vae/fixture.rs"]
mod fixture;
#[path = "vae/layers.rs"]
mod layers;
#[path = "vae/models.rs"]
mod models;
#[path = "vae/rounding.rs"]
mod rounding;
#[path = "vae/slices.rs"]
mod slices;
