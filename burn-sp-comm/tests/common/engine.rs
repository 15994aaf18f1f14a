//! The same tests on every engine: in this process on threads, and the whole file again under `mpirun`.

use burn_sp_comm::engines::threads::{self, ThreadsConfig};
use burn_sp_comm::{CommError, Communicator, raise};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Set in processes that run the tests over MPI.
#[cfg(feature = "mpi")]
const OVER_MPI: &str = "BURN_SP_TEST_OVER_MPI";

/// Set in a process whose failing ranks are processes over MPI.
#[cfg(feature = "mpi")]
const FAILING_OVER_MPI: &str = "BURN_SP_TEST_FAILING_OVER_MPI";

/// Runs `body` on so many ranks, with a timeout that a correct run never meets. Returns the results of the ranks that
/// are in this process.
pub fn world<T: Send>(
    ranks: usize,
    body: impl Fn(Arc<dyn Communicator>) -> T + Send + Sync,
) -> Result<Vec<T>, CommError> {
    let timeout = Duration::from_secs(20);
    #[cfg(feature = "mpi")]
    if std::env::var_os(OVER_MPI).is_some() {
        return over_mpi::world(ranks, timeout, body);
    }
    threads::launch(&ThreadsConfig { ranks, timeout }, body)
}

#[cfg(feature = "mpi")]
#[allow(unused_imports, reason = "every test file uses its own selection")]
pub use over_mpi::again_over_mpi;

/// What became of ranks of which at least one failed.
pub struct Failure {
    /// The error of all ranks.
    pub error: CommError,
    /// How many ranks' code got it from a call.
    pub told: usize,
    /// From the start of the ranks until all of them had ended.
    pub took: Duration,
}

/// Runs ranks of which at least one fails, and checks that every rank that got an error got this one, and that it was
/// all over soon.
pub fn fails(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(&dyn Communicator) -> Result<(), CommError> + Send + Sync,
) -> Failure {
    #[cfg(feature = "mpi")]
    if std::env::var_os(FAILING_OVER_MPI).is_some() {
        return failing_over_mpi::fails(ranks, timeout, body);
    }
    let begin = Instant::now();
    let errors = Mutex::new(Vec::new());
    let outcome = threads::launch(&ThreadsConfig { ranks, timeout }, |comm: Arc<dyn Communicator>| {
        if let Err(error) = body(&*comm) {
            errors.lock().unwrap().push(error.clone());
            raise(error);
        }
    });
    let error = outcome.expect_err("a rank failed");
    let (errors, took) = (errors.into_inner().unwrap(), begin.elapsed());
    errors.iter().for_each(|other| assert_eq!(*other, error));
    assert!(took < timeout * 5, "took {took:?}");
    Failure {
        error,
        told: errors.len(),
        took,
    }
}

#[cfg(feature = "mpi")]
mod over_mpi {
    use super::*;
    use burn_sp_comm::engines::mpi::{MpiConfig, launch};
    use std::process::Command;

    /// The first of the processes are the ranks; the others look on.
    pub fn world<T>(
        ranks: usize,
        timeout: Duration,
        body: impl Fn(Arc<dyn Communicator>) -> T,
    ) -> Result<Vec<T>, CommError> {
        let result = launch(&MpiConfig { timeout }, |all| {
            assert!(ranks <= all.size(), "the test needs {ranks} processes");
            let first: Vec<usize> = (0..ranks).collect();
            (all.rank() < ranks).then(|| match ranks == all.size() {
                true => body(all),
                false => body(all.subgroup(&first, "world").unwrap_or_else(|error| raise(error))),
            })
        });
        Ok(result?.into_iter().collect())
    }

    /// Runs the tests of this file again, but for `skipped` ones, as so many processes.
    pub fn again_over_mpi(processes: usize, skipped: &[&str]) {
        let mut tests = mpirun(processes);
        tests
            .env(OVER_MPI, "1")
            .args(["--test-threads", "1", "--color", "never"]);
        for name in skipped.iter().chain(&["over_mpi"]) {
            tests.args(["--skip", name]);
        }
        let output = tests.output().expect("mpirun is installed");
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}\n{errors}");
        // The lines of several processes may be mixed.
        let passed = text.matches(" passed; 0 failed;").count();
        assert_eq!(passed, processes, "every process ran the tests: {text}\n{errors}");
        assert!(!text.contains(" 0 passed"), "{text}");
    }

    /// This test program as so many processes, on however many cores; ended if it hangs.
    pub fn mpirun(processes: usize) -> Command {
        let mut command = Command::new("timeout");
        command
            .args([
                "--kill-after",
                "5",
                "300",
                "mpirun",
                "--oversubscribe",
                "--bind-to",
                "none",
                "-n",
            ])
            .arg(processes.to_string())
            // Open MPI refuses root, as whom containers run, unless both are set.
            .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
            .arg(std::env::current_exe().expect("the test program has a path"));
        command
    }
}

