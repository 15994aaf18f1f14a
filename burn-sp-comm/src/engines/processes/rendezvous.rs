//! How processes that know nothing of each other but a host and a port find the hub.
//!
//! Rank 0 listens there until all others have come, and then tells each where the hub is. If anything is amiss, whoever
//! has come is told what.

use super::environment::Environment;
use super::hub::Address;
use super::wire::{receive, send};
use crate::CommError;
use crate::engines::shared::{names, text};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Tells processes of this library from strangers.
const MAGIC: u64 = 0x6275_726e_5f73_7031;

/// How long a stranger may hold a line open without a word.
const STUCK: Duration = Duration::from_secs(2);

/// A rank's first word.
#[derive(Serialize, Deserialize)]
struct Hello {
    magic: u64,
    rank: usize,
    size: usize,
}

/// Rank 0's answer: where the hub is, or why the run cannot start.
type Answer = Result<Address, String>;

/// Rank 0's open door.
pub struct Door {
    listener: TcpListener,
    size: usize,
    /// As others are told it.
    place: String,
}

/// The others, who have come and wait for the answer.
pub struct Guests {
    /// By rank, where each came from.
    lines: Vec<(usize, TcpStream, SocketAddr)>,
}

impl Door {
    /// Opens rank 0's port: to this host alone, where the address means this host alone.
    ///
    /// # Errors
    /// If the port cannot be had.
    pub fn open(environment: &Environment) -> Result<Door, CommError> {
        let (host, port) = (&environment.host, environment.port);
        let place = format!("{host}:{port}");
        let local = host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        let listener = match local {
            true => TcpListener::bind((host.as_str(), port)),
            // Without IPv6, IPv4 alone.
            false => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
                io::ErrorKind::AddrInUse => Err(error),
                _ => TcpListener::bind(("0.0.0.0", port)),
            }),
        };
        let listener = listener.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        let listener = listener.map_err(|error| {
            CommError::failed(
                0,
                format!("port {port} cannot be opened: {error}; set MASTER_PORT to another one, the same on all ranks"),
            )
        })?;
        let size = environment.size;
        Ok(Door { listener, size, place })
    }

    /// Waits until all others have come.
    ///
    /// # Errors
    /// If they do not come before the deadline, or do not fit together; those that have come are told so.
    pub fn gather(self, deadline: Instant) -> Result<Guests, CommError> {
        let began = Instant::now();
        let (greeted, greetings) = channel();
        let mut guests = Guests { lines: Vec::new() };
        while guests.lines.len() + 1 < self.size {
            if let Ok((line, from)) = self.listener.accept() {
                listen(line, from, greeted.clone());
            }
            let Ok((hello, line, from)) = greetings.recv_timeout(Duration::from_millis(2)) else {
                if Instant::now() >= deadline {
                    let absent = (1..self.size).filter(|rank| guests.lines.iter().all(|(guest, ..)| guest != rank));
                    let report = format!(
                        "rank 0 waited {} at {} for {}",
                        text(began.elapsed()),
                        self.place,
                        names(absent)
                    );
                    guests.refuse(&format!("timeout: {report}"));
                    return Err(CommError::Timeout { report });
                }
                continue;
            };
            let (Hello { rank, size, .. }, expected) = (hello, self.size);
            let twin = guests
                .lines
                .iter()
                .find(|(guest, ..)| *guest == rank)
                .map(|(.., from)| *from);
            guests.lines.push((rank, line, from));
            let fault = if size != expected {
                Some(format!(
                    "rank 0 was started as one of {expected}, rank {rank} ({from}) as one of {size}"
                ))
            } else if rank == 0 || rank >= size {
                Some(format!("a second rank {rank} has come from {from}, of {size}"))
            } else {
                twin.map(|twin| format!("two processes are rank {rank}: one from {twin}, one from {from}"))
            };
            if let Some(fault) = fault {
                guests.refuse(&fault);
                return Err(CommError::failed(0, fault));
            }
        }
        Ok(guests)
    }
}

