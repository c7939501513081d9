//! Requests that are answered from memory must not allocate, or enter the kernel.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, FileDisk, FileOptions, IoMode, RamDisk};
use udm::local::Local;
use udm::pcache::layout::Geometry;
use udm::pcache::{self, Pcache};
use udm::pmem::Persistence;
use udm::pmem::client_memory::ClientMemory;
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::simple::{Linear, LinearArgs};
use udm::table::Word;
use udm::target::{Port, Target};
use udm::writecache::{self, Writecache};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with a count.
struct Counting;

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call is handed to the system's allocator unchanged; the counters are plain cells of
// this thread, without initialiser or destructor, so counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(start, layout, len) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A block that others could use too.
fn shared_memory() -> ClientMemory {
    let file = memfd_create("hotpath", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BLOCK as u64).unwrap();
    let memory = ClientMemory::map(&file, 0, BLOCK as u64).unwrap();
    memory.store(0, &[7; BLOCK]);
    memory
}

/// How often `run` allocates.
fn allocations(run: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    run();
    ALLOCATIONS.get() - before
}

const BLOCK: usize = 4096;
/// Bytes of the device that are written to: four regions of the index.
const SPAN: u64 = 16 << 20;
/// Writes that are watched.
const WRITES: u64 = 10_000;

/// A cache in real memory, and its device.
struct Fixture {
    target: Arc<dyn Target>,
    device: Arc<Device>,
    prng: Prng,
    _folder: tempfile::TempDir,
}

const PCACHE: &str = "pcache cache backing";
/// Blocks of a writecache as large as the requests.
const WRITECACHE: &str = "writecache p backing cache 4096 0";
/// Eight blocks for a request.
const SMALL_BLOCKS: &str = "writecache p backing cache 512 0";

impl Fixture {
    /// A cache with room for all that a test writes, so that no write ever waits.
    fn new(table: &str) -> Fixture {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        };
        let folder = folder.unwrap();
        let path = folder.path().join("cache");
        std::fs::File::create(&path).unwrap().set_len(20480 + (192 << 20)).unwrap();
        // The test checks the path of memory, wherever the file is.
        let persistence = cfg!(target_arch = "x86_64").then_some(Persistence::Cpu);
        let pmem =
            DaxPmem::open(&path, DaxOptions { persistence, ..DaxOptions::default() }).unwrap();
        let memory = Arc::new(pmem);
        let backing = Arc::new(RamDisk::new(SPAN, 512));
        let words = Word::list(table);
        let shared = |words| SharedWords::open(&folder.path().join("uncommitted"), words).unwrap();
        let target: Arc<dyn Target> = if words[0].text == "pcache" {
            let geometry = Geometry { segment_bytes: 4 << 20, device_bytes_min: 0 };
            let args = pcache::TableArgs::parse(&words[1..]).unwrap();
            let options = pcache::OpenOptions { geometry, ..pcache::OpenOptions::new(1) };
            let shared = shared(pcache::shared_words(options.stripes));
            Arc::new(Pcache::open(args, SPAN, memory, backing, shared, &options).unwrap())
        } else {
            let Ok(args) = writecache::TableArgs::parse(&words[1..]) else { panic!("{table}") };
            let options = writecache::OpenOptions::new(1);
            let shared = shared(writecache::shared_words(options.stripes));
            Arc::new(Writecache::open_pmem(args, SPAN, backing, memory, shared, &options).unwrap())
        };
        let table = LoadedTable::single(target.clone(), SPAN);
        let device = Device::with_table("hot", table).unwrap();
        Fixture { target, device, prng: Prng::new(1), _folder: folder }
    }

    fn place(&mut self) -> u64 {
        self.prng.below(SPAN / BLOCK as u64) * BLOCK as u64
    }

    /// Every block is written once, so that the index has all its regions.
    fn warm_up(&mut self, local: &mut Local) {
        for offset in (0..SPAN).step_by(BLOCK) {
            local.write_at(&[1; BLOCK], offset, false).unwrap();
        }
        local.flush().unwrap();
    }

    /// Submits a bio with `buffer`, and takes the buffer back.
    fn carry_out(local: &mut Local, bio: Bio, buffer: &mut Buffer) {
        local.submit(bio);
        let done = local.poll().expect("answered from memory, it is done at once");
        done.status.unwrap();
        *buffer = done.buffer;
    }

    fn writes(&mut self, local: &mut Local, buffer: &mut Buffer, count: u64, fua: bool) {
        for token in 0..count {
            let data = std::mem::replace(buffer, Buffer::empty());
            Fixture::carry_out(local, Bio::write(self.place(), data, fua, token), buffer);
        }
    }

    /// Writes whose data a client has in memory that it shares.
    fn writes_in_place(&mut self, local: &mut Local, memory: &ClientMemory, count: u64) {
        for _ in 0..count {
            let (at, from) = (self.place(), memory.source(0, BLOCK));
            let is_done = self.device.write_from(at, from, false, local.port_id());
            assert!(is_done, "a write with room takes no bio");
        }
    }

    fn flushed_writes(&mut self, local: &mut Local, buffer: &mut Buffer, count: u64) {
        for token in 0..count {
            let data = std::mem::replace(buffer, Buffer::empty());
            Fixture::carry_out(local, Bio::write(self.place(), data, false, token), buffer);
            let data = std::mem::replace(buffer, Buffer::empty());
            Fixture::carry_out(local, Bio::flush(token), &mut Buffer::empty());
            *buffer = data;
        }
    }

    fn reads(&mut self, local: &mut Local, buffer: &mut Buffer, count: u64) {
        for token in 0..count {
            let into = std::mem::replace(buffer, Buffer::empty());
            Fixture::carry_out(local, Bio::read(self.place(), into, token), buffer);
        }
    }
}

