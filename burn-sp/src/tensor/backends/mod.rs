//! One adapter a backend; each is a handful of lines.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "nccl")]
mod cuda;
#[cfg(feature = "flex")]
mod flex;
