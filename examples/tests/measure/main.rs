//! `measure`: every length on every mesh, in a table, in JSON and on a page that a browser shows.

mod browser;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn_sp_examples::InputError;
use burn_sp_examples::flags;
use burn_sp_examples::measure::{MeasureConfig, MeasureFlags, Measurement, MeshFlag, write_page};

const TINY: &str = "--hidden 32 --layers 2 --heads 4 --steps 3 --lr 0.01 --dropout 0.1 --timeout 60";
const LABELS: [&str; 3] = ["off", "ulysses 2", "ring 2 x tp 2"];

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("measure").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn the_program_compares_every_length_on_every_mesh() {
    let folder = folder("run");
    // A name that is markup, unless it is escaped.
    let text = "a<b>&c.txt";
    fs::write(
        folder.join(text),
        "The quick brown fox jumps over the lazy dog. ".repeat(60),
    )
    .unwrap();
    let line = format!("{TINY} --seq-lens 128 64 --meshes off ulysses=2 ring=2,tp=2 --report out.json --text {text}");
    let output = Command::new(env!("CARGO_BIN_EXE_measure"))
        .args(line.split(' '))
        .current_dir(&folder)
        .output()
        .unwrap();
    let [told, printed] = [output.stderr, output.stdout].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{told}");
    for words in [
        "run 1 of 6: 64 tokens, off",
        "run 6 of 6: 128 tokens, ring 2 x tp 2",
        "page: measure.html",
        "report: out.json",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }

    let json = fs::read_to_string(folder.join("out.json")).unwrap();
    let measurement: Measurement = serde_json::from_str(&json).unwrap();
    check_figures(&measurement);
    check_table(&measurement, &printed);
    check_config(&measurement, text);
    check_page(&measurement, &folder.join("measure.html"), text);
    check_edge(measurement, &folder.join("edge.html"));
}

fn check_figures(measurement: &Measurement) {
    assert_eq!(measurement.program, "measure");
    assert_eq!((measurement.summary.len(), measurement.runs.len()), (6, 6));
    for (index, (row, run)) in measurement.summary.iter().zip(&measurement.runs).enumerate() {
        let label = LABELS[index % 3];
        assert_eq!((row.seq_len, row.mesh.label().as_str()), ([64, 128][index / 3], label));
        assert_eq!(
            (run.mesh, run.config["seq_len"].as_u64()),
            (row.mesh.0, Some(row.seq_len as u64))
        );
        assert_eq!((run.steps.len(), row.last_loss), (3, run.steps[2].loss));
        assert_eq!(Some(&row.peak_bytes), run.memory.peak_bytes_per_rank.iter().max());
        assert!(
            row.peak_bytes > row.activation_bytes && row.activation_bytes > 10_000,
            "{row:?}"
        );
        assert!(row.tokens_per_second > 0.0 && row.step_seconds_median > 0.0, "{row:?}");
        // The promise that the program shows.
        match label {
            "off" => assert_eq!((row.communication_share, row.loss_difference), (0.0, None)),
            _ => assert!(
                row.communication_share > 0.0 && row.loss_difference < Some(1e-4),
                "{row:?}"
            ),
        }
    }
    let [short, off, split] = [0, 3, 4].map(|row| measurement.summary[row].activation_bytes);
    assert!(short < off && split < off, "{short}, {off} and {split}");
    // Workers of the thread pool count for no rank, also where it is the only one.
    assert!(measurement.runs[0].memory.other_threads_peak_bytes > 0);
}

fn check_table(measurement: &Measurement, printed: &str) {
    let rows: Vec<_> = printed
        .lines()
        .filter(|line| LABELS.iter().any(|label| line.contains(&format!(" {label} "))))
        .collect();
    assert_eq!(rows.len(), 6, "{printed}");
    for (line, row) in rows.iter().zip(&measurement.summary) {
        let loss = format!("{:.4}", row.last_loss);
        assert!(line.contains(&loss) && line.contains("iB"), "{line}");
    }
    for words in ["peak memory a rank", "tokens/s", "in communication", "loss differs by"] {
        assert!(printed.contains(words), "{words}: {printed}");
    }
}

/// The configuration of a report can be given to measure again.
fn check_config(measurement: &Measurement, text: &str) {
    let flags: MeasureFlags = serde_json::from_value(measurement.config.clone()).unwrap();
    let again = flags.resolve().unwrap();
    let runs: Vec<_> = measurement.runs.iter().map(|run| run.config.clone()).collect();
    assert_eq!(
        serde_json::to_value(&again.runs).unwrap(),
        serde_json::Value::Array(runs)
    );
    assert_eq!(again.json(), measurement.config);
    assert_eq!(again.runs[0].text, Some(vec![PathBuf::from(text)]));
}

