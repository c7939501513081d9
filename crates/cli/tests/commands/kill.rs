//! kill -9 of the server under load: acknowledged data is there when the server is back.
//!
//! In each round, three clients of our own and fio write, the server dies at some moment, and `udm
//! create` opens the same media again. For each sector, our clients know the last acknowledged
//! write and the unanswered ones: a read must show one of them, whole. fio's part of the device is
//! full of its verification headers from the start, so that each of its blocks must carry a right
//! one whenever the server dies. At the end everything is drained, and the backing device alone
//! must hold it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{PATIENCE, Udm, client, for_clients, is_gone, signal, text, wait_until};
use udm::prng::Prng;

const MIB: u64 = 1 << 20;
const SECTOR: usize = 512;
const DEVICE_BYTES: u64 = 64 * MIB;

/// Our clients write before this, fio after it.
const FIO_OFFSET: u64 = 48 * MIB;
const FIO_BYTES: u64 = DEVICE_BYTES - FIO_OFFSET;

/// A client has at most one request in flight per unit, so that it knows which came last; units
/// belong to the clients in turns, so that all of them meet in each part of the index.
const UNIT_BYTES: u64 = 64 << 10;
const UNIT_SECTORS: u64 = UNIT_BYTES / SECTOR as u64;
const CLIENTS: u64 = 3;
/// Requests that a client keeps in flight.
const DEPTH: usize = 8;

/// What sector `number` holds in its `version`; 0 is a sector of zeroes.
fn fill(number: u64, version: u64, sector: &mut [u8]) {
    for pair in sector.chunks_exact_mut(16) {
        pair[..8].copy_from_slice(&(if version == 0 { 0 } else { number }).to_le_bytes());
        pair[8..].copy_from_slice(&version.to_le_bytes());
    }
}

/// The version that a sector holds, or `None` if it is not one and whole.
fn version_of(number: u64, sector: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(sector[8..16].try_into().unwrap());
    let mut expected = [0; SECTOR];
    fill(number, version, &mut expected);
    (sector == expected).then_some(version)
}

/// A connection to the export, after its handshake.
struct Nbd(UnixStream);

/// NBD's commands; the second number holds the flags.
const READ: (u16, u16) = (0, 0);
const WRITE: (u16, u16) = (1, 0);
const WRITE_FUA: (u16, u16) = (1, 1);
const FLUSH: (u16, u16) = (3, 0);
const TRIM: (u16, u16) = (4, 0);
const WRITE_ZEROES: (u16, u16) = (6, 0);

impl Nbd {
    fn connect(socket: &Path) -> io::Result<Nbd> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle without the padding; then EXPORT_NAME with the empty name.
        stream.write_all(&3_u32.to_be_bytes())?;
        stream.write_all(&[&b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat())?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        assert_eq!(u64::from_be_bytes(export[..8].try_into().unwrap()), DEVICE_BYTES);
        Ok(Nbd(stream))
    }

    fn send(&mut self, kind: (u16, u16), offset: u64, len: u64, data: &[u8]) -> io::Result<()> {
        let mut message = Vec::with_capacity(28 + data.len());
        message.extend_from_slice(&0x2560_9513_u32.to_be_bytes());
        message.extend_from_slice(&kind.1.to_be_bytes());
        message.extend_from_slice(&kind.0.to_be_bytes());
        message.extend_from_slice(&offset.to_be_bytes()); // the cookie
        let offset = if kind == FLUSH { 0 } else { offset };
        message.extend_from_slice(&offset.to_be_bytes());
        message.extend_from_slice(&(len as u32).to_be_bytes());
        message.extend_from_slice(data);
        self.0.write_all(&message)
    }

    /// The next reply's cookie: where its request began.
    fn receive(&mut self) -> io::Result<u64> {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply)?;
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "the server reports an error");
        Ok(u64::from_be_bytes(reply[8..].try_into().unwrap()))
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.send(READ, offset, bytes.len() as u64, &[])?;
        assert_eq!(self.receive()?, offset);
        self.0.read_exact(bytes)
    }
}

/// A request that was not answered yet.
struct Asked {
    sector: u64,
    sectors: u64,
    version: u64,
}

