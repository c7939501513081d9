//! `GET /metrics` for Prometheus: the smallest HTTP server that answers it.
//!
//! One request per connection, one connection at a time, each with little time and little memory; a
//! scraper that is slower may try again.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The longest request head.
const HEAD_BYTES_MAX: usize = 8192;

/// How long a request may take to arrive, and an answer to be taken.
const EXCHANGE_MAX: Duration = Duration::from_secs(5);

/// Listens at `address`; returns the actual address, for port 0.
pub fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).with_context(|| format!("metrics at {address}"))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Answers every request with the text that `text` returns, or with its error; never ends.
pub fn answer_all(listener: &TcpListener, text: &dyn Fn() -> Result<String>) {
    for stream in listener.incoming() {
        match stream {
            // An error concerns that scraper only.
            Ok(stream) => drop(answer(stream, text)),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn answer(mut stream: TcpStream, text: &dyn Fn() -> Result<String>) -> Result<()> {
    let deadline = Instant::now() + EXCHANGE_MAX;
    let head = read_head(&mut stream, deadline)?;
    let (status, body) = match route(&head) {
        Route::Metrics => match text() {
            Ok(text) => ("200 OK", text),
            Err(error) => ("500 Internal Server Error", format!("{error:#}\n")),
        },
        Route::Elsewhere => ("404 Not Found", "metrics are at /metrics\n".into()),
        Route::NotGet => ("405 Method Not Allowed", "only GET is answered\n".into()),
        Route::NotHttp => ("400 Bad Request", "not an HTTP request\n".into()),
    };
    let reply = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    send(&mut stream, reply.as_bytes(), Instant::now() + EXCHANGE_MAX)
}

/// Writes all of it until `deadline`, however small the pieces are that the peer takes.
fn send(stream: &mut TcpStream, mut bytes: &[u8], deadline: Instant) -> Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("the peer takes the answer too slowly");
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => bail!("the peer takes no more"),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read_head(stream: &mut TcpStream, deadline: Instant) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        if head.len() > HEAD_BYTES_MAX {
            bail!("request head too long");
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("request too slow");
        }
        stream.set_read_timeout(Some(left))?;
        let mut chunk = [0; 1024];
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => head.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(head)
}

#[derive(Debug, PartialEq, Eq)]
enum Route {
    Metrics,
    Elsewhere,
    NotGet,
    NotHttp,
}

fn route(head: &[u8]) -> Route {
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return Route::NotHttp };
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["GET", path, version] if version.starts_with("HTTP/1.") => {
            let path = path.split('?').next().unwrap_or_default();
            if path == "/metrics" { Route::Metrics } else { Route::Elsewhere }
        }
        [_, _, version] if version.starts_with("HTTP/1.") => Route::NotGet,
        _ => Route::NotHttp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_get_metrics_is_answered() {
        assert_eq!(route(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Route::Metrics);
        assert_eq!(route(b"GET /metrics?a=b HTTP/1.0\r\n\r\n"), Route::Metrics);
        assert_eq!(route(b"GET / HTTP/1.1\r\n\r\n"), Route::Elsewhere);
        assert_eq!(route(b"POST /metrics HTTP/1.1\r\n\r\n"), Route::NotGet);
        assert_eq!(route(b"\xff\xfe\r\n\r\n"), Route::NotHttp);
        assert_eq!(route(b""), Route::NotHttp);
    }

    #[test]
    fn an_exchange_over_a_socket() {
        let (listener, address) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        std::thread::spawn(move || answer_all(&listener, &|| Ok("udm_up 1\n".into())));
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 200 OK\r\n") && reply.ends_with("\r\n\r\nudm_up 1\n"));
    }
}
