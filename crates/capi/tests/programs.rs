//! Programs in C: the examples, and tests of wrong use.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use udm::volume::{Options, Volume};
use udm_export::vhost::Server;

const MIB: u64 = 1 << 20;

/// The shared library that these tests were built with.
fn library() -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name("libudm_capi.so");
    assert!(library.exists(), "{} is not there", library.display());
    library
}

/// Compiles a program, with every warning an error, and puts the library next to it under the
/// library's soname.
fn compiled(source: &str, folder: &Path) -> PathBuf {
    let program = folder.join("program");
    std::os::unix::fs::symlink(library(), folder.join("libudm.so.0")).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .args([&program, &root.join(source), &library()])
        .arg("-I")
        .arg(root.join("include"))
        .output()
        .expect("cc, which Rust's own linking needs too");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

fn command(program: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).env("LD_LIBRARY_PATH", program.parent().unwrap());
    command
}

fn run(program: &Path, words: &[&str]) -> String {
    let output = command(program, words).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {:?} {errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// A table over files of this folder.
fn table(folder: &Path, block_bytes: u64) -> String {
    let file = |name: &str, bytes: u64| {
        let path = folder.join(name);
        if !path.exists() {
            std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        }
        path.display().to_string()
    };
    let (origin, cache) = (file("origin", 16 * MIB), file("cache", 8 * MIB));
    format!("0 32768 writecache s {origin} {cache} {block_bytes} 0")
}

#[test]
fn what_is_wrong_gets_a_number_and_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("tests/hostile.c", folder.path());
    let said = run(&program, &[&table(folder.path(), 512)]);
    assert_eq!(said, "all is refused that should be\n");
}

#[test]
fn a_fork_a_signal_and_a_close_are_what_the_header_says() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("tests/process.c", folder.path());
    let cache = folder.path().join("cache");
    let table = table(folder.path(), 4096).replace("writecache s", "writecache p");
    let said = run(&program, &[&table, cache.to_str().unwrap()]);
    assert_eq!(said, "the process keeps what is its own\n");
}

#[test]
fn the_example_copies_a_file_to_a_device_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("examples/copy.c", folder.path());
    let table = table(folder.path(), 4096);
    let (source, copy) = (folder.path().join("source"), folder.path().join("copy"));
    let bytes: Vec<u8> = (0..3_002_368_u32).map(|n| (n / 7 + n / 4096 + 1) as u8).collect();
    std::fs::write(&source, &bytes).unwrap();
    assert_eq!(run(&program, &[source.to_str().unwrap(), &table]), "3002368 bytes\n");
    let said = run(&program, &["--from", &table, copy.to_str().unwrap()]);
    assert_eq!(said, format!("{} bytes\n", 16 * MIB));
    let copied = std::fs::read(&copy).unwrap();
    assert!(copied[..bytes.len()] == bytes[..]);
    assert!(copied[bytes.len()..].iter().all(|byte| *byte == 0));
}

/// Returns the program's result, once the kernel has closed the files in a killed program's ring,
/// which happens a moment later.
fn check_when_free(program: &Path, words: &[&str]) -> u64 {
    let start = Instant::now();
    loop {
        let output = command(program, words).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            return String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        }
        assert!(errors.contains("is in use"), "{words:?}: {:?} {errors}", output.status);
        assert!(start.elapsed() < Duration::from_secs(60), "{words:?}: {errors}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_killed_log_has_every_record_that_was_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("examples/log.c", folder.path());
    let table = table(folder.path(), 4096);
    let memory = folder.path().to_str().unwrap();
    for _ in 0..3 {
        let mut writer = command(&program, &[&table, memory, "write", "30000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        let mut last = lines.by_ref().take(500).last().unwrap().unwrap();
        writer.kill().unwrap();
        writer.wait().unwrap();
        // Lines that are still in the pipe were also acknowledged; a last line may be truncated.
        for line in lines.map_while(Result::ok) {
            last = if line.len() >= last.len() { line } else { last };
        }
        let acknowledged: u64 = last.parse().unwrap();
        let found = check_when_free(&program, &[&table, memory, "check"]);
        assert!(found > acknowledged, "{found} records, but {acknowledged} was acknowledged");
    }
}

/// Starts a server of a writecache over files of this folder, and returns its URI.
fn serve(folder: &Path, words: &str) -> (Volume, Server, String) {
    let uri = format!("vhost-user://{}/socket{words}", folder.display());
    let volume = Volume::open("served", &table(folder, 4096), &Options::without_memory()).unwrap();
    let server = Server::start(volume.device(), &uri.parse().unwrap()).unwrap();
    (volume, server, uri)
}

#[test]
fn the_example_copies_a_file_to_a_server_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("examples/copy.c", folder.path());
    let (source, copy) = (folder.path().join("source"), folder.path().join("copy"));
    let bytes: Vec<u8> = (0..3_002_368_u32).map(|n| (n / 7 + n / 4096 + 1) as u8).collect();
    std::fs::write(&source, &bytes).unwrap();
    for words in ["", "?poll=never"] {
        let (volume, server, uri) = serve(folder.path(), words);
        assert_eq!(run(&program, &[source.to_str().unwrap(), &uri]), "3002368 bytes\n");
        run(&program, &["--from", &uri, copy.to_str().unwrap()]);
        let copied = std::fs::read(&copy).unwrap();
        assert!(copied[..bytes.len()] == bytes[..] && copied.len() as u64 == 16 * MIB);
        drop(server);
        volume.close().unwrap();
    }
}

#[test]
fn a_program_whose_server_goes_hears_that() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("tests/lost.c", folder.path());
    for words in ["?", "?poll=never&", "?poll=always&"] {
        let uri = format!("vhost-user://{}/socket{words}reconnect=0", folder.path().display());
        let options = Options::without_memory();
        let path = folder.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(8 * MIB).unwrap();
        let table = format!("0 16384 linear {} 0", path.display());
        let volume = Volume::open("served", &table, &options).unwrap();
        let server = Server::start(volume.device(), &uri.parse().unwrap()).unwrap();
        let mut child = command(&program, &[&uri])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.next().map(Result::unwrap);
        drop(server);
        let gone = lines.next().map(Result::unwrap);
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            (ready.as_deref(), gone.as_deref()),
            (Some("ready"), Some("it is gone")),
            "{said}"
        );
        assert!(output.status.success(), "{words}: {said}");
        volume.close().unwrap();
    }
}

