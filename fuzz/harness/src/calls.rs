//! A client that sends arbitrary bytes to a device's control socket: the server's own parser and
//! methods, over small devices in memory.
//!
//! In addition to the promises of every target:
//! 1. Every call gets exactly one last answer, and an error has a name and a text.
//! 2. When the device is opened again, it has the same data after any calls.
//! 3. The server ends when it is asked to, and leaves no file.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;

use serde_json::Value;
use udm::device::Device;
use udm::local::{Local, ManualClock};
use udm::sync::Arc;

use crate::control::{Answer, Call, Frames};
use crate::daemon::{answer_all, run};
use crate::input::Input;
use crate::loading::{LoadHow, load_table};
use crate::messages::{Stream, frames, text};
use crate::platform::{self, DISK_BYTES};
use crate::runtime::{DeviceName, RuntimeDir};
use crate::server::{Server, Stop};
use crate::spec::Spec;

/// The table of the device at the start.
const TABLES: [&str; 4] = [
    "0 512 linear disk 0",
    "0 512 pcache log disk",
    "0 512 writecache p disk fast 4096 0",
    "0 512 writecache s disk ssd 4096 0",
];

/// Bytes that are written before the first call.
const WRITTEN_BYTES: usize = 64 << 10;

/// Parts of calls: single bytes would rarely form a call.
const PIECES: [&str; 45] = [
    "{\"method\":\"udm.Device.",
    "{\"method\":\"org.varlink.service.",
    "\",\"parameters\":{",
    "\",\"more\":true,\"parameters\":{",
    "}}\0",
    "\"}\0",
    "\"",
    ",",
    ":",
    "[",
    "]",
    "0",
    "1",
    "-1",
    "true",
    "null",
    "Status\"}\0",
    "Table\",\"parameters\":{\"inactive\":true}}\0",
    "Info\"}\0",
    "Limits\"}\0",
    "Suspend\"}\0",
    "Resume\"}\0",
    "Flush\"}\0",
    "Drain\",\"more\":true}\0",
    "Drain\"}\0",
    "Remove\"}\0",
    "Remove\",\"more\":true,\"parameters\":{\"drain\":true}}\0",
    "Remove\",\"parameters\":{\"force\":true}}\0",
    "Rename\",\"parameters\":{\"to\":\"other\"}}\0",
    "Rename\",\"parameters\":{\"to\":\"vol\"}}\0",
    "GetInfo\"}\0",
    "GetInterfaceDescription\",\"parameters\":{\"interface\":\"udm.Device\"}}\0",
    "Message\",\"parameters\":{\"sector\":0,\"words\":[",
    "\"gc_percent\",\"80\"]}}\0",
    "\"flush\"]}}\0",
    "\"flush_on_suspend\"]}}\0",
    "\"cleaner\"]}}\0",
    "Load\",\"parameters\":{\"directory\":\"/\",\"table\":\"",
    "0 512 ",
    "\\n512 8 error",
    "zero",
    "linear disk 0",
    "pcache log disk",
    "writecache p disk fast 4096 0",
    "writecache s disk ssd 4096 0",
];

/// The folder of this process's control socket, locks and exports.
pub fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("udm-fuzz-{}", std::process::id()))
}

/// Calls to a server.
pub fn calls(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let table = TABLES[usize::from(input.u8()) % TABLES.len()];
    let socket = folder().join("a.sock");
    let export = |verb| {
        format!("{verb}\",\"parameters\":{{\"uri\":\"nbd+unix://{}\"}}}}\0", socket.display())
    };
    let (open, close) = (export("Export"), export("Unexport"));
    let pieces: Vec<&str> = PIECES.into_iter().chain([open.as_str(), close.as_str()]).collect();
    let text = text(&mut input, &pieces);

    platform::renew();
    let runtime = Arc::new(RuntimeDir::open_at(folder()).unwrap());
    write(&runtime, table);
    let said = serve(&runtime, table, &text);
    let mut is_replaced = false;
    let (mut calls, mut answers) = (frames(&text, 4096, false), frames(&said, 4096, false));
    while let Ok(Some(call)) = calls.receive::<Call>() {
        let is_good = check_answers(&call, &mut answers);
        is_replaced |= is_good && replaces_cache(&call, table);
    }
    assert!(answers.receive::<Answer>().unwrap().is_none(), "an answer without a call");
    let left: Vec<_> = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    fs::remove_dir(folder()).unwrap();
    if !is_replaced {
        check_content(&runtime, table);
    }
}

