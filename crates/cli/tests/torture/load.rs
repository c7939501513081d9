//! Connections that send pipelined requests until their server is gone.

use std::collections::HashMap;
use std::fmt::{self, Display, Formatter};
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use udm::prng::Prng;

use crate::nbd::{Command, Nbd, Request};
use crate::oracle::{Oracle, SECTOR, fill};

/// The server's word for requests that came when it was on its way out.
const ESHUTDOWN: u32 = 108;

/// A request, as the oracle sees it.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub command: Command,
    pub is_fua: bool,
    pub first: u64,
    pub count: u64,
    /// What its sectors hold then, if it changes any.
    pub value: Option<u64>,
    /// It may leave a sector unchanged.
    pub is_weak: bool,
}

impl Asked {
    pub fn is_read(&self) -> bool {
        self.command == Command::Read
    }

    pub fn is_flush(&self) -> bool {
        self.command == Command::Flush
    }
}

impl Display for Asked {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let fua = if self.is_fua { " with FUA" } else { "" };
        write!(out, "{:?}{fua} at {} of {} sectors", self.command, self.first, self.count)?;
        self.value.map_or(Ok(()), |value| write!(out, ", value {value}"))
    }
}

/// What all connections share.
pub struct Load {
    pub oracle: Arc<Oracle>,
    pub socket: PathBuf,
    pub sectors: u64,
    /// Sectors that all requests are multiples of.
    pub granule: u64,
    /// Where table lines meet.
    pub borders: Vec<u64>,
    pub depth: u64,
    pub is_batched: bool,
    pub trims_to_zero: bool,
    /// Requests may fail: something was taken away.
    pub may_fail: AtomicBool,
    /// No request touches the last sector of a line: a write up to the end of a file that is being
    /// cut would hide the cut, which is a known gap (`disk/recent.rs`).
    pub spares_ends: AtomicBool,
    /// The file that is being cut, and how long it was. Write-back and a cache's own slots may
    /// reach its end: a read while it is as long as it was is not judged.
    pub cut: Mutex<Option<(PathBuf, u64)>>,
    pub is_over: AtomicBool,
    /// The clients' sockets.
    pub sockets: Mutex<Vec<UnixStream>>,
    pub answered: AtomicU64,
    /// Requests that were in flight when the server ended.
    pub in_flight: AtomicU64,
}

/// A connection's requests, by cookie, with the stamps of their begins.
type Open = HashMap<u64, (Asked, u64)>;

impl Load {
    /// One client, which now and then hangs up in the middle and connects again.
    pub fn run(&self, connection: u64, mut random: Prng) {
        let mut cookie = connection << 32;
        while !self.is_over.load(Ordering::SeqCst) {
            let Ok(nbd) = Nbd::connect(&self.socket, self.sectors * SECTOR as u64) else { return };
            self.sockets.lock().unwrap().push(nbd.socket());
            let patience = if random.one_in(3) { random.below(3000) } else { u64::MAX };
            let mut open = Open::new();
            let ended = self.talk(nbd, &mut random, connection, &mut cookie, &mut open, patience);
            for (asked, _) in open.values().filter(|(asked, _)| asked.is_read()) {
                self.oracle.give_up_read(asked);
            }
            self.in_flight.fetch_add(open.len() as u64, Ordering::SeqCst);
            if let Err(error) = ended {
                assert!(error.kind() != ErrorKind::WouldBlock, "no reply: {}", listed(&open));
                return;
            }
        }
    }