/// Hears a rank's first word, on a thread of its own, as a stranger may have none.
fn listen(line: TcpStream, from: SocketAddr, greeted: Sender<(Hello, TcpStream, SocketAddr)>) {
    let hear = move || {
        let mut line = line;
        let hello = line
            .set_nonblocking(false)
            .and_then(|()| line.set_read_timeout(Some(STUCK)))
            .and_then(|()| line.set_write_timeout(Some(STUCK)))
            .and_then(|()| receive::<Hello>(&mut line));
        if let Ok(hello) = hello
            && hello.magic == MAGIC
        {
            // Nobody listens any more when the run has failed.
            let _ = greeted.send((hello, line, from));
        }
    };
    if let Err(error) = std::thread::Builder::new().name("rendezvous".into()).spawn(hear) {
        tracing::debug!(%error, "a line at the rendezvous is dropped");
    }
}

impl Guests {
    /// Tells everyone where the hub is.
    ///
    /// # Errors
    /// If someone has gone meanwhile.
    pub fn welcome(mut self, hub: &Address) -> Result<(), CommError> {
        for (rank, line, from) in &mut self.lines {
            send(line, &Answer::Ok(hub.clone()))
                .map_err(|error| CommError::failed(0, format!("rank {rank} ({from}) has gone: {error}")))?;
        }
        Ok(())
    }

    /// Tells everyone that the run cannot start.
    pub fn refuse(&mut self, fault: &str) {
        for (_, line, _) in &mut self.lines {
            // Who has gone needs no answer.
            let _ = send(line, &Answer::Err(fault.into()));
        }
    }
}