#[test]
fn requests_to_a_device_allocate_nothing() {
    let mut fixture = Fixture::new(PCACHE);
    let mut local = Local::without_kernel(&fixture.device).unwrap();
    fixture.warm_up(&mut local);
    let mut buffer = Buffer::from_bytes(&[7; BLOCK]);
    fixture.writes(&mut local, &mut buffer, 500, true);
    fixture.reads(&mut local, &mut buffer, 10);
    let writes = allocations(|| fixture.writes(&mut local, &mut buffer, WRITES, false));
    let durable = allocations(|| fixture.writes(&mut local, &mut buffer, WRITES / 4, true));
    let reads = allocations(|| fixture.reads(&mut local, &mut buffer, WRITES));
    let bytes = [3; BLOCK];
    let blocking = allocations(|| {
        for _ in 0..WRITES / 4 {
            let place = fixture.place();
            local.write_at(&bytes, place, false).unwrap();
        }
        local.flush().unwrap();
    });
    let memory = shared_memory();
    let copied = allocations(|| fixture.writes_in_place(&mut local, &memory, WRITES));
    assert_eq!([writes, durable, reads, blocking, copied], [0; 5]);
}

/// With checksums of data there is a table for each segment, which grows while the segment is
/// filled for the first time, by doubling: less than one allocation in fifty writes.
#[test]
fn tables_of_checksums_grow_rarely() {
    let mut fixture = Fixture::new("pcache cache backing 2 data_crc true");
    let mut local = Local::without_kernel(&fixture.device).unwrap();
    fixture.warm_up(&mut local);
    let mut buffer = Buffer::from_bytes(&[7; BLOCK]);
    let count = allocations(|| fixture.writes(&mut local, &mut buffer, WRITES, false));
    assert!(count < WRITES / 50, "{count} allocations");
}

/// Checksums are verified where the data is: in whole blocks, and for reads of a part of one
/// store's data, on the medium.
#[test]
fn reads_with_checksums_allocate_nothing() {
    let mut fixture = Fixture::new("pcache cache backing 2 data_crc true");
    let mut local = Local::without_kernel(&fixture.device).unwrap();
    fixture.warm_up(&mut local);
    let mut buffer = Buffer::from_bytes(&[7; BLOCK]);
    fixture.reads(&mut local, &mut buffer, 10);
    let blocks = allocations(|| fixture.reads(&mut local, &mut buffer, WRITES));
    let mut part = Buffer::zeroed(512);
    let parts = allocations(|| fixture.reads(&mut local, &mut part, WRITES));
    assert_eq!([blocks, parts], [0; 2]);
}