/// One of our clients. It keeps its knowledge when a server dies.
struct Client {
    random: Prng,
    units: Vec<u64>,
    /// Version of each sector of the device that was acknowledged last.
    acknowledged: Vec<u64>,
    asked: HashMap<u64, Asked>,
    last_version: u64,
    acknowledgements: Arc<AtomicU64>,
    /// Whether what is discarded reads as zeroes.
    trims: bool,
}

impl Client {
    fn new(nth: u64, seed: u64, trims: bool) -> Client {
        Client {
            random: Prng::new(seed + nth),
            units: (0..FIO_OFFSET / UNIT_BYTES).filter(|unit| unit % CLIENTS == nth).collect(),
            acknowledged: vec![0; (FIO_OFFSET / SECTOR as u64) as usize],
            asked: HashMap::new(),
            last_version: 0,
            acknowledgements: Arc::default(),
            trims,
        }
    }

    /// Writes until the server is gone.
    fn load(&mut self, socket: &Path) {
        let Ok(mut nbd) = Nbd::connect(socket) else { return };
        let mut is_sending = true;
        loop {
            while is_sending && self.asked.len() < DEPTH {
                is_sending = self.ask(&mut nbd).is_ok();
            }
            // Replies sent before the server died are read to the end.
            match nbd.receive() {
                Ok(offset) => self.hear(offset),
                Err(error) => {
                    assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "no reply for too long");
                    return;
                }
            }
        }
    }

    fn ask(&mut self, nbd: &mut Nbd) -> io::Result<()> {
        let random = &mut self.random;
        let unit = self.units[random.below(self.units.len() as u64) as usize];
        let (first, count) = match random.below(4) {
            0 => (0, UNIT_SECTORS),
            1 => (random.below(UNIT_SECTORS), 1 + random.below(64)),
            _ => (random.below(UNIT_SECTORS / 8) * 8, 8),
        };
        let (sector, sectors) = (unit * UNIT_SECTORS + first, count.min(UNIT_SECTORS - first));
        let offset = sector * SECTOR as u64;
        if self.asked.values().any(|asked| asked.sector / UNIT_SECTORS == unit) {
            return Ok(()); // its turn comes
        }
        let (mut kind, mut version) = (WRITE, 0);
        match random.below(40) {
            0 => kind = FLUSH,
            1 if self.trims => kind = TRIM,
            1 | 2 => kind = WRITE_ZEROES,
            3 => (kind, version) = (WRITE_FUA, self.last_version + 1),
            _ => version = self.last_version + 1,
        }
        if kind == FLUSH {
            // No reads check these sectors; the entry is for the answer.
            self.asked.insert(offset, Asked { sector, sectors: 0, version });
            return nbd.send(kind, offset, 0, &[]);
        }
        self.last_version += 1;
        let mut data = vec![0; if version == 0 { 0 } else { sectors as usize * SECTOR }];
        for (nth, bytes) in data.chunks_exact_mut(SECTOR).enumerate() {
            fill(sector + nth as u64, version, bytes);
        }
        self.asked.insert(offset, Asked { sector, sectors, version });
        nbd.send(kind, offset, sectors * SECTOR as u64, &data)
    }

    fn hear(&mut self, offset: u64) {
        let asked = self.asked.remove(&offset).expect("a reply to no request");
        for sector in asked.sector..asked.sector + asked.sectors {
            self.acknowledged[sector as usize] = asked.version;
        }
        self.acknowledgements.fetch_add(1, Ordering::Relaxed);
    }

    /// Judges what the next server says; that is the truth from here on.
    fn judge(&mut self, content: &[u8]) {
        let asked: Vec<Asked> = self.asked.drain().map(|(_, asked)| asked).collect();
        for unit in &self.units {
            for sector in unit * UNIT_SECTORS..(unit + 1) * UNIT_SECTORS {
                let bytes = &content[sector as usize * SECTOR..][..SECTOR];
                let known = self.acknowledged[sector as usize];
                let found = version_of(sector, bytes);
                let is_asked =
                    |asked: &&Asked| (asked.sector..asked.sector + asked.sectors).contains(&sector);
                let open = asked.iter().find(is_asked).map(|asked| asked.version);
                assert!(
                    found == Some(known) || (found.is_some() && found == open),
                    "sector {sector}: version {known} was acknowledged, {open:?} was asked for, \
                     found is {found:?}: {:?}",
                    &bytes[..32]
                );
                self.acknowledged[sector as usize] = found.unwrap();
            }
        }
    }
}

