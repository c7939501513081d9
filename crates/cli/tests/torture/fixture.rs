//! A case: a device with its files, its server, and the oracle's view of it.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use udm::prng::Prng;

use crate::Tally;
use crate::case::{Case, Line, Target};
use crate::commands::{self, Outcome, Running};
use crate::disks::Disks;
use crate::nbd::{Command, Nbd, Request};
use crate::oracle::{Loss, Oracle, SECTOR};

/// Bytes of a read when everything is read.
const PIECE: u64 = 256 << 10;
/// Of a metadata device.
pub const META_BYTES: u64 = 4 << 20;

/// A device, and its expected content.
pub struct Fixture {
    udm: PathBuf,
    pub case: Case,
    /// Everything but caches.
    pub home: tempfile::TempDir,
    folders: Vec<tempfile::TempDir>,
    pub caches: Vec<Option<PathBuf>>,
    /// Of lines of the target cache.
    pub metas: Vec<Option<PathBuf>>,
    pub origins: Vec<PathBuf>,
    /// Where the next server runs.
    pub runtime: PathBuf,
    /// Whether the next server only reads.
    pub is_read_only: bool,
    /// Options for the table lines of caches, in addition to the case's.
    pub words: &'static str,
    pub oracle: Arc<Oracle>,
    pub random: Prng,
    pub server: Option<u64>,
    /// The last action may have changed the times of an origin.
    pub was_touched: bool,
    /// An origin failed a flush in this run of the machine, so a new cache must not trust it.
    pub is_origin_doubted: bool,
    /// The next server may report this loss, and whether it did: a device had failed.
    pub was_sick: bool,
    has_told: bool,
    /// Those that can fail, if the case has any.
    pub disks: Option<Arc<Disks>>,
    pub tally: Tally,
    deadline: Instant,
}

impl Fixture {
    pub fn new(udm: &Path, case: Case, deadline: Instant) -> Fixture {
        let home = tempfile::Builder::new().prefix("udm-torture-").tempdir().unwrap();
        let runtime = home.path().join("run");
        let oracle = Arc::new(Oracle::new(case.bytes() / SECTOR as u64, case.by_calls()));
        let random = Prng::new(case.seed ^ 0x0007_0a7d);
        let mut fixture = Fixture {
            udm: udm.to_owned(),
            home,
            folders: Vec::new(),
            caches: Vec::new(),
            metas: Vec::new(),
            origins: Vec::new(),
            runtime,
            is_read_only: false,
            words: "",
            oracle,
            random,
            server: None,
            was_touched: false,
            is_origin_doubted: false,
            was_sick: false,
            has_told: false,
            disks: None,
            tally: Tally { cases: 1, ..Tally::default() },
            deadline,
            case,
        };
        fixture.make_runtime(&fixture.runtime);
        if fixture.case.has_disks {
            fixture.add_disks();
        }
        for (nth, line) in fixture.case.lines.clone().iter().enumerate() {
            fixture.add_files(nth, line);
        }
        fixture
    }

    /// Makes a runtime directory, which is ours alone.
    pub fn make_runtime(&self, path: &Path) {
        if !path.is_dir() {
            DirBuilder::new().mode(0o700).create(path).unwrap();
        }
    }

    /// Disks that fail, if there can be some here.
    fn add_disks(&mut self) {
        let mut sizes = Vec::new();
        for (nth, line) in self.case.lines.iter().enumerate() {
            sizes.push((format!("origin{nth}"), line.bytes));
            if line.has_cache_on_disk() {
                sizes.push((format!("cache{nth}"), line.cache_bytes));
            }
            if matches!(line.target, Target::Cache { .. }) {
                sizes.push((format!("meta{nth}"), META_BYTES));
            }
        }
        let folder = self.home.path().join("disks");
        self.disks = Disks::mount(&folder, &sizes, self.case.seed).map(Arc::new);
        if self.disks.is_none() {
            self.case.has_disks = false;
            return;
        }
        self.boot_anew();
    }

    fn boot_file(&self) -> PathBuf {
        self.home.path().join("boot")
    }

    /// Another run of the machine begins.
    pub fn boot_anew(&mut self) {
        let (one, other) = (self.random.next_u64(), self.random.next_u64() >> 16);
        let (first, second, third) = (one >> 32, one >> 16 & 0xffff, one & 0xfff);
        let id = format!("{first:08x}-{second:04x}-4{third:03x}-8000-{other:012x}\n");
        std::fs::write(self.boot_file(), id).unwrap();
        self.is_origin_doubted = false;
    }

    /// A disk, or a file of this size.
    fn new_device(&self, name: &str, bytes: u64) -> PathBuf {
        if let Some(disks) = &self.disks {
            return disks.path(name);
        }
        let file = self.home.path().join(name);
        File::create(&file).unwrap().set_len(bytes).unwrap();
        file
    }

