//! Processes of a program under one `mpirun`, and what they said.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_train-transformer");

/// A tiny model, whose ranks wait so many seconds for each other.
pub const TINY: &str = "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --seq-len 61 --dropout 0.1 --timeout 4";

/// From a fault until every survivor has reported and ended: the timeout, the time for the others' answers, and what a
/// busy machine adds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// An empty folder of this name.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("processes").join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// A text to learn from, which no one edits, in this folder.
pub fn text(folder: &Path) -> PathBuf {
    let file = folder.join("text.txt");
    let words = (0..4000u64).map(|i| ["sun ", "moon ", "star ", "sky\n"][(i * i % 11 % 4) as usize]);
    fs::write(&file, words.collect::<String>()).unwrap();
    file
}

/// How often a fault is tried.
pub fn rounds() -> usize {
    std::env::var("BURN_SP_FAULTS").map_or(1, |rounds| rounds.parse().expect("BURN_SP_FAULTS is a number"))
}

/// At moments spread over a step: forward, backward, gradient sum, update.
pub fn moment(round: usize) -> Duration {
    Duration::from_millis((round as u64 * 37 + 11) % 101)
}

/// Runs `train-transformer` with ranks as threads.
pub fn as_threads(line: &str, report: &Path) {
    let line = format!("{line} --report {}", report.display());
    let output = Command::new(PROGRAM).args(line.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The numbers as they are written: different ones are written differently, which reading them might blur.
pub fn losses(report: &str) -> Vec<&str> {
    let lines = report.lines().map(str::trim);
    let of = ["\"loss\"", "\"grad_norm\"", "\"validation_loss\""];
    lines
        .filter(|line| of.iter().any(|name| line.starts_with(name)))
        .collect()
}

/// Processes of a program under one `mpirun`, each with a file for its number and one for its complaints.
pub struct Run {
    pub mpirun: Child,
    pub folder: PathBuf,
    ranks: usize,
}

impl Run {
    /// `train-transformer --engine mpi` with these flags, by an `mpirun` with what it needs to know of hosts; each process
    /// after some lines of a shell that knows its `$RANK` and, as `$@`, its program and flags.
    pub fn under(mut mpirun: Command, folder: &Path, ranks: usize, flags: &str, lines: &str) -> Run {
        let script = format!(
            "cd \"$1\"; shift; RANK=$OMPI_COMM_WORLD_RANK; echo $$ > pid.$RANK\n{lines}\nexec \"$@\" 2> errors.$RANK"
        );
        let mpirun = mpirun
            .args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
            // Open MPI refuses root, as whom containers run, unless both are set.
            .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
            .args(["sh", "-c", &script, "sh"])
            .arg(folder)
            .arg(PROGRAM)
            .args(["--engine", "mpi"])
            .args(flags.split_whitespace())
            .stdout(fs::File::create(folder.join("output")).unwrap())
            .stderr(fs::File::create(folder.join("launcher")).unwrap())
            .stdin(Stdio::null())
            .spawn()
            .expect("mpirun is installed");
        Run {
            mpirun,
            folder: folder.to_path_buf(),
            ranks,
        }
    }

    /// What a process complained about, with what it said of its progress.
    pub fn errors(&self, rank: usize) -> String {
        fs::read_to_string(self.folder.join(format!("errors.{rank}"))).unwrap_or_default()
    }

    /// Everything that was said, for a test that failed.
    pub fn all(&self) -> String {
        let launcher = fs::read_to_string(self.folder.join("launcher")).unwrap_or_default();
        let ranks: Vec<_> = (0..self.ranks)
            .map(|rank| format!("rank {rank}: {}", self.errors(rank)))
            .collect();
        format!("{}\nmpirun: {launcher}", ranks.join("\n"))
    }

    /// Waits until rank 0 has told of so many steps.
    pub fn await_steps(&mut self, steps: usize) {
        let begin = Instant::now();
        while self.errors(0).matches("\nstep ").count() < steps {
            let ended = self.mpirun.try_wait().unwrap();
            assert!(
                ended.is_none() && begin.elapsed() < 4 * PATIENCE,
                "no {steps} steps: {}",
                self.all()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The number of a rank's process.
    pub fn process(&self, rank: usize) -> String {
        let number = fs::read_to_string(self.folder.join(format!("pid.{rank}"))).unwrap();
        number.trim().into()
    }

    /// Sends a signal to the process of a rank.
    pub fn signal(&self, rank: usize, signal: &str) {
        self.signal_process(&self.process(rank), signal);
    }

    pub fn signal_process(&self, process: &str, signal: &str) {
        // By the shell's own `kill`, which every system has.
        let sent = Command::new("sh")
            .args(["-c", &format!("kill -{signal} {process}")])
            .status()
            .unwrap();
        assert!(sent.success(), "{}", self.all());
    }

    /// Waits until all is over; ends what is not.
    pub fn end(&mut self) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.mpirun.try_wait().unwrap() {
                return status;
            }
            if begin.elapsed() > PATIENCE {
                self.mpirun.kill().unwrap();
                panic!("it hangs: {}", self.all());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for a run that works, which may take longer than a fault may.
    pub fn succeeds(&mut self) {
        let begin = Instant::now();
        while self.mpirun.try_wait().unwrap().is_none() && begin.elapsed() < 8 * PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(self.end().success(), "{}", self.all());
    }

    /// Waits until all is over, and checks that every survivor said why in one line with all these words.
    pub fn fails(&mut self, survivors: impl IntoIterator<Item = usize>, words: &[&str]) {
        let status = self.end();
        assert!(!status.success(), "{}", self.all());
        for rank in survivors {
            let errors = self.errors(rank);
            let report = errors.lines().filter(|line| line.starts_with("error: "));
            let told = report.clone().any(|line| words.iter().all(|word| line.contains(word)));
            assert!(told, "rank {rank} does not say {words:?}: {}", self.all());
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Of a test that failed: `mpirun` takes its processes with it.
        if let Ok(None) = self.mpirun.try_wait() {
            let _ = self.mpirun.kill();
            let _ = self.mpirun.wait();
        }
    }
}