    /// All clients disconnect, even while they wait. A full cache whose device is dead holds
    /// writers for a minute.
    pub fn hang_up(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Sends and hears until the server is gone, or this client's patience ends.
    fn talk(
        &self,
        mut nbd: Nbd,
        random: &mut Prng,
        connection: u64,
        cookie: &mut u64,
        open: &mut Open,
        patience: u64,
    ) -> io::Result<()> {
        let mut sent = 0;
        let mut result = Ok(());
        loop {
            let is_over = self.is_over.load(Ordering::SeqCst);
            while result.is_ok() && !is_over && (open.len() as u64) < self.depth {
                *cookie += 1;
                sent += 1;
                self.ask(&mut nbd, random, connection, *cookie, open);
                if !self.is_batched {
                    result = nbd.send();
                }
            }
            if result.is_ok() {
                result = nbd.send();
            }
            if sent > patience && result.is_ok() {
                return Ok(()); // hangs up
            }
            // Replies sent before the server's end are read to the end.
            let batch = if self.is_batched { open.len() } else { 1 };
            for _ in 0..batch.min(open.len()) {
                self.hear(&mut nbd, open)?;
            }
            if open.is_empty() && (is_over || result.is_err()) {
                return result;
            }
        }
    }

    fn ask(&self, nbd: &mut Nbd, random: &mut Prng, who: u64, cookie: u64, open: &mut Open) {
        let asked = self.choose(random);
        let request = Request {
            command: asked.command,
            is_fua: asked.is_fua,
            cookie,
            offset: asked.first * SECTOR as u64,
            len: (asked.count * SECTOR as u64) as u32,
        };
        let has_data = asked.command == Command::Write;
        let mut data = vec![0; if has_data { request.len as usize } else { 0 }];
        for (number, sector) in (asked.first..).zip(data.chunks_exact_mut(SECTOR)) {
            fill(number, asked.value.unwrap(), sector);
        }
        let begin = self.oracle.asked(who, &asked);
        open.insert(cookie, (asked, begin));
        nbd.ask(&request, &data);
    }

    fn choose(&self, random: &mut Prng) -> Asked {
        let (mut first, mut count) = self.place(random);
        while self.spares_ends.load(Ordering::SeqCst)
            && self.borders.iter().any(|border| (first..first + count).contains(&(border - 1)))
        {
            (first, count) = self.place(random);
        }
        let mut asked = Asked {
            command: Command::Write,
            is_fua: random.one_in(8),
            first,
            count,
            value: None,
            is_weak: false,
        };
        match random.below(40) {
            0 => {
                let flush = Asked { command: Command::Flush, is_fua: false, ..asked };
                return Asked { first: 0, count: 0, ..flush };
            }
            1 => {
                asked.is_weak = !self.trims_to_zero;
                asked.command = Command::Trim;
            }
            2 | 3 => asked.command = Command::WriteZeroes,
            4..=9 => return Asked { command: Command::Read, is_fua: false, ..asked },
            _ => return Asked { value: Some(self.oracle.value()), ..asked },
        }
        Asked { value: Some(0), ..asked }
    }

    /// Where a request goes: anywhere, at places that all like, or over a border of lines.
    fn place(&self, random: &mut Prng) -> (u64, u64) {
        let granule = self.granule;
        let count = match random.below(16) {
            0 => 1 + random.below(512 / granule),
            1..=4 => 1 + random.below(64 / granule),
            _ => 8 / granule,
        } * granule;
        let first = match random.below(8) {
            0 => {
                let border = self.borders[random.below(self.borders.len() as u64) as usize];
                border.saturating_sub(random.below(count))
            }
            1..=3 => random.below(128) * 8,
            4 => random.below(self.sectors),
            _ => random.below(self.sectors / 8) * 8,
        };
        let first = first.min(self.sectors - 1) / granule * granule;
        (first, count.min(self.sectors - first))
    }

    fn hear(&self, nbd: &mut Nbd, open: &mut Open) -> io::Result<()> {
        let (cookie, error) = nbd.receive()?;
        let (asked, begin) = *open.get(&cookie).expect("a reply to no request");
        if asked.is_read() {
            let mut bytes = vec![0; if error == 0 { asked.count as usize * SECTOR } else { 0 }];
            nbd.receive_data(&mut bytes)?;
            let is_judged = error == 0 && !is_hidden(&self.cut);
            self.oracle.was_read(&asked, begin, is_judged.then_some(&bytes));
        } else {
            self.oracle.answered(&asked, begin, error);
        }
        open.remove(&cookie);
        self.answered.fetch_add(1, Ordering::Relaxed);
        let may_fail = error == ESHUTDOWN || self.may_fail.load(Ordering::SeqCst);
        assert!(error == 0 || may_fail, "{asked} is answered with error {error}");
        Ok(())
    }
}

/// Whether a file was cut, and is as long as it was.
fn is_hidden(cut: &Mutex<Option<(PathBuf, u64)>>) -> bool {
    let cut = cut.lock().unwrap();
    cut.as_ref()
        .is_some_and(|(path, bytes)| std::fs::metadata(path).is_ok_and(|file| file.len() == *bytes))
}

fn listed(open: &Open) -> String {
    let mut lines: Vec<String> =
        open.values().map(|(asked, begin)| format!("{begin}: {asked}")).collect();
    lines.sort();
    lines.join("; ")
}