/// The target under load. `options` are the options of the cache's argument.
enum Target {
    Pcache { options: &'static str, data_crc: bool },
    Writecache { mode: char, options: &'static str },
}

impl Target {
    fn cache_bytes(&self) -> u64 {
        match self {
            Target::Pcache { .. } => 512 * MIB,
            // Full, and written back, within a round.
            Target::Writecache { .. } => 24 * MIB,
        }
    }

    fn words(&self, cache: &str, origin: &str) -> String {
        match self {
            Target::Pcache { options, data_crc } => format!(
                "pcache {cache}{options} {origin} 4 cache_mode writeback data_crc {data_crc}"
            ),
            Target::Writecache { mode, options } => {
                format!("writecache {mode} {origin} {cache}{options} 512 0")
            }
        }
    }
}

/// The media, and their history.
struct Fixture {
    udm: Udm,
    cache: tempfile::NamedTempFile,
    origin: PathBuf,
    socket: PathBuf,
    table: String,
    clients: Vec<Client>,
    random: Prng,
}

impl Fixture {
    /// `folder` is where the cache lies.
    fn new(folder: &Path, target: &Target, seed: u64) -> Fixture {
        let udm = Udm::new();
        let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
        cache.as_file().set_len(target.cache_bytes()).unwrap();
        let origin = udm.file("origin.img", DEVICE_BYTES);
        let words = target.words(text(cache.path()), text(&origin));
        let table = format!("0 {} {words}", DEVICE_BYTES / SECTOR as u64);
        let socket = udm.path("vol.sock");
        let trims = matches!(target, Target::Pcache { .. });
        let clients = (0..CLIENTS).map(|nth| Client::new(nth, seed << 8, trims)).collect();
        Fixture { udm, cache, origin, socket, table, clients, random: Prng::new(seed) }
    }

    fn uri(&self) -> String {
        self.udm.uri("vol.sock")
    }

    fn create(&self) {
        self.udm.ok(&["create", "vol", "--table", &self.table, "--export", &self.uri()]);
    }

    /// A header in each sector: a request that the server's death cut short may have reached some
    /// of its sectors only (a writecache of small blocks keeps each on its own).
    fn fio_words(&self, target: &[String], words: &[&str]) -> Vec<String> {
        let job = [
            "--name=load".to_owned(),
            "--thread".to_owned(),
            format!("--offset={FIO_OFFSET}"),
            format!("--size={FIO_BYTES}"),
            "--verify=crc32c".to_owned(),
            "--verify_interval=512".to_owned(),
            "--verify_fatal=1".to_owned(),
        ];
        let words = words.iter().map(|&word| word.to_owned());
        job.into_iter().chain(target.iter().cloned()).chain(words).collect()
    }

    fn over_nbd(&self) -> [String; 2] {
        ["--ioengine=nbd".to_owned(), format!("--uri={}", for_clients(&self.uri()))]
    }

    /// Runs fio to its end; it must be content.
    fn fio(&self, target: &[String], words: &[&str]) {
        let words = self.fio_words(target, words);
        client("fio", &words.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// fio as load: two jobs, each with its own half, that go on after errors.
    fn fio_load(&self, round: u32) -> Child {
        let mut words = self.fio_words(
            &self.over_nbd(),
            &["--rw=randwrite", "--bs=4k", "--iodepth=8", "--do_verify=0", "--numjobs=2"],
        );
        words.push(format!("--randseed={round}"));
        words.push(format!("--size={}", FIO_BYTES / 2));
        words.push(format!("--offset_increment={}", FIO_BYTES / 2));
        words.extend(["--time_based", "--runtime=60"].map(str::to_owned));
        words.push("--continue_on_error=all".to_owned());
        std::process::Command::new("fio")
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Load from all sides until the server's death; whether requests were in flight then.
    fn round(&mut self, round: u32) -> bool {
        let pid = self.udm.pid("vol");
        let mut fio = self.fio_load(round);
        let counts: Vec<_> =
            self.clients.iter().map(|client| client.acknowledgements.clone()).collect();
        let heard = || counts.iter().map(|count| count.load(Ordering::Relaxed));
        let before: Vec<u64> = heard().collect();
        let moment = Duration::from_millis(20 + self.random.below(480));
        let socket = &self.socket;
        std::thread::scope(|scope| {
            for client in &mut self.clients {
                scope.spawn(|| client.load(socket));
            }
            wait_until("each client has an answer", || {
                heard().zip(&before).all(|(now, before)| now > *before)
            });
            std::thread::sleep(moment);
            signal(pid, "KILL");
        });
        wait_until("the server is gone", || is_gone(pid));
        fio.kill().unwrap();
        fio.wait().unwrap();
        let count = heard().sum::<u64>() - before.iter().sum::<u64>();
        eprintln!("round {round}: {count} requests answered in {moment:?} and before");
        self.clients.iter().any(|client| !client.asked.is_empty())
    }

    /// The next server reads what was acknowledged.
    fn judge(&mut self) {
        self.create();
        let mut content = vec![0; FIO_OFFSET as usize];
        let mut nbd = Nbd::connect(&self.socket).unwrap();
        for (nth, piece) in content.chunks_mut(MIB as usize).enumerate() {
            nbd.read(nth as u64 * MIB, piece).unwrap();
        }
        self.clients.iter_mut().for_each(|client| client.judge(&content));
        self.fio(&self.over_nbd(), &["--rw=read", "--bs=64k"]);
    }

    /// A server that dies while it takes the media up.
    fn die_early(&mut self) {
        let words = ["create", "vol", "--foreground", "--table", &self.table];
        let mut server = self.udm.spawn(&words);
        std::thread::sleep(Duration::from_millis(self.random.below(40)));
        server.kill().unwrap();
        server.wait().unwrap();
    }

    fn run(&mut self, rounds: u32) {
        self.create();
        self.fio(&self.over_nbd(), &["--rw=write", "--bs=64k", "--do_verify=0"]);
        let mut under_load = 0;
        for round in 0..rounds {
            under_load += u32::from(self.round(round));
            if self.random.one_in(3) {
                self.die_early();
            }
            self.judge();
        }
        assert!(under_load > rounds / 2, "{under_load} of {rounds} servers died under load");

        self.udm.ok(&["remove", "vol", "--drain"]);
        let mut content = vec![0; FIO_OFFSET as usize];
        File::open(&self.origin).unwrap().read_exact_at(&mut content, 0).unwrap();
        self.clients.iter_mut().for_each(|client| client.judge(&content));
        let file = ["--ioengine=psync".to_owned(), format!("--filename={}", text(&self.origin))];
        self.fio(&file, &["--rw=read", "--bs=64k"]);
        assert_eq!(self.udm.json(&["inspect", text(self.cache.path())])["dirty_bytes"], 0);
    }
}

/// Where memory is, or else the place for temporary files.
fn memory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

#[test]
fn twenty_killed_servers_lose_nothing() {
    Fixture::new(&memory(), &Target::Pcache { options: "", data_crc: false }, 1).run(20);
}

#[test]
fn killed_servers_lose_nothing_with_data_crc() {
    Fixture::new(&memory(), &Target::Pcache { options: "", data_crc: true }, 2).run(6);
}

#[test]
fn killed_servers_lose_nothing_in_a_file_of_the_page_cache() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let target = Target::Pcache { options: "?persist=msync", data_crc: true };
    Fixture::new(folder, &target, 3).run(6);
}

#[test]
fn killed_servers_of_a_writecache_in_memory_lose_nothing() {
    Fixture::new(&memory(), &Target::Writecache { mode: 'p', options: "" }, 4).run(8);
}

#[test]
fn killed_servers_of_a_writecache_on_a_disk_lose_nothing() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    Fixture::new(folder, &Target::Writecache { mode: 's', options: "" }, 5).run(8);
}
