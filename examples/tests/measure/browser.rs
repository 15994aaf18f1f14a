//! What a real browser sees in a page.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A browser is slow to start on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// A chart as it was laid out.
#[derive(Debug)]
pub struct Chart {
    pub title: String,
    /// In pixels.
    pub width: usize,
    pub height: usize,
    /// Every name of the legend, and how many shapes have its colour.
    pub shapes: Vec<(String, usize)>,
    /// Texts that reach beyond the chart, or have no size.
    pub cut: String,
    /// Texts that lie on others.
    pub hidden: String,
}

/// A page as it was laid out.
#[derive(Debug)]
pub struct View {
    pub charts: Vec<Chart>,
    /// Cells of the table, row by row.
    pub rows: Vec<Vec<String>>,
    /// Fields of the configuration and their values.
    pub fields: Vec<(String, String)>,
    /// What went wrong, by the page and by the browser's console.
    pub errors: Vec<String>,
}

/// Writes down what has been laid out, a line each, its parts separated by bars.
const PROBE: &str = r##"<script>
const lines = [];
addEventListener("error", event => lines.push("error|" + (event.message || event.target.outerHTML)), true);
addEventListener("load", () => {
    for (const figure of document.querySelectorAll("figure")) {
        const svg = figure.querySelector("svg"), chart = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent.trim(), text.getBoundingClientRect()]);
        const cut = texts.filter(([, box]) => !box.width || !box.height || box.left < chart.left || box.top < chart.top
            || box.right > chart.right || box.bottom > chart.bottom);
        const on = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
        const hidden = texts.filter(([, box], at) => texts.some(([, other], index) => index < at && on(box, other)));
        const shapes = [...figure.querySelectorAll(".legend li")].map(item => {
            const color = item.querySelector("i").getAttribute("style").split(":")[1];
            const drawn = svg.querySelectorAll(`[stroke="${color}"], [fill="${color}"]:not(text)`);
            return [...drawn].filter(shape => shape.getBoundingClientRect().width).length + " " + item.textContent;
        });
        lines.push(["chart", figure.querySelector("h2").textContent, Math.round(chart.width), Math.round(chart.height),
            shapes.join(";"), cut.map(([text]) => text).join(";"), hidden.map(([text]) => text).join(";")].join("|"));
    }
    for (const row of document.querySelectorAll("tbody tr"))
        lines.push(["row", ...[...row.cells].map(cell => cell.textContent)].join("|"));
    for (const field of document.querySelectorAll("dl div"))
        lines.push(["field", ...[...field.children].map(part => part.textContent)].join("|"));
    if (document.documentElement.scrollWidth > innerWidth) lines.push("error|the page is wider than its window");
    const probe = document.createElement("pre");
    probe.id = "probe";
    probe.textContent = lines.join("\n");
    document.body.append(probe);
});
</script>"##;

/// The environment's `CHROME`, or what is found under a name that it has somewhere.
fn browser() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("CHROME") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let folders: Vec<_> = std::env::split_paths(&path).collect();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let mut files = names
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    files.find(|file| file.is_file())
}

/// Opens a page in a window of this width; none if there is no browser.
pub fn open(page: &Path, width: usize) -> Option<View> {
    let browser = browser()?;
    let folder = page.with_extension(format!("{width}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let html = fs::read_to_string(page).unwrap();
    let probed = folder.join("probed.html");
    fs::write(&probed, html.replacen("<head>", &format!("<head>{PROBE}"), 1)).unwrap();

    let [dom, log] = ["dom", "log"].map(|name| folder.join(name));
    let mut child = Command::new(browser)
        .args("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync".split(' '))
        .args(
            "--disable-background-networking --disable-component-update --enable-logging=stderr --dump-dom".split(' '),
        )
        .arg(format!("--window-size={width},1000"))
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .arg(format!("file://{}", probed.display()))
        .stdin(Stdio::null())
        .stdout(File::create(&dom).unwrap())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > LIMIT => {
                child.kill().unwrap();
                panic!("the browser took longer than {LIMIT:?}: {}", read(&log));
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    assert!(status.success(), "{status}: {}", read(&log));
    Some(view(&read(&dom), &read(&log)))
}

/// A browser's log need not be UTF-8.
fn read(file: &Path) -> String {
    String::from_utf8_lossy(&fs::read(file).unwrap()).into_owned()
}

fn view(dom: &str, log: &str) -> View {
    let probe = dom.split_once("<pre id=\"probe\">").expect("no probe ran").1;
    let probe = probe.split_once("</pre>").unwrap().0;
    // Escaped as text is, in the browser's way.
    let probe = probe.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let mut view = View {
        charts: Vec::new(),
        rows: Vec::new(),
        fields: Vec::new(),
        errors: log
            .lines()
            .filter(|line| line.contains("CONSOLE"))
            .map(String::from)
            .collect(),
    };
    for line in probe.lines() {
        let parts: Vec<_> = line.split('|').map(String::from).collect();
        match parts[0].as_str() {
            "chart" => view.charts.push(Chart {
                title: parts[1].clone(),
                width: parts[2].parse().unwrap(),
                height: parts[3].parse().unwrap(),
                shapes: parts[4].split(';').map(shapes).collect(),
                cut: parts[5].clone(),
                hidden: parts[6].clone(),
            }),
            "row" => view.rows.push(parts[1..].to_vec()),
            "field" => view.fields.push((parts[1].clone(), parts[2].clone())),
            _ => view.errors.push(line.into()),
        }
    }
    view
}

fn shapes(part: &str) -> (String, usize) {
    let (count, name) = part.split_once(' ').unwrap();
    (name.into(), count.parse().unwrap())
}