/// The whole life of a server whose only caller sends `text`. Returns its answers.
fn serve(runtime: &Arc<RuntimeDir>, table: &str, text: &[u8]) -> Vec<u8> {
    let name: DeviceName = "vol".parse().unwrap();
    let lock = runtime.try_lock(&name).unwrap().unwrap();
    fs::write(runtime.control(&name), []).unwrap();
    let spec = Spec {
        name: "vol".into(),
        table: table.into(),
        exports: Vec::new(),
        queues: None,
        force_format: false,
        metrics: None,
        progress: Arc::default(),
    };
    let (stop, stops) = channel();
    // A server changes to the root directory.
    let before = std::env::current_dir().unwrap();
    let server = Arc::new(Server::build(&spec, runtime.clone(), lock, stop).unwrap());
    let mut frames = frames(text, 4096, false);
    let main = std::thread::spawn({
        let server = server.clone();
        move || run(server, &stops)
    });
    // An error means that the bytes were not a call, and the connection is closed.
    let _ = answer_all(&server, &mut frames);
    let _ = server.stop.send(Stop::Signal(15));
    main.join().unwrap().unwrap();
    std::env::set_current_dir(before).unwrap();
    frames.stream().said.clone()
}

/// Checks that all answers to `call` are there. Returns whether the last one is a success.
fn check_answers(call: &Call, answers: &mut Frames<Stream<'_>>) -> bool {
    loop {
        let answer: Answer = answers.receive().unwrap().expect("an answer to each call");
        assert!(!answer.continues || call.more, "{}: more than was asked for", call.method);
        if answer.continues {
            continue;
        }
        if let Some(name) = &answer.error {
            let words = answer.parameters.get("message").and_then(Value::as_str);
            let is_clear = words
                .map_or(name.starts_with("org.varlink.service."), |words| !words.trim().is_empty());
            assert!(is_clear, "{}: {answer:?}", call.method);
        }
        return answer.error.is_none();
    }
}

/// Whether a loaded table may use the device's cache in another way.
fn replaces_cache(call: &Call, own: &str) -> bool {
    let table = call.parameters.get("table").and_then(Value::as_str);
    let may_replace = |table: &str| table.contains("cache") && table != own;
    call.method == "udm.Device.Load" && own.contains("cache") && table.is_some_and(may_replace)
}

fn open(runtime: &RuntimeDir, table: &str) -> (Arc<Device>, Local) {
    let device = Device::new("vol").unwrap();
    load_table(&device, table, Path::new("/"), runtime, &LoadHow::default()).unwrap();
    device.resume().unwrap();
    let local = Local::without_kernel(&device).unwrap().with_background(ManualClock::default());
    (device, local)
}

fn close(device: &Device, mut local: Local) {
    local.suspend().unwrap();
    drop(local);
    device.remove().unwrap();
}

/// The expected data of the device: in each sector its number.
fn content() -> Vec<u8> {
    (0..WRITTEN_BYTES).map(|at| (at / 512) as u8 + 1).collect()
}

fn write(runtime: &RuntimeDir, table: &str) {
    let (device, mut local) = open(runtime, table);
    local.write_at(&content(), 0, false).unwrap();
    close(&device, local);
}

fn check_content(runtime: &RuntimeDir, table: &str) {
    let (device, mut local) = open(runtime, table);
    let mut found = vec![0xFF; DISK_BYTES as usize];
    local.read_at(&mut found, 0).unwrap();
    let (written, rest) = found.split_at(WRITTEN_BYTES);
    let wrong = written.iter().zip(content()).position(|(found, wanted)| *found != wanted);
    assert_eq!(wrong, None, "the device holds something else");
    assert!(rest.iter().all(|byte| *byte == 0), "the device holds more than was written");
    close(&device, local);
}