    fn add_files(&mut self, nth: usize, line: &Line) {
        let origin = self.new_device(&format!("origin{nth}"), line.bytes);
        self.origins.push(origin);
        let cache = (line.cache_bytes > 0).then(|| {
            if self.disks.is_some() && line.has_cache_on_disk() {
                return self.new_device(&format!("cache{nth}"), line.cache_bytes);
            }
            let mut folder = tempfile::Builder::new();
            let folder = folder.prefix("udm-torture-").tempdir_in(line.place.folder()).unwrap();
            let cache = folder.path().join(format!("cache{nth}"));
            File::create(&cache).unwrap().set_len(line.cache_bytes).unwrap();
            self.folders.push(folder);
            cache
        });
        self.caches.push(cache);
        let meta = matches!(line.target, Target::Cache { .. })
            .then(|| self.new_device(&format!("meta{nth}"), META_BYTES));
        self.metas.push(meta);
    }

    pub fn is_late(&self) -> bool {
        Instant::now() > self.deadline
    }

    pub fn table(&self) -> String {
        let mut at = 0;
        let mut table = String::new();
        for (nth, line) in self.case.lines.iter().enumerate() {
            let sectors = line.bytes / SECTOR as u64;
            let shown = |path: &Path| {
                let readonly = if self.is_read_only { "?readonly" } else { "" };
                format!("{}{readonly}", path.display())
            };
            let origin = shown(&self.origins[nth]);
            let cache = self.caches[nth].as_deref().map_or_else(String::new, shown);
            let more = self.words;
            let words = match &line.target {
                Target::Linear => format!("linear {origin} 0"),
                Target::Pcache { data_crc, retention } => format!(
                    "pcache {cache} {origin} 4 cache_mode writeback data_crc {data_crc} \
                     retention {retention}{more}"
                ),
                Target::Writecache { mode, block, words } => {
                    format!("writecache {mode} {origin} {cache} {block} {words}{more}")
                }
                Target::Cache { block, words } => {
                    let meta = self.metas[nth].as_deref().map_or_else(String::new, shown);
                    let more = if more.contains("memory") { "" } else { more };
                    format!("cache {meta} {cache} {origin} {block} {words}{more}")
                }
            };
            table += &format!("{at} {sectors} {words}\n");
            at += sectors;
        }
        table
    }

    pub fn socket(&self) -> PathBuf {
        self.home.path().join("vol.sock")
    }

    pub fn start(&self, words: &[&str]) -> Running {
        let boot = self.disks.is_some().then(|| self.boot_file());
        commands::start(&self.udm, self.home.path(), &self.runtime, boot.as_deref(), words)
    }

    pub fn udm(&self, words: &[&str]) -> Outcome {
        self.start(words).outcome()
    }

    /// A command that must succeed.
    pub fn ok(&self, words: &[&str]) -> Outcome {
        let outcome = self.udm(words);
        assert_eq!(outcome.code, 0, "udm {words:?}: {outcome:?}");
        outcome
    }

    /// Starts a server that takes the files up, with more words; or why it is refused.
    pub fn try_create(&mut self, more: &[&str]) -> Result<(), String> {
        let (table, uri) = (self.table(), format!("nbd+unix://{}", self.socket().display()));
        let words = [&["create", "vol", "--table", &table, "--export", &uri], more].concat();
        let outcome = self.udm(&words);
        self.oracle.note(format!("create: {} {}", outcome.code, outcome.err.trim()));
        if outcome.code != 0 {
            assert!(outcome.code == 1 && outcome.err.starts_with("udm: "), "create: {outcome:?}");
            return Err(outcome.err);
        }
        self.has_told = outcome.err.contains("are LOST: the medium has failed");
        assert!(!self.has_told || self.was_sick, "a loss where no device has failed");
        let info: serde_json::Value =
            serde_json::from_str(&self.ok(&["info", "vol", "--json"]).out).unwrap();
        self.server = Some(info["pid"].as_u64().unwrap());
        Ok(())
    }

    pub fn create(&mut self) {
        let refused = self.try_create(&[]);
        assert_eq!(refused, Ok(()), "an intact cache must be opened");
    }

    /// A server after one whose device has failed.
    pub fn create_after_sickness(&mut self, loss: Loss, what: &str) {
        self.was_sick = true;
        self.create();
        self.was_sick = false;
        let is_told = self.has_told && loss == Loss::Process;
        self.judge(if is_told { Loss::Told } else { loss }, false, what);
    }

    /// A server that is killed while it takes the files up.
    pub fn die_early(&mut self) {
        let table = self.table();
        let server = self.start(&["create", "vol", "--foreground", "--table", &table]);
        std::thread::sleep(Duration::from_micros(self.random.below(60_000)));
        let outcome = server.kill();
        self.oracle.note(format!("killed in attach: {} {}", outcome.code, outcome.err.trim()));
        assert_ne!(outcome.code, 1, "an attach is refused: {outcome:?}");
        self.tally.early_kills += 1;
    }

    /// Kills the server; it must have been alive.
    pub fn kill(&mut self) {
        let was_there = commands::kill_server(self.server.unwrap());
        self.killed(was_there);
    }