/// The folder of the server, when the test below runs this program as one.
const SERVES: &str = "UDM_TEST_SERVES";
/// Number of servers that are killed, one after the other.
const KILLS: u64 = 10;

/// Returns the result of `open` as soon as it succeeds.
fn when_free<T>(open: impl Fn() -> udm::Result<T>) -> T {
    let start = Instant::now();
    loop {
        match open() {
            Ok(opened) => return opened,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Serves a cache over files of a folder until this process is killed. Outside of [`Killed`] it
/// returns immediately.
#[test]
fn serve_until_killed() {
    let Some(folder) = std::env::var_os(SERVES).map(PathBuf::from) else { return };
    let (origin, cache) = (folder.join("origin"), folder.join("cache"));
    let (origin, cache) = (origin.display(), cache.display());
    let table = format!("0 131072 writecache p {origin} {cache} 4096 0");
    let options = Options::with_memory_in(&folder);
    let uri = format!("vhost-user://{}/socket", folder.display()).parse().unwrap();
    // The kernel closes the files and the socket of a killed server's rings a moment later.
    let volume = when_free(|| Volume::open("served", &table, &options));
    let _server = when_free(|| Server::start(volume.device(), &uri));
    println!("serves");
    loop {
        std::thread::park();
    }
}

/// A server in a process of its own. Dropping it kills it.
struct Killed(Child);

impl Killed {
    fn start(folder: &Path) -> Killed {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serve_until_killed", "--nocapture"])
            .env(SERVES, folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "serves"), "the server did not begin");
        Killed(child)
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_program_whose_servers_are_killed_goes_on_with_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled("tests/again.c", folder.path());
    // A busy machine may take long to start a server; another test checks deadlines.
    for (nth, poll) in ["never", "always", "auto", "never"].iter().enumerate() {
        let words = format!("?poll={poll}&reconnect=300");
        // A new, empty cache for each run.
        let fixture = folder.path().join(nth.to_string());
        std::fs::create_dir(&fixture).unwrap();
        for (name, bytes) in [("origin", 64 * MIB), ("cache", 16 * MIB)] {
            std::fs::File::create(fixture.join(name)).unwrap().set_len(bytes).unwrap();
        }
        let uri = format!("vhost-user://{}/socket{words}", fixture.display());
        let mut server = Killed::start(&fixture);
        let loop_of_its_own = if nth == 3 { &["loop"][..] } else { &[] };
        let mut child = command(&program, &[&[uri.as_str()][..], loop_of_its_own].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // If it fails to connect, the lines end, and its error output is shown below.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let connected = lines.next();
        for kill in 0..KILLS {
            std::thread::sleep(Duration::from_millis(40 + kill * 13));
            drop(server);
            // Leaves time for a reconnection attempt without a server.
            std::thread::sleep(Duration::from_millis(kill * 5));
            server = Killed::start(&fixture);
        }
        drop(child.stdin.take());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}: {said}");
        assert_eq!(connected.unwrap().unwrap(), "connected");
        let requests: u64 = lines.next().unwrap().unwrap().parse().unwrap();
        assert!(requests > 50 * KILLS, "{words}: {requests} requests");
    }
}