#[test]
fn writes_to_the_engine_allocate_nothing() {
    let mut fixture = Fixture::new(PCACHE);
    fixture.warm_up(&mut Local::without_kernel(&fixture.device).unwrap());
    let mut port = Port::new(9);
    let mut buffer = Buffer::from_bytes(&[7; BLOCK]);
    let mut write = |count: u64| {
        for token in 0..count {
            let data = std::mem::replace(&mut buffer, Buffer::empty());
            let offset = fixture.place();
            fixture.target.submit(Bio::write(offset, data, false, token), &mut port);
            let done = port.done.pop_front().expect("a write with room ends at once");
            done.status.unwrap();
            buffer = done.buffer;
        }
    };
    write(500);
    assert_eq!(allocations(|| write(WRITES)), 0);
}

/// In the environment of the second run: how many writes it makes.
const CHILD: &str = "UDM_HOTPATH_CHILD";
const BEGIN: &str = "hot path begins";
const END: &str = "hot path ends";
/// After everything is written out.
const SETTLED: &str = "hot path is settled";
/// Bytes that may be unwritten in a run that writes to a file: more than the run writes.
const WINDOW: u64 = 32 << 20;

/// In that of runs whose instructions are counted: `write`, `copied`, `fua`, `flush` or `read`.
const ONLY: &str = "UDM_HOTPATH_ONLY";
/// Of the run that writes to a file: its mode of I/O.
const MODE: &str = "UDM_HOTPATH_MODE";
/// Their table.
const TABLE: &str = "UDM_HOTPATH_TABLE";

/// The allocations and calls of the second run, without the first one's.
#[test]
fn second_run() {
    let Ok(count) = std::env::var(CHILD) else { return };
    let count: u64 = count.parse().unwrap();
    let table = std::env::var(TABLE).unwrap_or(PCACHE.into());
    let mut fixture = Fixture::new(&table);
    let mut local = Local::without_kernel(&fixture.device).unwrap();
    fixture.warm_up(&mut local);
    let mut buffer = Buffer::from_bytes(&[7; BLOCK]);
    fixture.writes(&mut local, &mut buffer, 500, true);
    let mark = |text: &str| std::io::stderr().write_all(text.as_bytes()).unwrap();
    let only = std::env::var(ONLY).unwrap_or_default();
    let is_wanted = |what: &str| only.is_empty() || only == what;
    mark(BEGIN);
    if is_wanted("write") {
        fixture.writes(&mut local, &mut buffer, count, false);
    }
    if only == "copied" {
        fixture.writes_in_place(&mut local, &shared_memory(), count);
    }
    if is_wanted("fua") {
        fixture.writes(&mut local, &mut buffer, count / 4, true);
    }
    if is_wanted("flush") {
        fixture.flushed_writes(&mut local, &mut buffer, count / 4);
    }
    if is_wanted("read") {
        fixture.reads(&mut local, &mut buffer, count);
    }
    mark(END);
}

const SECOND_RUN: [&str; 4] = ["--exact", "second_run", "--nocapture", "--test-threads=1"];

fn find_program(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|folder| folder.join(name)).find(|path| path.is_file())
}