/// A world that has failed ends its processes, so each call of [`fails`] in a test gets processes of its own. They run
/// the test up to that call; what earlier calls returned, they read.
#[cfg(feature = "mpi")]
mod failing_over_mpi {
    use super::over_mpi::mpirun;
    use super::*;
    use burn_sp_comm::engines::mpi::{MpiConfig, launch};
    use std::cell::Cell;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// Where the processes of a call write what became of them, and which call of the test it is.
    const FOLDER: &str = "BURN_SP_TEST_FOLDER";
    const CALL: &str = "BURN_SP_TEST_CALL";

    thread_local! {
        static CALLS: Cell<usize> = const { Cell::new(0) };
    }

    /// Runs the tests of this file again, but for `skipped` ones, with processes as ranks.
    pub fn failing_again_over_mpi(skipped: &[&str]) {
        let mut tests = Command::new(std::env::current_exe().expect("the test program has a path"));
        // Two threads, or tests would run on the main one, which has not their name.
        tests
            .env(FAILING_OVER_MPI, "1")
            .args(["--test-threads", "2", "--color", "never"]);
        for name in skipped.iter().chain(&["over_mpi"]) {
            tests.args(["--skip", name]);
        }
        let output = tests.output().expect("the test program runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{text}\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            text.contains("test result: ok. ") && !text.contains("ok. 0 passed"),
            "{text}"
        );
    }

    pub fn fails(
        ranks: usize,
        timeout: Duration,
        body: impl Fn(&dyn Communicator) -> Result<(), CommError>,
    ) -> Failure {
        let call = CALLS.replace(CALLS.get() + 1);
        match (std::env::var_os(FOLDER), std::env::var(CALL)) {
            (Some(folder), Ok(this)) => in_process(&PathBuf::from(folder), call, &this, timeout, body),
            _ => from_outside(ranks, call, timeout),
        }
    }

    fn in_process(
        folder: &Path,
        call: usize,
        this: &str,
        timeout: Duration,
        body: impl Fn(&dyn Communicator) -> Result<(), CommError>,
    ) -> Failure {
        if call.to_string() != this {
            return read(&folder.join(call.to_string()));
        }
        let begin = Instant::now();
        let told = Cell::new(None);
        let (mut rank, mut size) = (0, 0);
        let outcome = launch(&MpiConfig { timeout }, |comm| {
            (rank, size) = (comm.rank(), comm.size());
            if let Err(error) = body(&*comm) {
                told.set(Some(error.clone()));
                raise(error);
            }
        });
        let error = outcome.expect_err("a rank failed");
        let told = told.into_inner();
        if let Some(told) = &told {
            assert_eq!(*told, error);
        }
        let failure = (error, usize::from(told.is_some()), begin.elapsed());
        write(&of_rank(folder, rank), &failure);
        // A launcher may kill the others as soon as some have ended: Open MPI means to wait a second, but not on when
        // another process ends meanwhile.
        let all = || (0..size).all(|rank| of_rank(folder, rank).exists());
        let until = Instant::now() + Duration::from_secs(10);
        while !all() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::process::exit(1);
    }

    fn from_outside(ranks: usize, call: usize, timeout: Duration) -> Failure {
        let test = std::thread::current().name().expect("tests have names").to_string();
        let folder = std::env::temp_dir().join(format!("burn-sp-{}-{test}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let output = mpirun(ranks)
            .env(FOLDER, &folder)
            .env(CALL, call.to_string())
            .args(["--test-threads", "1", "--exact", &test, "--nocapture"])
            .output()
            .expect("mpirun is installed");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{errors}");
        let told = |rank: usize| {
            let file = of_rank(&folder, rank);
            assert!(file.exists(), "rank {rank} came to no end of its own: {errors}");
            let failure = read(&file);
            std::fs::remove_file(file).unwrap();
            failure
        };
        let all: Vec<Failure> = (0..ranks).map(told).collect();
        all.iter().for_each(|other| assert_eq!(other.error, all[0].error));
        let failure = Failure {
            error: all[0].error.clone(),
            told: all.iter().map(|other| other.told).sum(),
            took: all.iter().map(|other| other.took).max().unwrap_or_default(),
        };
        assert!(failure.took < timeout * 5, "took {:?}", failure.took);
        let written = (failure.error.clone(), failure.told, failure.took);
        write(&folder.join(call.to_string()), &written);
        failure
    }

    /// Where a process writes what became of it.
    fn of_rank(folder: &Path, rank: usize) -> PathBuf {
        folder.join(format!("rank {rank}"))
    }

    /// The file is there once it is whole.
    fn write(file: &Path, failure: &(CommError, usize, Duration)) {
        let new = file.with_extension("new");
        std::fs::write(&new, postcard::to_stdvec(failure).unwrap()).unwrap();
        std::fs::rename(&new, file).unwrap();
    }

    fn read(file: &Path) -> Failure {
        let (error, told, took) = postcard::from_bytes(&std::fs::read(file).unwrap()).unwrap();
        Failure { error, told, took }
    }
}

#[cfg(feature = "mpi")]
#[allow(unused_imports, reason = "every test file uses its own selection")]
pub use failing_over_mpi::failing_again_over_mpi;