    /// The server was killed.
    pub fn killed(&mut self, was_there: bool) {
        let pid = self.server.take().unwrap();
        let was_there = was_there && self.has_no_panic();
        commands::wait_for_end(pid);
        self.oracle.note("killed".into());
        self.tally.kills += 1;
        assert!(was_there, "the server has ended by itself: {}", self.log());
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.runtime.join("vol.log")).unwrap_or_default()
    }

    pub fn has_no_panic(&self) -> bool {
        !self.log().contains("panicked")
    }

    /// Reads everything from the server and judges it. A read that fails is passed over if reads
    /// `may_fail`.
    pub fn judge(&mut self, loss: Loss, may_fail: bool, what: &str) {
        let bytes = self.case.bytes();
        let mut nbd = Nbd::connect(&self.socket(), bytes).expect("the server takes clients");
        let mut data = vec![0; PIECE as usize];
        let mut failed = 0;
        for offset in (0..bytes).step_by(PIECE as usize) {
            let len = PIECE.min(bytes - offset);
            let request = Request {
                command: Command::Read,
                is_fua: false,
                cookie: offset,
                offset,
                len: len as u32,
            };
            nbd.ask(&request, &[]);
            nbd.send().expect("the server is there");
            let (cookie, error) = nbd.receive().expect("a reply");
            assert_eq!(cookie, offset);
            if error != 0 {
                assert!(may_fail, "{what}: the read at {offset} fails with {error}");
                failed += 1;
                continue;
            }
            let data = &mut data[..len as usize];
            nbd.receive_data(data).expect("data");
            self.oracle.judge(offset / SECTOR as u64, data, loss, what);
        }
        self.oracle.note(format!("everything is right ({what}, {failed} reads failed)"));
    }

    /// A write that the server must refuse; its error.
    pub fn refused_write(&self) -> u32 {
        let mut nbd = Nbd::connect(&self.socket(), self.case.bytes()).expect("it takes clients");
        let len = self.case.granule() as u32 * SECTOR as u32;
        let command = Command::Write;
        nbd.ask(
            &Request { command, is_fua: true, cookie: 1, offset: 0, len },
            &vec![9; len as usize],
        );
        nbd.send().expect("the server is there");
        nbd.receive().expect("a reply").1
    }

    /// Removes the device with everything written back; the origins alone must hold it.
    pub fn drain_and_compare(&mut self) {
        let pid = self.server.unwrap();
        // A wipe is for caches without clients.
        let has_caches = self.caches.iter().any(Option::is_some);
        let last = if has_caches && self.random.one_in(3) { "--wipe" } else { "--force" };
        let outcome = self.udm(&["remove", "vol", "--drain", last]);
        assert_eq!(outcome.code, 0, "remove --drain: {outcome:?}");
        self.server = None;
        commands::wait_for_end(pid);
        self.oracle.note("removed with everything written back".into());
        self.oracle.server_is_gone();
        let has_power = !self.may_cut_power();
        self.compare_origins(if has_power { Loss::Process } else { Loss::Power });
    }

    /// The first sector of a line.
    pub fn start_of(&self, nth: usize) -> u64 {
        self.case.lines[..nth].iter().map(|line| line.bytes / SECTOR as u64).sum()
    }

    /// What an origin alone holds.
    pub fn origin_alone(&self, nth: usize) -> Vec<u8> {
        let mut data = vec![0; self.case.lines[nth].bytes as usize];
        File::open(&self.origins[nth]).unwrap().read_exact_at(&mut data, 0).unwrap();
        data
    }

    /// The origins alone must hold everything.
    pub fn compare_origins(&mut self, loss: Loss) {
        for nth in 0..self.origins.len() {
            let data = self.origin_alone(nth);
            self.oracle.judge(self.start_of(nth), &data, loss, "an origin alone");
        }
        self.tally.drained += 1;
    }

    /// The power of the machine may go, after the end of a server; whether it went.
    pub fn may_cut_power(&mut self) -> bool {
        let goes = self.disks.is_some() && self.random.one_in(2);
        if goes {
            self.cut_power();
        }
        goes
    }

    /// The power of the machine goes, and comes again.
    pub fn cut_power(&mut self) {
        assert!(self.server.is_none());
        self.oracle.note("the power goes".into());
        self.disks.as_ref().unwrap().cut_power(&mut self.random);
        self.boot_anew();
        self.tally.power_cuts += 1;
    }

    /// Ends what still runs.
    pub fn end(&mut self) {
        let Some(pid) = self.server.take() else { return };
        commands::kill_server(pid);
        if let Some(disks) = &self.disks {
            disks.heal();
        }
        commands::wait_for_end(pid);
    }

    /// Keeps the files; where they are.
    pub fn keep(&mut self) -> String {
        if let Some(disks) = &self.disks {
            disks.save(self.home.path());
        }
        let folders = self.folders.iter_mut().chain([&mut self.home]);
        let kept: Vec<String> = folders
            .map(|folder| {
                folder.disable_cleanup(true);
                folder.path().display().to_string()
            })
            .collect();
        kept.join(", ")
    }
}

impl Drop for Fixture {
    /// Disks go before the folder in which they are.
    fn drop(&mut self) {
        self.disks = None;
    }
}
