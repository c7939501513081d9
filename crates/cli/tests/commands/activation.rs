//! Sockets made by another program: udm serves at them, and clients that connected before wait.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::{Udm, client, for_clients, is_gone, pattern, text, wait_until};

const MIB: u64 = 1 << 20;

/// What systemd passes: a socket as file descriptor 3, and two variables in the environment.
const PASS: &str = r#"
    use Socket; use POSIX ();
    # Descriptors stay open in the program that is started.
    $^F = 9;
    my ($kind, $place, $go) = (shift, shift, shift);
    if ($kind eq "unix") {
        socket(S, PF_UNIX, SOCK_STREAM, 0) or die $!;
        unlink $place; bind(S, sockaddr_un($place)) or die $!;
    } elsif ($kind eq "tcp") {
        socket(S, PF_INET, SOCK_STREAM, 0) or die $!;
        setsockopt(S, SOL_SOCKET, SO_REUSEADDR, 1);
        bind(S, sockaddr_in($place, inet_aton("127.0.0.1"))) or die $!;
    } else {
        open(S, "<", $place) or die $!;
    }
    $kind eq "file" or $kind eq "deaf" or listen(S, 8) or die $!;
    # Serves when this file is there.
    until ($go eq "" or -e $go) { select(undef, undef, undef, 0.01); }
    POSIX::dup2(fileno(S), 3);
    $ENV{LISTEN_FDS} = 1; $ENV{LISTEN_PID} = $$;
    exec @ARGV;
"#;

/// Starts `udm` with `words` and a socket, when the file `go` is there, if it has a name.
fn pass(udm: &Udm, kind: &str, place: &str, go: &str, words: &[&str]) -> Child {
    let own = udm.command(words);
    let mut command = Command::new("perl");
    command.args(["-e", PASS, kind, place, go]);
    command.arg(own.get_program()).args(own.get_args());
    command.current_dir(own.get_current_dir().unwrap()).stdin(Stdio::null());
    for (name, value) in own.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn failure(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_client_that_comes_first_waits_for_the_server() {
    let udm = Udm::new();
    let origin = udm.file("origin.img", 8 * MIB);
    let table = format!("0 16384 linear {} 0", text(&origin));
    let socket = udm.path("vol.sock");
    let uri = udm.uri("vol.sock");
    let words = ["create", "vol", "--foreground", "--table", &table, "--export", &uri];
    let data = pattern(1, MIB as usize);
    std::fs::write(udm.path("data"), &data).unwrap();
    for round in 0..2 {
        let go = udm.path(&format!("go{round}"));
        let mut server = pass(&udm, "unix", text(&socket), text(&go), &words);
        wait_until("the socket is there", || is_listening(&socket));
        assert!(udm.run(&["info", "vol"]).code != 0, "nobody serves yet");
        let (source, target) = (udm.path("data"), for_clients(&uri));
        let copy =
            std::thread::spawn(move || client("nbdcopy", &["--flush", text(&source), &target]));
        wait_until("the client is there", || sockets(&socket) > 1);
        std::fs::write(&go, "").unwrap();
        copy.join().unwrap();
        let pid = udm.pid("vol");
        assert_eq!(pid, u64::from(server.id()));
        match round {
            0 => {
                server.kill().unwrap();
                server.wait().unwrap();
                assert!(socket.exists(), "the socket is not the server's to remove");
                // The kernel closes what a killed process had in its rings a moment later.
                wait_until("the socket is closed", || !is_listening(&socket));
            }
            _ => {
                // An export that is closed and opened again is the same one.
                udm.ok(&["unexport", "vol", &uri]);
                udm.ok(&["export", "vol", &uri]);
                client("nbdinfo", &[&for_clients(&uri)]);
                udm.ok(&["remove", "vol"]);
                server.wait().unwrap();
                wait_until("the server is gone", || is_gone(pid));
                assert!(socket.exists(), "the socket is not the server's to remove");
            }
        }
    }
    assert!(std::fs::read(&origin).unwrap()[..data.len()] == data);
}

/// How many sockets have this address: one listens, the others are its connections.
fn sockets(socket: &Path) -> usize {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    sockets.lines().filter(|line| line.ends_with(text(socket))).count()
}

/// Whether a socket listens there. To connect to it would be to come as a client.
fn is_listening(socket: &Path) -> bool {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    // Flag 0x10000: it takes connections.
    sockets.lines().any(|line| line.ends_with(text(socket)) && line.contains(" 00010000 "))
}

#[test]
fn tcp_is_taken_too() {
    let udm = Udm::new();
    // A port that was free a moment ago; if another process takes it meanwhile, perl fails.
    let served = (0..20).find_map(|_| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let uri = format!("nbd://127.0.0.1:{port}");
        let words = ["create", "vol", "--foreground", "--table", "0 8192 zero", "--export", &uri];
        let mut server = pass(&udm, "tcp", &port.to_string(), "", &words);
        let mut has_failed = false;
        wait_until("it serves", || {
            has_failed = server.try_wait().unwrap().is_some();
            has_failed || udm.run(&["info", "vol"]).code == 0
        });
        (!has_failed).then_some((server, uri))
    });
    let (mut server, uri) = served.expect("a port that stays free");
    assert!(client("nbdinfo", &["--size", &uri]).contains("4194304"));
    udm.ok(&["remove", "vol"]);
    server.wait().unwrap();
}

#[test]
fn what_cannot_be_served_is_refused() {
    let udm = Udm::new();
    let uri = udm.uri("vol.sock");
    let socket = udm.path("vol.sock");
    let plain = ["create", "vol", "--table", "0 8 zero", "--export", &uri];
    let here = [&plain[..], &["--foreground"]].concat();
    let words = failure(pass(&udm, "unix", text(&socket), "", &plain));
    assert!(words.contains("only a server in the foreground"), "{words}");
    let other = udm.path("other.sock");
    let words = failure(pass(&udm, "unix", text(&other), "", &here));
    assert!(
        words.contains("other.sock") && words.contains("no --export has this address"),
        "{words}"
    );
    let file = udm.file("file", 1);
    let words = failure(pass(&udm, "file", text(&file), "", &here));
    assert!(words.contains("file descriptor 3") && words.contains("neither a Unix"), "{words}");
    let moded = format!("{uri}?mode=0666");
    let here = ["create", "vol", "--foreground", "--table", "0 8 zero", "--export", &moded];
    let words = failure(pass(&udm, "unix", text(&socket), "", &here));
    assert!(words.contains("set its mode and owner there"), "{words}");
    // udm ignores variables in the environment that are for another process.
    std::fs::remove_file(&socket).unwrap();
    let outcome = udm.command(&plain).env("LISTEN_FDS", "1").env("LISTEN_PID", "1").output();
    assert!(outcome.unwrap().status.success());
    udm.ok(&["remove", "vol"]);
    let taken = UnixListener::bind(&socket);
    assert!(taken.is_ok(), "the server removed its own socket");
}
