//! Which rank a process is: what its launcher says in environment variables.

use crate::CommError;
use std::str::FromStr;

/// The port of the rendezvous where `MASTER_PORT` is not set.
pub const DEFAULT_PORT: u16 = 29517;

/// A process's place among those of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    pub rank: usize,
    pub size: usize,
    /// The rank among the processes of the same host.
    pub local_rank: usize,
    /// How many processes this host has, where the launcher says so.
    pub local_size: Option<usize>,
    /// The host of rank 0: a name or an address.
    pub host: String,
    /// Where rank 0 listens.
    pub port: u16,
}

/// The variables of one kind of launcher.
struct Dialect {
    /// As it is known.
    launcher: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// How many hosts there are.
    hosts: Option<&'static str>,
}

/// In the order in which they are asked for: a launcher that runs inside another's job comes before it.
const DIALECTS: [Dialect; 4] = [
    Dialect {
        launcher: "PyTorch's launcher",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        hosts: None,
    },
    Dialect {
        launcher: "Open MPI's mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        hosts: None,
    },
    Dialect {
        launcher: "SLURM's srun",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
        hosts: Some("SLURM_NNODES"),
    },
    Dialect {
        launcher: "an MPI's mpiexec",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        hosts: None,
    },
];

impl Environment {
    /// As this process's environment has it.
    ///
    /// # Errors
    /// See [`Environment::from_lookup`].
    pub fn of_process() -> Result<Self, CommError> {
        // A value that is no text cannot be a number or a host; its replacement characters show up in the refusal.
        Self::from_lookup(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// As variables have it that `lookup` knows.
    ///
    /// Rank, size and local rank come from the first launcher that has set its rank or its size: `RANK`, `WORLD_SIZE`,
    /// `LOCAL_RANK` (PyTorch's, Kubernetes operators); Open MPI's; SLURM's; those of MPICH and its kin. Without a local
    /// rank a host has one process. Rank 0 listens at `MASTER_ADDR`:`MASTER_PORT`; the address may be left out where all
    /// processes are on one host, the port anywhere, it is then [`DEFAULT_PORT`].
    ///
    /// # Errors
    /// [`CommError::Invalid`]: which variable has which value, and what would work.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, CommError> {
        let variables = Variables { lookup };
        let is_set = |name: &str| variables.text(name).is_some();
        let dialect = DIALECTS
            .iter()
            .find(|dialect| is_set(dialect.rank) || is_set(dialect.size));
        let Some(dialect) = dialect else {
            let names: Vec<_> = DIALECTS.iter().map(|dialect| dialect.rank).collect();
            return Err(CommError::invalid(format!(
                "none of {} is set, so this process does not know its rank: start the program with a launcher, or set \
                 RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
                names.join(", ")
            )));
        };
        let needed = |name: &'static str, what: &str| {
            let number: Option<usize> = variables.number(name, what)?;
            number.ok_or_else(|| {
                CommError::invalid(format!(
                    "{name} is not set, though {} sets it: set it to {what}",
                    dialect.launcher
                ))
            })
        };
        let size = needed(dialect.size, "the number of processes, at least 1")?;
        if size == 0 {
            return Err(refuse(dialect.size, "0", "the number of processes, at least 1"));
        }
        let below = format!("the number of this process, from 0 to {}", size - 1);
        let rank = needed(dialect.rank, &below)?;
        if rank >= size {
            return Err(refuse(dialect.rank, &rank.to_string(), &below));
        }
        let local_size = variables.local_size(dialect, size)?;
        let below = match local_size {
            Some(local_size) => format!("the number of this process on its host, from 0 to {}", local_size - 1),
            None => format!("the number of this process on its host, from 0 to {}", size - 1),
        };
        let local_rank = variables.number(dialect.local_rank, &below)?.unwrap_or(0);
        if local_rank >= local_size.unwrap_or(size) {
            return Err(refuse(dialect.local_rank, &local_rank.to_string(), &below));
        }
        let host = match variables.text("MASTER_ADDR") {
            Some(host) if host.trim().is_empty() || host.contains(char::is_whitespace) => {
                return Err(refuse("MASTER_ADDR", &host, "the name or the address of rank 0's host"));
            }
            Some(host) => host,
            None if local_size == Some(size) => "127.0.0.1".into(),
            None => {
                return Err(CommError::invalid(format!(
                    "MASTER_ADDR is not set, and {} does not say that all {size} processes are on one host: set it to \
                     the name or the address of rank 0's host",
                    dialect.launcher
                )));
            }
        };
        Ok(Environment {
            rank,
            size,
            local_rank,
            local_size,
            host,
            port: variables.port()?,
        })
    }
}