fn check_page(measurement: &Measurement, page: &Path, text: &str) {
    let html = fs::read_to_string(page).unwrap();
    // Nothing to fetch and nothing to run. The name of SVG's namespace is a name.
    let alone = html.replace("http://www.w3.org/2000/svg", "");
    for outside in [
        "http",
        "<script",
        "<link",
        "<img",
        "src=",
        "url(",
        "@import",
        "javascript:",
    ] {
        assert!(!alone.contains(outside), "{outside}");
    }
    assert!(html.contains("a&lt;b&gt;&amp;c.txt") && !html.contains(text));

    for width in [1200, 400] {
        let Some(view) = browser::open(page, width) else {
            println!("skipped: no browser; install chromium, or name one by CHROME");
            return;
        };
        assert!(view.errors.is_empty(), "{:?}", view.errors);
        let each = |count: usize| LABELS.map(|label| (label.to_string(), count)).to_vec();
        let kinds = [
            "parameters",
            "optimizer",
            "gradients",
            "activations",
            "measured peak, the number",
        ];
        // Of every run: a part of its bar each, and the mark. A line, with a point for each length. For each length a line
        // and three rings.
        let expected = [
            ("Memory of a rank", kinds.map(|kind| (kind.to_string(), 6)).to_vec()),
            ("Speed", each(3)),
            ("Time in communication", each(3)),
            ("Loss", each(8)),
        ];
        assert_eq!(view.charts.len(), expected.len());
        for (chart, (title, shapes)) in view.charts.iter().zip(expected) {
            assert_eq!((chart.title.as_str(), &chart.shapes), (title, &shapes));
            assert!(chart.width >= 300 && chart.height >= 180, "{chart:?}");
            assert!(chart.cut.is_empty() && chart.hidden.is_empty(), "{chart:?}");
        }
        assert_eq!(view.rows.len(), 6);
        for (cells, row) in view.rows.iter().zip(&measurement.summary) {
            assert_eq!((cells.len(), cells[1].as_str()), (9, row.mesh.label().as_str()));
        }
        let field = |name: &str| {
            view.fields
                .iter()
                .find(|(field, _)| field == name)
                .map(|(_, value)| value.as_str())
        };
        assert_eq!((field("text"), field("hidden")), (Some(text), Some("32")));
        assert_eq!(field("meshes"), Some("off ulysses=2 ring=2,tp=2"));
    }
}

/// One run of one step, whose memory was not measured, has charts too.
fn check_edge(mut measurement: Measurement, page: &Path) {
    measurement.summary.truncate(1);
    measurement.runs.truncate(1);
    measurement.runs[0].steps.truncate(1);
    measurement.summary[0].peak_bytes = 0;
    write_page(&measurement, page).unwrap();
    assert!(fs::read_to_string(page).unwrap().contains("not measured"));
    if let Some(view) = browser::open(page, 800) {
        assert!(view.errors.is_empty(), "{:?}", view.errors);
        let shapes: Vec<_> = view.charts.iter().map(|chart| chart.shapes[0].1).collect();
        // A part of a bar and three points: a line from a point to itself has no width.
        assert_eq!(shapes, [1, 1, 1, 1]);
        assert!(
            view.charts
                .iter()
                .all(|chart| chart.cut.is_empty() && chart.hidden.is_empty()),
            "{view:?}"
        );
    }
    let error = write_page(&measurement, Path::new("/no/such/folder/page.html")).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert!(
        error.to_string().starts_with("--page /no/such/folder/page.html: "),
        "{error}"
    );
}

fn resolve(line: &str) -> Result<MeasureConfig, InputError> {
    let arguments = std::iter::once("measure").chain(line.split_whitespace());
    let flags: MeasureFlags = flags::parse(arguments.map(OsString::from))?;
    flags.resolve()
}