/// Where the hub is, as another rank than 0 learns it.
///
/// # Errors
/// If rank 0 does not answer before the deadline, or says that the run cannot start.
pub fn find(environment: &Environment, deadline: Instant) -> Result<Address, CommError> {
    let Environment {
        rank, size, host, port, ..
    } = environment;
    let began = Instant::now();
    let hello = Hello {
        magic: MAGIC,
        rank: *rank,
        size: *size,
    };
    loop {
        let fault = match ask(&hello, host, *port, deadline) {
            Ok(Ok(address)) => return Ok(address),
            Ok(Err(fault)) => return Err(CommError::failed(0, fault)),
            Err(fault) => fault,
        };
        if Instant::now() >= deadline {
            return Err(CommError::Timeout {
                report: format!(
                    "rank {rank} waited {} for rank 0 at {host}:{port}: {fault}; is rank 0 there, and MASTER_ADDR its \
                     host?",
                    text(began.elapsed())
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// One try. The hub's addresses begin with the one at which rank 0 has just been reached.
fn ask(hello: &Hello, host: &str, port: u16, deadline: Instant) -> io::Result<Answer> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        let mut line = match TcpStream::connect_timeout(&address, STUCK) {
            Ok(line) => line,
            Err(error) => {
                last = error;
                continue;
            }
        };
        // Rank 0 answers when all have come, or its own deadline has passed: which may be a little after this one.
        let patience = deadline.saturating_duration_since(Instant::now()) + STUCK;
        line.set_read_timeout(Some(patience))?;
        send(&mut line, hello)?;
        let answer = receive::<Answer>(&mut line)?;
        let reached = line.peer_addr()?.ip();
        return Ok(answer.map(|mut hub| {
            if let Some(port) = hub.addresses.first().map(SocketAddr::port) {
                hub.addresses.insert(0, SocketAddr::new(reached, port));
            }
            hub
        }));
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::thread::spawn;

    /// A free port: two tests never get the same, as the system gives them out in turn.
    fn free_port() -> u16 {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.local_addr().unwrap().port()
    }

    fn environment(rank: usize, size: usize, port: u16) -> Environment {
        Environment {
            rank,
            size,
            local_rank: rank,
            local_size: Some(size),
            host: "127.0.0.1".into(),
            port,
        }
    }

    fn after(milliseconds: u64) -> Instant {
        Instant::now() + Duration::from_millis(milliseconds)
    }

    fn hub() -> Address {
        Address {
            addresses: vec!["192.0.2.7:99".parse().unwrap()],
            cookie: 42,
        }
    }

    fn gather(size: usize, port: u16, deadline: Instant) -> Result<(), CommError> {
        Door::open(&environment(0, size, port))?
            .gather(deadline)?
            .welcome(&hub())
    }

    #[test]
    fn all_ranks_learn_where_the_hub_is() {
        let port = free_port();
        // Some come before the door is open.
        let others: Vec<_> = (1..5)
            .map(|rank| spawn(move || find(&environment(rank, 5, port), after(10_000))))
            .collect();
        std::thread::sleep(Duration::from_millis(30));
        gather(5, port, after(10_000)).unwrap();
        for other in others {
            let found = other.join().unwrap().unwrap();
            // First the address at which rank 0 was reached, with the hub's port.
            let expected: Vec<SocketAddr> = vec!["127.0.0.1:99".parse().unwrap(), "192.0.2.7:99".parse().unwrap()];
            assert_eq!((found.addresses, found.cookie), (expected, 42));
        }
    }

    #[test]
    fn one_rank_waits_for_nobody() {
        gather(1, free_port(), after(0)).unwrap();
    }

    #[test]
    fn strangers_are_let_alone() {
        let port = free_port();
        let door = Door::open(&environment(0, 2, port)).unwrap();
        let mut talker = TcpStream::connect(("127.0.0.1", port)).unwrap();
        talker.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut like_us = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (magic, rank, size) = (MAGIC + 1, 1, 2);
        send(&mut like_us, &Hello { magic, rank, size }).unwrap();
        drop(TcpStream::connect(("127.0.0.1", port)).unwrap());
        let other = spawn(move || find(&environment(1, 2, port), after(10_000)));
        door.gather(after(10_000)).unwrap().welcome(&hub()).unwrap();
        assert_eq!(other.join().unwrap().unwrap().cookie, 42);
    }

    #[test]
    fn a_port_in_use_is_named() {
        let port = free_port();
        let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let error = gather(2, port, after(10_000)).unwrap_err().to_string();
        assert!(error.contains(&format!("port {port} cannot be opened")), "{error}");
        assert!(error.contains("set MASTER_PORT to another one"), "{error}");
    }

    /// The faulty ones fail with the report that rank 0 gets.
    fn fails_alike(size: usize, others: Vec<(usize, usize)>, expected: &[&str]) {
        let port = free_port();
        let others: Vec<_> = others
            .into_iter()
            .map(|(rank, size)| spawn(move || find(&environment(rank, size, port), after(10_000))))
            .collect();
        let error = gather(size, port, after(10_000)).unwrap_err();
        for part in expected {
            assert!(error.to_string().contains(part), "{error}");
        }
        for other in others {
            assert_eq!(other.join().unwrap().unwrap_err(), error);
        }
    }

    #[test]
    fn other_sizes_are_refused() {
        let expected = ["rank 0 was started as one of 3, rank 1 (127.0.0.1", "as one of 2"];
        fails_alike(3, vec![(1, 2)], &expected);
    }

    #[test]
    fn two_processes_of_one_rank_are_refused() {
        fails_alike(
            4,
            vec![(2, 4), (2, 4)],
            &["two processes are rank 2: one from 127.0.0.1"],
        );
    }

    #[test]
    fn a_second_rank_0_is_refused() {
        fails_alike(3, vec![(0, 3)], &["a second rank 0 has come from 127.0.0.1"]);
    }

    #[test]
    fn a_rank_that_never_comes_fails_the_others() {
        let port = free_port();
        let other = spawn(move || find(&environment(2, 4, port), after(10_000)));
        let error = gather(4, port, after(600)).unwrap_err();
        let CommError::Timeout { report } = &error else {
            panic!("{error}")
        };
        assert!(report.contains(" for rank 1, rank 3"), "{report}");
        let told = other.join().unwrap().unwrap_err().to_string();
        assert!(told.contains(report), "{told}");
    }

    #[test]
    fn without_rank_0_the_others_give_up_at_the_deadline() {
        let port = free_port();
        let error = find(&environment(1, 2, port), after(200)).unwrap_err().to_string();
        assert!(error.starts_with("timeout: rank 1 waited"), "{error}");
        assert!(error.contains(&format!("for rank 0 at 127.0.0.1:{port}")), "{error}");
    }
}
