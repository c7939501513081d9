//! A client of a control socket may call any method with any arguments. Every call is answered, an
//! error names the fault in one line, and the server continues.
//!
//! Calls are made of right and wrong parts from a seed; `UDM_HOSTILE_SEED` and `UDM_HOSTILE_CALLS`
//! choose others. The fuzz target `control` covers the frames around the calls; `calls` does the
//! same as this without a process, guided by coverage.
//! `control`'s concern; `calls` does the same as this without a process, led by coverage.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::common::{PATIENCE, Udm, is_gone, text, wait_until};
use serde_json::{Value, json};
use udm::prng::Prng;

const METHODS: [&str; 18] = [
    "Status", "Table", "Info", "Limits", "Message", "Suspend", "Resume", "Flush", "Load", "Rename",
    "Export", "Unexport", "Drain", "Remove", "", "status", "Failed", "GetInfo",
];
const FIELDS: [&str; 11] = [
    "inactive",
    "sector",
    "words",
    "table",
    "directory",
    "to",
    "uri",
    "force",
    "drain",
    "interface",
    "more",
];

/// A server, a connection to it, and where the calls come from.
struct Fixture {
    udm: Udm,
    name: String,
    pid: u64,
    stream: UnixStream,
    random: Prng,
    removals: u32,
}

