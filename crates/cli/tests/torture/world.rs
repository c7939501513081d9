//! A world: a device with its files, its server, and the oracle's view of it.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use udm::prng::Prng;

use crate::Tally;
use crate::commands::{self, Outcome, Running};
use crate::nbd::{Command, Nbd, Request};
use crate::oracle::{Loss, Oracle, SECTOR};
use crate::scene::{Line, Scene, Target};

/// Bytes of a read when everything is read.
const PIECE: u64 = 256 << 10;
/// Of a metadata device.
const META_BYTES: u64 = 4 << 20;

/// A device, and what is known about it.
pub struct World {
    udm: PathBuf,
    pub scene: Scene,
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
    /// Words for the table lines of caches, beside the scene's.
    pub words: &'static str,
    pub oracle: Arc<Oracle>,
    pub random: Prng,
    pub server: Option<u64>,
    pub tally: Tally,
    deadline: Instant,
}

impl World {
    pub fn new(udm: &Path, scene: Scene, deadline: Instant) -> World {
        let home = tempfile::Builder::new().prefix("udm-torture-").tempdir().unwrap();
        let runtime = home.path().join("run");
        let oracle = Arc::new(Oracle::new(scene.bytes() / SECTOR as u64, scene.by_calls()));
        let random = Prng::new(scene.seed ^ 0x0007_0a7d);
        let mut world = World {
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
            tally: Tally { worlds: 1, ..Tally::default() },
            deadline,
            scene,
        };
        world.make_runtime(&world.runtime);
        for (nth, line) in world.scene.lines.clone().iter().enumerate() {
            world.add_files(nth, line);
        }
        world
    }

    /// Makes a runtime directory, which is ours alone.
    pub fn make_runtime(&self, path: &Path) {
        if !path.is_dir() {
            DirBuilder::new().mode(0o700).create(path).unwrap();
        }
    }

    fn add_files(&mut self, nth: usize, line: &Line) {
        let origin = self.home.path().join(format!("origin{nth}"));
        File::create(&origin).unwrap().set_len(line.bytes).unwrap();
        self.origins.push(origin);
        let cache = (line.cache_bytes > 0).then(|| {
            let mut folder = tempfile::Builder::new();
            let folder = folder.prefix("udm-torture-").tempdir_in(line.place.folder()).unwrap();
            let cache = folder.path().join(format!("cache{nth}"));
            File::create(&cache).unwrap().set_len(line.cache_bytes).unwrap();
            self.folders.push(folder);
            cache
        });
        self.caches.push(cache);
        let meta = matches!(line.target, Target::Cache { .. }).then(|| {
            let meta = self.home.path().join(format!("meta{nth}"));
            File::create(&meta).unwrap().set_len(META_BYTES).unwrap();
            meta
        });
        self.metas.push(meta);
    }

    pub fn is_late(&self) -> bool {
        Instant::now() > self.deadline
    }

    pub fn table(&self) -> String {
        let mut at = 0;
        let mut table = String::new();
        for (nth, line) in self.scene.lines.iter().enumerate() {
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
                    format!("cache {meta} {cache} {origin} {block} {words}")
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
        commands::start(&self.udm, self.home.path(), &self.runtime, words)
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
        let info: serde_json::Value =
            serde_json::from_str(&self.ok(&["info", "vol", "--json"]).out).unwrap();
        self.server = Some(info["pid"].as_u64().unwrap());
        Ok(())
    }

    pub fn create(&mut self) {
        let refused = self.try_create(&[]);
        assert_eq!(refused, Ok(()), "what is whole must be taken up");
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
        let pid = self.server.take().unwrap();
        let was_there = commands::kill_server(pid) && self.has_no_panic();
        commands::wait_for_end(pid);
        self.oracle.note("killed".into());
        self.tally.kills += 1;
        assert!(was_there, "the server has ended by itself: {}", self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.runtime.join("vol.log")).unwrap_or_default()
    }

    pub fn has_no_panic(&self) -> bool {
        !self.log().contains("panicked")
    }

    /// Reads everything from the server and judges it. A read that fails is passed over if reads
    /// `may_fail`.
    pub fn judge(&mut self, loss: Loss, may_fail: bool, what: &str) {
        let bytes = self.scene.bytes();
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
        let mut nbd = Nbd::connect(&self.socket(), self.scene.bytes()).expect("it takes clients");
        let len = self.scene.granule() as u32 * SECTOR as u32;
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
        let pid = self.server.take().unwrap();
        let outcome = self.udm(&["remove", "vol", "--drain", "--force"]);
        assert_eq!(outcome.code, 0, "remove --drain: {outcome:?}");
        commands::wait_for_end(pid);
        self.oracle.note("removed with everything written back".into());
        self.oracle.server_is_gone();
        self.compare_origins();
    }

    /// The origins alone must hold everything.
    pub fn compare_origins(&mut self) {
        let mut at = 0;
        for (line, origin) in self.scene.lines.iter().zip(&self.origins) {
            let mut data = vec![0; line.bytes as usize];
            File::open(origin).unwrap().read_exact_at(&mut data, 0).unwrap();
            self.oracle.judge(at, &data, Loss::Process, "an origin alone");
            at += line.bytes / SECTOR as u64;
        }
        self.tally.drained += 1;
    }

    /// Ends what still runs.
    pub fn end(&mut self) {
        let Some(pid) = self.server.take() else { return };
        commands::kill_server(pid);
        commands::wait_for_end(pid);
    }

    /// Keeps the files; where they are.
    pub fn keep(&mut self) -> String {
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
