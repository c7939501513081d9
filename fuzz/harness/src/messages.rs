//! A client of a device's control socket, and servers that answer commands: arbitrary bytes
//! instead of messages.
//!
//! In addition to the promises of every target: an accepted message can be printed, and is parsed
//! to the same value again; the sizes of reads make no difference; an endless message is refused.

use std::io::{Error, ErrorKind, Read, Write};

use serde_json::Value;

use crate::control::{Answer, Call, Frames, MESSAGE_BYTES_MAX, Peer};
use crate::input::Input;
use crate::runtime::DeviceName;

/// Parts of messages: single bytes would rarely form a message.
const PIECES: [&str; 32] = [
    "{\"method\":\"udm.Device.",
    "{\"method\":\"org.varlink.service.",
    "{\"error\":\"udm.Device.Failed\",\"parameters\":{\"message\":\"m\"",
    "{\"method\":",
    "\"parameters\":",
    "\"more\":true",
    "\"continues\":true",
    "\"pointer\":\"",
    "Status",
    "Load",
    "GetInfo",
    "\"",
    "\",",
    "{",
    "}",
    "}\0",
    "[",
    "]",
    "[[[[[[[[[[[[[[[[",
    "null",
    "true",
    "-1",
    "1e999",
    "18446744073709551616",
    "0.1",
    ",",
    ":",
    "\\u0000",
    "\\ud800",
    "\u{e9}",
    " \n",
    "\0",
];

/// A stream that returns its bytes in pieces, then ends, fails, or continues endlessly.
pub struct Stream<'a> {
    bytes: &'a [u8],
    cut: usize,
    is_endless: bool,
    given: usize,
    pub said: Vec<u8>,
}

impl Peer for Stream<'_> {
    fn has_hung_up(&self) -> bool {
        false
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.cut.min(into.len());
        self.given += count;
        assert!(self.given <= 2 * MESSAGE_BYTES_MAX, "a message without end is awaited");
        if self.bytes.is_empty() && self.is_endless {
            into[..count].fill(b' ');
            return Ok(count);
        }
        if self.cut == 7 && self.given.is_multiple_of(3) {
            return Err(Error::from(ErrorKind::Interrupted));
        }
        let count = count.min(self.bytes.len());
        let (now, later) = self.bytes.split_at(count);
        into[..count].copy_from_slice(now);
        self.bytes = later;
        Ok(count)
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.said.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub fn frames(bytes: &[u8], cut: usize, is_endless: bool) -> Frames<Stream<'_>> {
    Frames::new(Stream { bytes, cut, is_endless, given: 0, said: Vec::new() })
}

/// Calls and answers, as the other end sends them.
pub fn control(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let cut = usize::from(input.u8()) + 1;
    let is_endless = input.clone().u8() >= 254;
    let text = text(&mut input, &PIECES);
    // An endless message costs a MiB, so it is rare.
    let whole = calls(&text, usize::MAX, false);
    assert_eq!(calls(&text, cut, is_endless)[..], whole[..], "calls depend on how they are cut");
    answers(&text, cut);
}

/// The rest of the input, unchanged, or made of `pieces` and letters.
pub fn text(input: &mut Input<'_>, pieces: &[&str]) -> Vec<u8> {
    if input.u8() & 1 == 0 {
        return input.take(usize::MAX).to_vec();
    }
    let mut text = Vec::new();
    while !input.is_empty() {
        match input.u8() {
            nth @ 0..=191 => {
                text.extend_from_slice(pieces[usize::from(nth) % pieces.len()].as_bytes());
            }
            letter => text.push(letter & 0x7F),
        }
    }
    text
}

/// The calls in `bytes` up to the first bad one, as text.
fn calls(bytes: &[u8], cut: usize, is_endless: bool) -> Vec<String> {
    let mut frames = frames(bytes, cut, is_endless);
    let mut calls = Vec::new();
    while let Ok(Some(call)) = frames.receive::<Call>() {
        frames.send(&call).unwrap();
        let _ = call.method.parse::<DeviceName>();
        calls.push(shown(&call));
    }
    let said = frames.stream().said.clone();
    let mut echo = self::frames(&said, 4096, false);
    for call in &calls {
        let again: Call = echo.receive().unwrap().unwrap();
        assert_eq!(shown(&again), *call);
    }
    calls
}

/// A call as text; printing may change the last digit of a fraction.
fn shown(call: &Call) -> String {
    fn round(value: &mut Value) {
        match value {
            Value::Number(number) if number.is_f64() => *value = Value::Null,
            Value::Array(values) => values.iter_mut().for_each(round),
            Value::Object(values) => values.values_mut().for_each(round),
            _ => {}
        }
    }
    let mut parameters = call.parameters.clone();
    round(&mut parameters);
    format!("{} {parameters} {}", call.method, call.more)
}

fn answers(bytes: &[u8], cut: usize) {
    let mut frames = frames(bytes, cut, false);
    while let Ok(Some(answer)) = frames.receive::<Answer>() {
        frames.send(&answer).unwrap();
        if let Err(error) = answer.into_result() {
            let _ = error.to_string();
        }
    }
}
