//! Ranks on two hosts: network namespaces with an address each and a switch between them. What is sent from one to the
//! other goes over TCP, as there is neither memory nor a loopback that they share.
//!
//! Namespaces need Linux, root and the command `ip`; where there are none, the tests say so and are skipped.
//! `BURN_SP_FAULTS=50` runs every fault so many times.

#[path = "processes/run.rs"]
mod run;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use run::{PATIENCE, Run, TINY, as_threads, folder, losses, moment, rounds, text};

/// Two on each host: those of a host exchange heads, and keys and values travel between the hosts.
const RANKS: usize = 4;
const MESH: &str = "--ring 2 --ulysses 2";

/// Makes `$1.1`, `$1.2` and, with a port for each, `$1.switch`. Takes all of it away, with the processes therein, when its
/// input ends, as it does with the test, however that ends.
const NETWORK: &str = r#"
trap '' INT TERM
away() {
    for host in 1 2 switch; do
        for process in $(ip netns pids $1.$host); do kill -KILL $process; done
        ip netns del $1.$host
    done 2> /dev/null
}
trap "away $1" EXIT
set -e
ip netns add $1.switch
ip -n $1.switch link add switch type bridge
ip -n $1.switch link set switch up
for host in 1 2; do
    ip netns add $1.$host
    ip -n $1.switch link add port$host type veth peer name eth0 netns $1.$host
    ip -n $1.switch link set port$host master switch up
    ip -n $1.$host address add 10.77.0.$host/24 dev eth0
    ip -n $1.$host link set eth0 up
    ip -n $1.$host link set lo up
done
echo ready
read -r input
"#;