fn connect(udm: &Udm, name: &str) -> UnixStream {
    let stream = UnixStream::connect(udm.runtime().join(format!("{name}.ctl"))).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

impl Fixture {
    fn new(seed: u64) -> Fixture {
        let udm = Udm::new();
        udm.file("disk.img", 1 << 20);
        udm.ok(&["create", "vol", "--table", "0 2048 linear disk.img 0"]);
        let (pid, stream) = (udm.pid("vol"), connect(&udm, "vol"));
        let random = Prng::new(seed);
        Fixture { udm, name: "vol".into(), pid, stream, random, removals: 0 }
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len() as u64) as usize].clone()
    }

    /// A valid value for a field of this name, or nearly.
    fn fitting(&mut self, field: &str) -> Value {
        let folder = text(&self.udm.path("")).to_owned();
        let values = match field {
            "inactive" | "force" | "drain" | "more" => vec![json!(true), json!(false)],
            "sector" => vec![json!(0), json!(1), json!(2048), json!(u64::MAX)],
            "words" => vec![
                json!([]),
                json!(["gc_percent", "80"]),
                json!(["", "\u{0}", "\u{1F4A3}\n"]),
                json!(vec!["w"; 3000]),
            ],
            "table" => vec![
                json!("0 2048 zero"),
                json!("0 2048 linear disk.img 0"),
                json!("0 1024 linear disk.img 0\n1024 1024 error"),
                json!("0 2048 pcache disk.img disk.img"),
                json!("0 18446744073709551615 zero"),
                json!("0 1 zero\n".repeat(5000)),
                json!("9 9 \u{0}"),
                json!(""),
            ],
            "directory" => vec![json!(folder), json!("/nonexistent"), json!(""), json!("disk.img")],
            "to" => {
                vec![json!("vol"), json!("other"), json!("a/b"), json!(""), json!("n".repeat(200))]
            }
            "uri" => vec![
                json!(format!("nbd+unix://{folder}a.sock")),
                json!(format!("nbd+unix://{folder}b.sock")),
                json!(format!("nbd+unix:///{}", "l".repeat(300))),
                json!("nbd://127.0.0.1:0"),
                json!("nbd://nowhere.invalid:x"),
                json!("\u{0}"),
            ],
            _ => vec![json!("udm.Device"), json!("unknown.Method")],
        };
        self.pick(&values)
    }

    fn call(&mut self) -> Value {
        let service = self.random.one_in(12);
        let interface = if service { "org.varlink.service" } else { "udm.Device" };
        let method = self.pick(&METHODS);
        let wanted: &[&str] = match method {
            "Table" => &["inactive"],
            "Message" => &["sector", "words"],
            "Load" => &["table", "directory"],
            "Rename" => &["to"],
            "Export" => &["uri"],
            "Unexport" => &["uri", "force"],
            "Remove" => &["drain", "force"],
            "GetInfo" => &["interface"],
            _ => &[],
        };
        let mut parameters = serde_json::Map::new();
        for field in wanted {
            let value = self.fitting(field);
            parameters.insert((*field).to_owned(), value);
        }
        if self.random.one_in(6) {
            // A wrong type, a field too many, or one too few.
            let field = self.pick(&FIELDS);
            let odd = [json!(null), json!(-1), json!(1.5), json!("x"), json!([[]]), json!({})];
            parameters.insert(field.to_owned(), self.pick(&odd));
        } else if self.random.one_in(8) {
            let first = parameters.keys().next().cloned();
            first.map(|field| parameters.remove(&field));
        }
        let more = self.random.one_in(4);
        json!({ "method": format!("{interface}.{method}"), "parameters": parameters, "more": more })
    }

    /// Sends a call and takes its last answer.
    fn ask(&mut self, call: &Value) -> Value {
        let mut bytes = serde_json::to_vec(call).unwrap();
        bytes.push(0);
        self.stream.write_all(&bytes).unwrap();
        loop {
            let mut answer = Vec::new();
            let mut byte = [0];
            loop {
                self.stream.read_exact(&mut byte).unwrap();
                if byte == [0] {
                    break;
                }
                answer.push(byte[0]);
            }
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            assert!(answer["parameters"].is_object(), "{call}: {answer}");
            if answer["continues"] != true {
                return answer;
            }
            assert_eq!(call["more"], true, "{call}: {answer}");
        }
    }

    fn step(&mut self) {
        let call = self.call();
        let answer = self.ask(&call);
        let method = call["method"].as_str().unwrap();
        if let Some(error) = answer["error"].as_str() {
            let is_known = error.starts_with("org.varlink.service.");
            let message = answer["parameters"]["message"].as_str().unwrap_or_default();
            let is_said = error == "udm.Device.Failed" && !message.trim().is_empty();
            assert!(is_known || is_said && !message.contains('\n'), "{call}: {answer}");
            return;
        }
        match method {
            "udm.Device.Rename" => {
                call["parameters"]["to"].as_str().unwrap().clone_into(&mut self.name);
            }
            "udm.Device.Remove" => self.create_again(),
            _ => {}
        }
    }

    fn create_again(&mut self) {
        let pid = self.pid;
        wait_until("the removed server has ended", || is_gone(pid));
        self.removals += 1;
        "vol".clone_into(&mut self.name);
        self.udm.ok(&["create", "vol", "--table", "0 2048 linear disk.img 0"]);
        self.pid = self.udm.pid("vol");
        self.stream = connect(&self.udm, "vol");
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn every_call_is_answered_and_the_server_goes_on() {
    let seed = number("UDM_HOSTILE_SEED", 1);
    println!("UDM_HOSTILE_SEED={seed}");
    let mut fixture = Fixture::new(seed);
    for nth in 0..number("UDM_HOSTILE_CALLS", 1500) {
        fixture.step();
        if nth % 100 == 0 {
            let info = json!({ "method": "udm.Device.Info" });
            assert_eq!(fixture.ask(&info)["parameters"]["name"], fixture.name.as_str());
        }
    }
    assert!(fixture.removals > 0, "a server was removed by a call, too");
    let Fixture { udm, name, pid, stream, .. } = fixture;
    assert!(!is_gone(pid));
    drop(stream);
    let info = udm.json(&["info", &name]);
    assert_eq!(info["pid"], pid);
    udm.ok(&["remove", "--force", &name]);
    let left = udm.left();
    assert!(left.is_empty(), "no files stay behind: {left:?}");
}
