//! labdisk: a disk with a volatile write cache, as an NBD server for QEMU.
//!
//!     labdisk FILE SOCKET SEED|none
//!
//! Flushed data, and data written with FUA, is in FILE. All other data is in this process's memory
//! only. The disk loses power when its client disconnects in any way: each unflushed sector then
//! keeps its flushed content or gets its last write, at random, by SEED. The last line of output
//! has the number of each. With `none` as SEED, no unflushed data survives. It serves one client
//! and ends.
//!
//! Without dependencies, so that `rustc` alone builds it.

mod random;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;

use random::Random;

const SECTOR: usize = 512;
/// No request is longer.
const LEN_MAX: usize = 32 << 20;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const FLAG_FUA: u16 = 1;
const EINVAL: u32 = 22;

const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = 0x8000_0001;
/// The export has flags, and understands flush and FUA.
const EXPORT_FLAGS: u16 = 1 | 1 << 2 | 1 << 3;

struct Disk {
    durable: File,
    size: u64,
    /// Written, not flushed: the last content of each such sector.
    volatile: BTreeMap<u64, [u8; SECTOR]>,
    flushes: u64,
}

impl Disk {
    fn open(path: &str) -> io::Result<Disk> {
        let durable = OpenOptions::new().read(true).write(true).open(path)?;
        let size = durable.metadata()?.len();
        Ok(Disk { durable, size, volatile: BTreeMap::new(), flushes: 0 })
    }

    fn is_inside(&self, offset: u64, len: usize) -> bool {
        let sector = SECTOR as u64;
        offset.is_multiple_of(sector)
            && (len as u64).is_multiple_of(sector)
            && offset.checked_add(len as u64).is_some_and(|end| end <= self.size)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.durable.read_exact_at(bytes, offset)?;
        let first = offset / SECTOR as u64;
        let end = first + (bytes.len() / SECTOR) as u64;
        for (&sector, content) in self.volatile.range(first..end) {
            let at = (sector - first) as usize * SECTOR;
            bytes[at..at + SECTOR].copy_from_slice(content);
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], is_fua: bool) -> io::Result<()> {
        let first = offset / SECTOR as u64;
        for (index, content) in bytes.chunks_exact(SECTOR).enumerate() {
            let sector = first + index as u64;
            if is_fua {
                self.volatile.remove(&sector);
            } else {
                let content = content.try_into().map_err(io::Error::other)?;
                self.volatile.insert(sector, content);
            }
        }
        if is_fua { self.durable.write_all_at(bytes, offset) } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushes += 1;
        for (sector, content) in std::mem::take(&mut self.volatile) {
            self.durable.write_all_at(&content, sector * SECTOR as u64)?;
        }
        Ok(())
    }

    /// The power is gone. How many of the sectors survive differs from cut to cut, and whether
    /// they do so alone or by blocks of 4 KiB.
    fn lose_power(self, fate: Fate) -> io::Result<()> {
        let Fate { mut random, keeps } = fate;
        let chance = if keeps { [0, 1, 4, 7, 8][random.below(5) as usize] } else { 0 };
        let together = [1, 8][random.below(2) as usize];
        let (mut kept, mut lost) = (0_u64, 0_u64);
        let (mut group, mut survives) = (u64::MAX, false);
        for (&sector, content) in &self.volatile {
            if sector / together != group {
                group = sector / together;
                survives = random.below(8) < chance;
            }
            if survives {
                self.durable.write_all_at(content, sector * SECTOR as u64)?;
                kept += 1;
            } else {
                lost += 1;
            }
        }
        println!("labdisk: {} flushes; unflushed sectors: {kept} kept, {lost} lost", self.flushes);
        Ok(())
    }
}

/// What becomes of sectors that were not flushed.
struct Fate {
    random: Random,
    /// Whether some may survive.
    keeps: bool,
}