struct Variables<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
    }

    /// The variable's number, if it is set; `what` it should be otherwise.
    fn number<N: FromStr>(&self, name: &str, what: &str) -> Result<Option<N>, CommError> {
        let parse = |value: String| value.trim().parse().map_err(|_| refuse(name, &value, what));
        self.text(name).map(parse).transpose()
    }

    /// How many processes this host has, as far as the launcher says so.
    fn local_size(&self, dialect: &Dialect, size: usize) -> Result<Option<usize>, CommError> {
        if size == 1 {
            return Ok(Some(1));
        }
        if let Some(hosts) = dialect.hosts {
            // Where there are several, the number of processes may differ from one to the next.
            let hosts: Option<usize> = self.number(hosts, "the number of hosts")?;
            return Ok((hosts == Some(1)).then_some(size));
        }
        let what = format!("the number of processes of this host, from 1 to {size}");
        let local_size: Option<usize> = self.number(dialect.local_size, &what)?;
        match local_size {
            Some(number) if number == 0 || number > size => Err(refuse(dialect.local_size, &number.to_string(), &what)),
            local_size => Ok(local_size),
        }
    }

    fn port(&self) -> Result<u16, CommError> {
        const WHAT: &str = "a port that is free on rank 0's host, from 1 to 65534";
        let port: Option<u16> = self.number("MASTER_PORT", WHAT)?;
        // PyTorch's launcher may itself listen at its port.
        let taken = self.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        match port {
            None => Ok(DEFAULT_PORT),
            Some(port @ (0 | u16::MAX)) => Err(refuse("MASTER_PORT", &port.to_string(), WHAT)),
            Some(port) => Ok(port + u16::from(taken)),
        }
    }
}

