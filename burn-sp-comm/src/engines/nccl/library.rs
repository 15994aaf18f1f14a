//! The libraries of CUDA and NCCL, which are loaded when the program runs: refused in words where they are missing or too
//! old, before anything has started. Whoever calls them without having asked first is ended by a panic.

use crate::CommError;
use crate::engines::processes::Environment;
use cudarc::driver::CudaContext;
use cudarc::nccl::result::get_nccl_version;
use cudarc::nccl::sys::{self, ncclComm_t, ncclResult_t};
use std::ffi::CStr;

/// 2.18 brought communicators that are split.
const OLDEST: i32 = 21800;

/// Refuses what the engine cannot work with.
pub fn check() -> Result<(), CommError> {
    // SAFETY: both only try to open libraries of known names.
    let (driver, library) = unsafe { (cudarc::driver::sys::is_culib_present(), sys::is_culib_present()) };
    let version = (driver && library).then(|| get_nccl_version().unwrap_or(0));
    verdict(driver, library, version)
}

fn verdict(driver: bool, library: bool, version: Option<i32>) -> Result<(), CommError> {
    let fault = match version {
        _ if !driver => "CUDA's driver (libcuda.so) cannot be loaded: install NVIDIA's driver on every host".into(),
        _ if !library => "NCCL (libnccl.so) cannot be loaded: install it (Debian, Ubuntu: libnccl-dev), or name the \
                          folder in which a libnccl.so lies in LD_LIBRARY_PATH"
            .into(),
        Some(version) if version < OLDEST => {
            format!(
                "NCCL is too old: version {}, needs 2.18 or newer",
                version_text(version)
            )
        }
        _ => return Ok(()),
    };
    Err(CommError::invalid(format!("nccl: {fault}")))
}

/// `2.18.3`; the encoding has changed with 2.9.
fn version_text(version: i32) -> String {
    let thousands = if version < 10000 { 1000 } else { 10000 };
    format!(
        "{}.{}.{}",
        version / thousands,
        version % thousands / 100,
        version % 100
    )
}

/// How many devices this process sees.
pub fn devices() -> Result<usize, CommError> {
    let devices = CudaContext::device_count().map_err(|error| {
        CommError::invalid(format!(
            "nccl: the CUDA devices of this host cannot be counted: {error}"
        ))
    })?;
    Ok(devices as usize)
}

/// The number of the device that a process takes.
pub fn device_of(environment: &Environment) -> Result<usize, CommError> {
    let own = std::env::var_os("CUDA_VISIBLE_DEVICES").is_some();
    choose(environment.local_rank, devices()?, own)
}

/// `own`: whether the process has been given devices of its own.
fn choose(local_rank: usize, devices: usize, own: bool) -> Result<usize, CommError> {
    match devices {
        0 => Err(CommError::invalid(
            "nccl: there is no CUDA device; nvidia-smi lists those of a host, CUDA_VISIBLE_DEVICES may hide some",
        )),
        // As SLURM does with --gpus-per-task=1: every process sees its own, as the first.
        1 if own => Ok(0),
        _ if local_rank < devices => Ok(local_rank),
        _ => Err(CommError::invalid(format!(
            "nccl: process {local_rank} of this host has no CUDA device, as there are {devices}: start at most {devices} \
             on a host"
        ))),
    }
}

/// What went wrong, in the library's words.
pub fn words(result: ncclResult_t, comm: Option<ncclComm_t>) -> String {
    let text = |pointer: *const std::ffi::c_char| match pointer.is_null() {
        true => String::new(),
        // SAFETY: the library returns a text that ends, and lives at least until its next error.
        false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned(),
    };
    // SAFETY: any result is fine; the communicator, if there is one, has not been freed: its lock is held.
    let (what, last) = unsafe {
        (
            text(sys::ncclGetErrorString(result)),
            text(sys::ncclGetLastError(comm.unwrap_or(std::ptr::null_mut()))),
        )
    };
    match last.is_empty() {
        true => format!("NCCL: {what}"),
        false => format!("NCCL: {what}: {last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_refused_in_words() {
        let refused = |driver, library, version| verdict(driver, library, version).unwrap_err().to_string();
        assert!(refused(false, true, None).contains("libcuda.so"));
        assert!(refused(false, false, None).contains("libcuda.so"));
        assert!(refused(true, false, None).contains("libnccl.so"));
        let old = refused(true, true, Some(21703));
        assert!(old.contains("version 2.17.3, needs 2.18 or newer"), "{old}");
        assert!(refused(true, true, Some(2708)).contains("version 2.7.8"));
        assert_eq!(verdict(true, true, Some(21800)), Ok(()));
        assert_eq!(verdict(true, true, Some(23004)), Ok(()));
    }

    #[test]
    fn a_process_takes_the_device_of_its_number() {
        assert_eq!(choose(3, 4, false), Ok(3));
        assert_eq!(choose(3, 8, true), Ok(3));
        assert_eq!(choose(3, 1, true), Ok(0));
        assert_eq!(choose(0, 1, false), Ok(0));
        let error = choose(1, 1, false).unwrap_err().to_string();
        assert!(
            error.contains("process 1 of this host has no CUDA device, as there are 1"),
            "{error}"
        );
        assert!(choose(4, 4, true).is_err());
        assert!(choose(0, 0, false).unwrap_err().to_string().contains("no CUDA device"));
    }

    /// Where there is none of it, this very process is refused, without a panic.
    #[test]
    fn this_host() {
        match check() {
            Ok(()) => println!("NCCL is here"),
            Err(CommError::Invalid { message }) => println!("skipped: {message}"),
            Err(other) => panic!("{other}"),
        }
    }
}