#[test]
fn requests_answered_from_memory_make_no_system_calls() {
    let Some(strace) = find_program("strace") else {
        eprintln!("SKIPPED: strace is not installed (scripts/install-tools.sh installs it)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let output = Command::new(strace)
        .args(["-f", "-qq", "-ttt", "-o"])
        .arg(&trace)
        .arg(std::env::current_exe().unwrap())
        .args(SECOND_RUN)
        .env(CHILD, WRITES.to_string())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("Operation not permitted") && !said.contains(BEGIN) {
        eprintln!("SKIPPED: strace may not trace here: {said}");
        return;
    }
    assert!(output.status.success(), "{said}");
    let trace = std::fs::read_to_string(&trace).unwrap();
    let lines: Vec<&str> = trace.lines().collect();
    let find = |mark: &str| {
        let at = lines.iter().position(|line| line.contains(mark));
        at.unwrap_or_else(|| panic!("'{mark}' is not in the trace"))
    };
    let (begin, end) = (find(BEGIN), find(END));
    // A flush asks for the size of the cache file, at most once in 20 ms. Some C libraries do so
    // with another call.
    let is_fstat = |line: &&&str| {
        line.contains(" fstat(") || line.contains(" newfstatat(") && line.contains(", \"\", ")
    };
    let (looks, others): (Vec<&str>, Vec<&str>) = lines[begin + 1..end].iter().partition(is_fstat);
    assert!(others.is_empty(), "{} calls, first: {}", others.len(), others[0]);
    // A line begins with its thread and the time in seconds.
    let seconds = |line: &str| line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap();
    let looks_max = (seconds(lines[end]) - seconds(lines[begin])) / 0.020 + 1.0;
    assert!(looks.len() as f64 <= looks_max, "{} looks, at most {looks_max}", looks.len());
}

/// A second run that writes one block after the other to a file, in this mode of I/O.
#[test]
fn second_run_to_a_file() {
    let (Ok(count), Ok(mode)) = (std::env::var(CHILD), std::env::var(MODE)) else { return };
    let io = if mode == "lazy" { IoMode::Lazy } else { IoMode::Buffered };
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SPAN).unwrap();
    // The window holds all writes, so that no write waits for a slow disk.
    let window = (mode == "lazy").then_some(WINDOW);
    let options = FileOptions { io, window, ..FileOptions::default() };
    let disk = Arc::new(FileDisk::open(file.path(), &options).unwrap());
    let args = LinearArgs::parse(&Word::list("disk 0")).unwrap();
    let target = Arc::new(Linear::new(&args, SPAN, disk.clone()).unwrap());
    let device = Device::with_table("lazy", LoadedTable::single(target, SPAN)).unwrap();
    let mut local = Local::new(&device).unwrap();
    let mut write = |nth: u64| {
        local.write_at(&[1; BLOCK], nth * BLOCK as u64 % SPAN, false).unwrap();
    };
    (0..100).for_each(&mut write);
    let mark = |text: &str| std::io::stderr().write_all(text.as_bytes()).unwrap();
    mark(BEGIN);
    (0..count.parse().unwrap()).for_each(&mut write);
    mark(END);
    let Some(pacing) = disk.pacing() else { return };
    assert_eq!(pacing.waited, 0, "{pacing:?}");
    // The write-out of the last batch begins after a pause, however late its thread runs.
    let deadline = Instant::now() + Duration::from_secs(60);
    let is_written_out = || {
        let pacing = disk.pacing().unwrap();
        pacing.dirty_bytes + pacing.write_out_bytes == 0
    };
    while !is_written_out() {
        assert!(Instant::now() < deadline, "{:?}", disk.pacing());
        std::thread::sleep(Duration::from_millis(10));
    }
    mark(SETTLED);
}

/// The system calls of a second run that writes to a file.
struct CallsToAFile {
    /// The writing thread's calls, between its marks.
    writer: Vec<String>,
    /// All other threads' calls, from the first mark until everything is written out.
    others: Vec<String>,
    seconds: f64,
}

/// Counts neither the waits of the writer for completions nor the sleeps of other threads: the
/// kernel may complete any buffered write later, and a thread that sleeps at most 100 ms sleeps
/// more often if the machine is slow.
fn calls_to_a_file(strace: &Path, mode: &str, count: u64) -> Option<CallsToAFile> {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let output = Command::new(strace)
        .args(["-f", "-qq", "-ttt", "-o"])
        .arg(&trace)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "second_run_to_a_file", "--nocapture", "--test-threads=1"])
        .env(CHILD, count.to_string())
        .env(MODE, mode)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("Operation not permitted") && !said.contains(BEGIN) {
        eprintln!("SKIPPED: strace may not trace here: {said}");
        return None;
    }
    assert!(output.status.success(), "{said}");
    let trace = std::fs::read_to_string(&trace).unwrap();
    let lines: Vec<&str> = trace.lines().collect();
    let find = |mark: &str| lines.iter().position(|line| line.contains(mark));
    let begin = find(BEGIN).expect("the trace has the first mark");
    let end = find(END).expect("the trace has the last mark of the writer");
    let settled = find(SETTLED).unwrap_or(end);
    // A line begins with its thread and the time in seconds.
    let words = |line: &str, nth: usize| line.split_whitespace().nth(nth).unwrap().to_owned();
    let time = |line: &str| words(line, 1).parse::<f64>().unwrap();
    let own = words(lines[begin], 0);
    // A call that was interrupted by another thread has two lines.
    let calls = |range: std::ops::Range<usize>, is_own: bool, ignored: fn(&str) -> bool| {
        let calls = lines[range].iter().filter(|line| !line.contains(" resumed>"));
        let calls = calls.filter(|line| (words(line, 0) == own) == is_own && !ignored(line));
        calls.map(|line| line.to_string()).collect::<Vec<String>>()
    };
    let is_wait = |line: &str| {
        let arguments = line.split_once(" io_uring_enter(").map(|(_, arguments)| arguments);
        arguments.and_then(|arguments| arguments.split(", ").nth(1)) == Some("0")
    };
    Some(CallsToAFile {
        writer: calls(begin + 1..end, true, is_wait),
        others: calls(begin + 1..settled, false, |line| line.contains(" futex(")),
        seconds: time(lines[settled]) - time(lines[begin]),
    })
}