fn number<const N: usize>(client: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    client.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn reply_to_option(
    client: &mut UnixStream,
    option: u32,
    reply: u32,
    body: &[u8],
) -> io::Result<()> {
    let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&reply.to_be_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_be_bytes());
    bytes.extend_from_slice(body);
    client.write_all(&bytes)
}

/// Fixed newstyle, up to the option GO.
fn shake_hands(client: &mut UnixStream, size: u64) -> io::Result<()> {
    client.write_all(b"NBDMAGICIHAVEOPT")?;
    client.write_all(&3_u16.to_be_bytes())?;
    number::<4>(client)?;
    loop {
        if &number::<8>(client)? != b"IHAVEOPT" {
            return Err(io::Error::other("the client's option has the wrong magic"));
        }
        let option = u32::from_be_bytes(number(client)?);
        let len = u32::from_be_bytes(number(client)?);
        if len as usize > LEN_MAX {
            return Err(io::Error::other("the client's option is too long"));
        }
        client.read_exact(&mut vec![0; len as usize])?;
        match option {
            OPTION_INFO | OPTION_GO => {
                let mut info = vec![0; 2];
                info.extend_from_slice(&size.to_be_bytes());
                info.extend_from_slice(&EXPORT_FLAGS.to_be_bytes());
                reply_to_option(client, option, REPLY_INFO, &info)?;
                reply_to_option(client, option, REPLY_ACK, &[])?;
                if option == OPTION_GO {
                    return Ok(());
                }
            }
            OPTION_ABORT => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ => reply_to_option(client, option, REPLY_UNSUPPORTED, &[])?,
        }
    }
}

/// Serves requests, in their order, until the client is gone.
fn serve(client: &mut UnixStream, disk: &mut Disk) -> io::Result<()> {
    let mut bytes = vec![0; LEN_MAX];
    loop {
        let head: [u8; 28] = number(client)?;
        let half = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let (flags, command) = (half(4), half(6));
        let offset = u64::from_be_bytes(head[16..24].try_into().map_err(io::Error::other)?);
        let len = u32::from_be_bytes(head[24..28].try_into().map_err(io::Error::other)?) as usize;
        if len > LEN_MAX {
            return Err(io::Error::other("the client's request is too long"));
        }
        let bytes = &mut bytes[..len];
        if command == WRITE {
            client.read_exact(bytes)?;
        }
        let mut error = 0_u32;
        match command {
            READ if disk.is_inside(offset, len) => disk.read(offset, bytes)?,
            WRITE if disk.is_inside(offset, len) => {
                disk.write(offset, bytes, flags & FLAG_FUA != 0)?;
            }
            FLUSH => disk.flush()?,
            DISCONNECT => return Ok(()),
            _ => error = EINVAL,
        }
        let mut reply = 0x6744_6698_u32.to_be_bytes().to_vec();
        reply.extend_from_slice(&error.to_be_bytes());
        reply.extend_from_slice(&head[8..16]);
        client.write_all(&reply)?;
        if command == READ && error == 0 {
            client.write_all(bytes)?;
        }
    }
}

fn run(path: &str, socket: &str, seed: &str) -> io::Result<()> {
    let fate = match seed {
        "nothing" => Fate { random: Random(1), keeps: false },
        _ => Fate { random: Random(seed.parse().map_err(io::Error::other)?), keeps: true },
    };
    let mut disk = Disk::open(path)?;
    let (mut client, _) = UnixListener::bind(socket)?.accept()?;
    shake_hands(&mut client, disk.size)?;
    // A client that goes away without a word is what this disk is for.
    match serve(&mut client, &mut disk) {
        Ok(()) => {}
        Err(error) => match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => {}
            _ => return Err(error),
        },
    }
    disk.lose_power(fate)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        [path, socket, seed] => run(path, socket, seed),
        _ => Err(io::Error::other("usage: labdisk FILE SOCKET SEED|none")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("labdisk: {error}");
            ExitCode::FAILURE
        }
    }
}