/// Runs a command line on a host, which the last number of its address names, as a remote shell would: `$1` is the hosts'
/// name, `$2` the address. Each host has a name of its own, by which Open MPI tells them apart.
const SHELL: &str = r#"
host=${2##*.}
name=$1.$host
shift 2
exec ip netns exec $name unshare --uts sh -c "hostname host$host; $*"
"#;

/// `mpirun` itself notices within 5 seconds that a host is gone, as it does not by default.
const KEEP_ALIVE: [(&str, &str); 3] = [
    ("oob_tcp_keepalive_time", "2"),
    ("oob_tcp_keepalive_intvl", "1"),
    ("oob_tcp_keepalive_probes", "3"),
];

/// Two hosts that see each other, until it is dropped.
struct Hosts {
    name: String,
    network: Child,
    /// One network at a time: the ranks of one are already more than the machine may have cores.
    _turn: MutexGuard<'static, ()>,
}

impl Hosts {
    /// None, and a line that says why, where they cannot be made.
    fn new() -> Option<Hosts> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("burn-sp-{}", std::process::id());
        let mut network = Command::new("sh")
            .args(["-c", NETWORK, "sh", &name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(network.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        if said != "ready\n" {
            let complaints = network.wait_with_output().unwrap().stderr;
            println!(
                "skipped: no network namespaces: {}",
                String::from_utf8_lossy(&complaints).trim()
            );
            return None;
        }
        Some(Hosts {
            name,
            network,
            _turn: turn,
        })
    }

    /// `train-transformer` on both hosts, with ranks 0 and 1 and the launcher on the first.
    fn start(&self, folder: &Path, flags: &str, settings: &[(&str, &str)]) -> Run {
        let shell = folder.join("shell");
        fs::write(&shell, SHELL).unwrap();
        let agent = format!("sh {} {}", shell.display(), self.name);
        let network = [
            ("plm_rsh_agent", agent.as_str()),
            // TCP and nothing else, over the network and nothing else.
            ("pml", "ob1"),
            ("btl", "tcp,self"),
            ("btl_tcp_if_include", "10.77.0.0/24"),
            ("oob_tcp_if_include", "10.77.0.0/24"),
        ];
        let settings = network.iter().chain(settings);
        let mut mpirun = Command::new("ip");
        mpirun
            .args(["netns", "exec", &format!("{}.1", self.name)])
            .args([
                "unshare",
                "--uts",
                "sh",
                "-c",
                "hostname host1; exec mpirun \"$@\"",
                "sh",
            ])
            .args(settings.flat_map(|(name, value)| ["--mca", name, value]))
            .args(["--host", "10.77.0.1:2,10.77.0.2:2"]);
        Run::under(mpirun, folder, RANKS, &format!("{flags} {MESH}"), "")
    }

    /// Takes an end of a wire down, or up again.
    fn set(&self, end: WireEnd, state: &str) {
        let (host, device) = match end {
            WireEnd::Switch => ("switch", "port2"),
            WireEnd::Second => ("2", "eth0"),
        };
        let name = format!("{}.{host}", self.name);
        let set = Command::new("ip")
            .args(["-n", &name, "link", "set", device, state])
            .status()
            .unwrap();
        assert!(set.success());
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // Its input ends, so it takes all away.
        drop(self.network.stdin.take());
        let _ = self.network.wait();
    }
}

/// The ends of the second host's wire.
#[derive(Clone, Copy)]
enum WireEnd {
    Switch,
    Second,
}

fn endless(timeout: u64) -> String {
    format!("{TINY} --steps 1000000 --timeout {timeout}")
}

/// Waits until no process of the program is left, whatever becomes of the launcher.
fn await_ends(run: &Run) {
    let begin = Instant::now();
    let is_left = |rank: &usize| Path::new("/proc").join(run.process(*rank)).exists();
    while (0..RANKS).any(|rank| is_left(&rank)) {
        let left: Vec<_> = (0..RANKS).filter(is_left).collect();
        assert!(begin.elapsed() < PATIENCE, "ranks {left:?} hang: {}", run.all());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn losses_are_those_of_threads() {
    let Some(hosts) = Hosts::new() else { return };
    let folder = folder("hosts-losses");
    let line = format!(
        "{TINY} --steps 20 --batch 2 --timeout 60 --text {}",
        text(&folder).display()
    );
    let file = |name: &str| folder.join(name).with_extension("json");
    as_threads(&format!("{line} {MESH}"), &file("threads"));

    let report = |name: &str| format!("{line} --report {}", file(name).display());
    let mut run = hosts.start(&folder, &report("hosts"), &[]);
    run.succeeds();
    // A network that is away for a moment is no fault: TCP sends again what was lost.
    let mut run = hosts.start(&folder, &report("moment"), &[]);
    run.await_steps(1);
    hosts.set(WireEnd::Switch, "down");
    std::thread::sleep(Duration::from_secs(1));
    hosts.set(WireEnd::Switch, "up");
    run.succeeds();

    let [threads, hosts, moment] = ["threads", "hosts", "moment"].map(|name| fs::read_to_string(file(name)).unwrap());
    assert_eq!(losses(&threads).len(), 41);
    assert_eq!(losses(&threads), losses(&hosts));
    assert_eq!(losses(&threads), losses(&moment));
}

#[test]
fn a_process_killed_on_one_host_is_named_on_both() {
    let Some(hosts) = Hosts::new() else { return };
    for round in 0..rounds().max(4) {
        let rank = round % RANKS;
        let mut run = hosts.start(&folder("hosts-killed"), &endless(4), &[]);
        run.await_steps(1);
        std::thread::sleep(moment(round));
        run.signal(rank, "KILL");
        let survivors = (0..RANKS).filter(|other| *other != rank);
        run.fails(survivors, &[&format!("rank {rank} has died")]);
    }
}

#[test]
fn a_host_that_is_cut_off_is_reported_on_both_sides() {
    let Some(hosts) = Hosts::new() else { return };
    for round in 0..rounds() {
        for end in [WireEnd::Switch, WireEnd::Second] {
            let mut run = hosts.start(&folder("hosts-cut"), &endless(4), &[]);
            run.await_steps(1);
            std::thread::sleep(moment(round));
            hosts.set(end, "down");
            await_ends(&run);
            // The launcher waits for the host until it hears of it again.
            hosts.set(end, "up");
            let late = ["timeout: ", "waited 4000 ms in "];
            let lost = ["rank 2: does not answer", "rank 3: does not answer"];
            run.fails(0..2, &[late, lost].concat());
            run.fails(2..4, &[late.as_slice(), &["rank 0 does not answer"]].concat());
        }
    }
}

#[test]
fn a_launcher_that_asks_for_its_hosts_ends_the_run() {
    let Some(hosts) = Hosts::new() else { return };
    for round in 0..rounds() {
        let mut run = hosts.start(&folder("hosts-asked"), &endless(60), &KEEP_ALIVE);
        run.await_steps(1);
        std::thread::sleep(moment(round));
        hosts.set(WireEnd::Switch, "down");
        run.end();
        await_ends(&run);
        run.fails(0..RANKS, &["ended by SIGTERM"]);
        assert!(
            run.all().contains("lost communication with a remote daemon"),
            "{}",
            run.all()
        );
        hosts.set(WireEnd::Switch, "up");
    }
}