fn refuse(name: &str, value: &str, what: &str) -> CommError {
    CommError::invalid(format!("{name} is {value:?}: it should be {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, String> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        Environment::from_lookup(|name| variables.get(name).map(|value| value.to_string()))
            .map_err(|error| error.to_string())
    }

    const TORCH: [(&str, &str); 5] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node7.example"),
        ("MASTER_PORT", "3000"),
    ];

    /// The variables with some set anew; to `-` for not at all.
    fn with<'a>(base: &[(&'a str, &'a str)], changes: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let all = base.iter().chain(changes).copied();
        let last: HashMap<_, _> = all.collect();
        last.into_iter().filter(|(_, value)| *value != "-").collect()
    }

    #[test]
    fn pytorchs_variables() {
        let environment = read(&TORCH).unwrap();
        let expected = Environment {
            rank: 5,
            size: 8,
            local_rank: 1,
            local_size: None,
            host: "node7.example".into(),
            port: 3000,
        };
        assert_eq!(environment, expected);
        let local = read(&with(&TORCH, &[("LOCAL_WORLD_SIZE", "4")])).unwrap();
        assert_eq!(local.local_size, Some(4));
    }

    /// As operators of Kubernetes set them: a process a host, so no local rank.
    #[test]
    fn without_a_local_rank_a_host_has_one_process() {
        assert_eq!(read(&with(&TORCH, &[("LOCAL_RANK", "-")])).unwrap().local_rank, 0);
    }

    #[test]
    fn launchers_of_one_host_need_no_address() {
        let of_launcher: [&[(&str, &str)]; 4] = [
            &[
                ("RANK", "2"),
                ("WORLD_SIZE", "3"),
                ("LOCAL_RANK", "2"),
                ("LOCAL_WORLD_SIZE", "3"),
            ],
            &[
                ("OMPI_COMM_WORLD_RANK", "2"),
                ("OMPI_COMM_WORLD_SIZE", "3"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
            ],
            &[
                ("SLURM_PROCID", "2"),
                ("SLURM_NTASKS", "3"),
                ("SLURM_LOCALID", "2"),
                ("SLURM_NNODES", "1"),
            ],
            &[
                ("PMI_RANK", "2"),
                ("PMI_SIZE", "3"),
                ("MPI_LOCALRANKID", "2"),
                ("MPI_LOCALNRANKS", "3"),
            ],
        ];
        let expected = Environment {
            rank: 2,
            size: 3,
            local_rank: 2,
            local_size: Some(3),
            host: "127.0.0.1".into(),
            port: DEFAULT_PORT,
        };
        for variables in of_launcher {
            assert_eq!(read(variables).as_ref(), Ok(&expected), "{variables:?}");
            let elsewhere = with(variables, &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "77")]);
            let read = read(&elsewhere).unwrap();
            assert_eq!((read.host.as_str(), read.port), ("10.0.0.1", 77));
        }
    }

    #[test]
    fn the_innermost_launcher_counts() {
        let slurm = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "64"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NNODES", "8"),
        ];
        let ompi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        assert_eq!(read(&with(&slurm, &ompi)).unwrap().rank, 3);
        let all = with(&with(&slurm, &ompi), &TORCH);
        assert_eq!(read(&all).unwrap().rank, 5);
    }

    #[test]
    fn one_process_needs_nothing_but_its_number() {
        let environment = read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap();
        assert_eq!(
            (environment.host.as_str(), environment.local_size),
            ("127.0.0.1", Some(1))
        );
    }

    /// PyTorch's launcher listens at its port where it says so; the next one is taken.
    #[test]
    fn the_port_of_a_launcher_that_listens_itself_is_left_to_it() {
        let listens = with(&TORCH, &[("TORCHELASTIC_USE_AGENT_STORE", "True")]);
        assert_eq!(read(&listens).unwrap().port, 3001);
        let silent = with(&TORCH, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]);
        assert_eq!(read(&silent).unwrap().port, 3000);
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let rank = "the number of this process, from 0 to 7";
        let local = "the number of this process on its host, from 0 to 7";
        let port = "a port that is free on rank 0's host, from 1 to 65534";
        let size = "the number of processes, at least 1";
        let hosts = "the name or the address of rank 0's host";
        let cases = [
            ("RANK", "8", rank),
            ("RANK", "-1", rank),
            ("RANK", "", rank),
            ("RANK", "five", rank),
            ("RANK", "5.0", rank),
            ("RANK", "99999999999999999999999", rank),
            ("WORLD_SIZE", "0", size),
            ("WORLD_SIZE", "x", size),
            ("LOCAL_RANK", "8", local),
            ("LOCAL_RANK", "x", local),
            (
                "LOCAL_WORLD_SIZE",
                "0",
                "the number of processes of this host, from 1 to 8",
            ),
            (
                "LOCAL_WORLD_SIZE",
                "9",
                "the number of processes of this host, from 1 to 8",
            ),
            ("MASTER_ADDR", "", hosts),
            ("MASTER_ADDR", "two words", hosts),
            ("MASTER_PORT", "0", port),
            ("MASTER_PORT", "65535", port),
            ("MASTER_PORT", "70000", port),
            ("MASTER_PORT", "http", port),
        ];
        for (name, value, what) in cases {
            let error = read(&with(&TORCH, &[(name, value)])).unwrap_err();
            assert_eq!(error, format!("{name} is {value:?}: it should be {what}"));
        }
        let error = read(&with(&TORCH, &[("LOCAL_WORLD_SIZE", "1")])).unwrap_err();
        let local = "the number of this process on its host, from 0 to 0";
        assert_eq!(error, format!("LOCAL_RANK is \"1\": it should be {local}"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = read(&[]).unwrap_err();
        for name in [
            "RANK",
            "OMPI_COMM_WORLD_RANK",
            "SLURM_PROCID",
            "PMI_RANK",
            "MASTER_ADDR",
        ] {
            assert!(error.contains(name), "{error}");
        }
        for (gone, launcher) in [("RANK", "PyTorch's launcher"), ("WORLD_SIZE", "PyTorch's launcher")] {
            let error = read(&with(&TORCH, &[(gone, "-")])).unwrap_err();
            assert!(
                error.starts_with(&format!("{gone} is not set, though {launcher} sets it")),
                "{error}"
            );
        }
        let several_hosts: [&[(&str, &str)]; 3] = [
            &with(&TORCH, &[("MASTER_ADDR", "-")]),
            &with(&TORCH, &[("MASTER_ADDR", "-"), ("LOCAL_WORLD_SIZE", "4")]),
            &[
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "2"),
                ("SLURM_LOCALID", "0"),
                ("SLURM_NNODES", "2"),
            ],
        ];
        for variables in several_hosts {
            let error = read(variables).unwrap_err();
            assert!(error.starts_with("MASTER_ADDR is not set"), "{error}");
        }
    }
}