/// A lazy write enters the kernel as a buffered one does. Further calls belong to batches of
/// write-out: a few for each.
#[test]
fn lazy_writes_make_no_calls_of_their_own() {
    let Some(strace) = find_program("strace") else {
        eprintln!("SKIPPED: strace is not installed (scripts/install-tools.sh installs it)");
        return;
    };
    let count = 5_000;
    let Some(buffered) = calls_to_a_file(&strace, "buffered", count) else { return };
    let Some(lazy) = calls_to_a_file(&strace, "lazy", count) else { return };
    let more = lazy.writer.len().saturating_sub(buffered.writer.len()) as u64;
    let others = lazy.others.len() as u64;
    println!(
        "{count} lazy writes: {more} calls more than buffered ones, {others} of the write-out"
    );
    let is_understood = buffered.writer.len() as u64 >= count;
    assert!(is_understood, "each write is a call, or the trace is not understood");
    // A batch has an eighth of the window, or the bytes of 100 ms. The write-out makes six calls
    // for a batch, and the writer wakes it up; both may meet at the lock, most of all under strace.
    // In a run that is not slowed down, a call for each write would be ten times the bound.
    let batches = count * BLOCK as u64 / (WINDOW / 8) + (lazy.seconds / 0.1) as u64 + 2;
    let most = (count / 10).max(10 * batches);
    assert!(more <= most, "{more} calls more of the writer, last: {:?}", lazy.writer.last());
    assert!((1..=most).contains(&others), "{others} calls of the write-out, at most {most}");
}

/// Instructions of a whole second run.
fn instructions(valgrind: &Path, table: &str, only: &str, count: u64) -> u64 {
    let output = Command::new(valgrind)
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe().unwrap())
        .args(SECOND_RUN)
        .env(CHILD, count.to_string())
        .env(TABLE, table)
        .env(ONLY, only)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let collected = said.lines().find_map(|line| line.split_once("Collected :"));
    let (_, number) = collected.unwrap_or_else(|| panic!("no count: {said}"));
    number.trim().parse().unwrap()
}

/// Times depend on the machine and its neighbours; instructions do not. The copy of 4 KiB is 520
/// of them with 32-byte stores. The bounds leave a fifth for other compilers: who meets them
/// has made requests slower, or knows why not.
#[test]
fn requests_take_few_instructions() {
    let Some(valgrind) = find_program("valgrind") else {
        eprintln!("SKIPPED: valgrind is not installed (scripts/install-tools.sh installs it)");
        return;
    };
    let bounds = [
        (PCACHE, "write", 2_300),
        (PCACHE, "copied", 2_300),
        (PCACHE, "fua", 3_750),
        (PCACHE, "read", 1_500),
        (WRITECACHE, "write", 3_700),
        (WRITECACHE, "flush", 5_300),
        (WRITECACHE, "read", 1_450),
        (SMALL_BLOCKS, "write", 9_000),
    ];
    for (table, only, bound) in bounds {
        let (few, many) = (2_000, 10_000);
        let count = |count| instructions(&valgrind, table, only, count);
        let more = count(many) - count(few);
        let requests = if ["fua", "flush"].contains(&only) { (many - few) / 4 } else { many - few };
        let each = more / requests;
        println!("{table}, {only}: {each} instructions");
        assert!(each <= bound, "{only}: {each} instructions, at most {bound} were expected");
    }
}