#[test]
fn what_cannot_be_measured() {
    for (line, expected) in [
        (
            "--meshes rings=2",
            "there is no axis \"rings\"; use off, or dp, ring, ulysses and tp as in ring=2,ulysses=2",
        ),
        ("--meshes off,ring=2", "there is no axis \"off\""),
        ("--meshes ring", "ring needs a number of ranks, such as ring=2"),
        ("--meshes ring=0", "ring needs a number of ranks"),
        ("--meshes ring=two", "ring needs a number of ranks"),
        ("--meshes ring=2,ring=2", "ring is named twice"),
        ("--meshes off ulysses=1000", "--ulysses 1000: at most 256 ranks run"),
        ("--meshes off ring=20,ulysses=20", "at most 256 run"),
        (
            "--meshes off --ulysses 2",
            "--ulysses 2 beside --meshes: each of those names its own axes",
        ),
        ("--meshes off --ranks 2", "--ranks 2 beside --meshes"),
        ("--meshes", "a value is required for '--meshes"),
        (
            "--seq-lens 64 --seq-len 64",
            "--seq-len 64 beside --seq-lens: leave one of the two out",
        ),
        ("--seq-lens 64 many", "--seq-lens"),
        ("--seq-lens 0 64", "--seq-len 0: give it at least 1"),
        ("--seq-len 0", "--seq-len 0"),
        (
            "--seq-lens 64 2 --meshes off ring=4",
            "--seq-len 2 on 4 ranks (ring 4): a rank would have no token",
        ),
        ("--seq-lens 64 999999999", "at most 134,217,728 tokens"),
        ("--ranks 0", "--ranks 0: give it at least 1"),
        ("--ranks 300", "at most 256 ranks run"),
        ("--ranks 3 --ulysses 2", "ulysses 2 needs 2 ranks, but 3 were given"),
        ("--meshes off dp=2", "--batch 1 --dp 2: a rank would have no sequence"),
        ("--hidden 256 --heads 6", "use --hidden 252 or 258"),
        (
            "--page /no/such/folder/page.html",
            "--page /no/such/folder/page.html: /no/such/folder is no folder",
        ),
        ("--page /", "--page /: that is a folder"),
        ("--page a --report a", "--page and --report name the same file; use two"),
        ("--page a --trace a", "--page and --trace name the same file; use two"),
        ("--report /no/such/folder/out.json", "--report"),
    ] {
        let error = resolve(line).expect_err(line).to_string();
        assert!(error.contains(expected) && !error.contains('\n'), "{line}: {error}");
    }
    for (field, expected) in [
        (r#"{"meshes": []}"#, "--meshes: there is none"),
        (r#"{"seq_lens": []}"#, "--seq-lens: there is none"),
    ] {
        let flags: MeasureFlags = serde_json::from_str(field).unwrap();
        assert!(flags.resolve().unwrap_err().to_string().contains(expected));
    }
    let error = serde_json::from_str::<MeasureFlags>(r#"{"meshes": ["rings=2"]}"#).unwrap_err();
    assert!(error.to_string().contains("\"rings=2\": there is no axis"), "{error}");
}

#[test]
fn what_is_measured_unless_flags_say_otherwise() {
    let meshes = |line: &str| {
        let meshes = resolve(line).unwrap().meshes;
        meshes.iter().map(MeshFlag::to_string).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(meshes(""), "off ulysses=2 ring=2 tp=2");
    assert_eq!(meshes("--ranks 4"), "off ulysses=4 ring=4 tp=4");
    assert_eq!(meshes("--ranks 1"), "off");
    assert_eq!(meshes("--ring 2 --tp 2"), "off ring=2,tp=2");
    assert_eq!(meshes("--meshes ring=2 ulysses=1,ring=2 off tp=1"), "ring=2 off");

    let lengths = |line: &str| resolve(line).unwrap().seq_lens;
    assert_eq!(lengths(""), [512, 1024, 2048]);
    assert_eq!(lengths("--seq-len 1000"), [250, 500, 1000]);
    assert_eq!(lengths("--ranks 1 --seq-len 2"), [1, 2]);
    assert_eq!(lengths("--seq-lens 64 32 64"), [32, 64]);

    let config = resolve("--meshes off ring=2 --seq-lens 64 32").unwrap();
    assert_eq!(config.page, Path::new("measure.html"));
    let runs: Vec<_> = config
        .runs
        .iter()
        .map(|train| (train.run.seq_len, train.run.mesh().to_string()))
        .collect();
    let runs: Vec<_> = runs.iter().map(|(length, mesh)| (*length, mesh.as_str())).collect();
    assert_eq!(
        runs,
        [(32, "one rank"), (32, "ring 2"), (64, "one rank"), (64, "ring 2")]
    );
    assert!(
        config
            .runs
            .iter()
            .all(|train| (train.run.steps, train.run.batch) == (8, 1))
    );
}
