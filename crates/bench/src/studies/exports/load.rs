//! One load through one export, and its measurements.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::device::Device;
use udm::local::Local;
use udm::pmem::client_memory::ClientMemory;
use udm::prng::Prng;
use udm::queue::now;
use udm::sync::statics::atomic::{AtomicU32, Ordering};
use udm_export::vhost::front::{Ask, Front};
use udm_export::vhost::poll::{GLANCES, Poll, glance};
use udm_export::vhost::{Server, Uri};

use crate::cpu;
use crate::stats::Histogram;

/// Bytes of a request.
pub const BLOCK: u64 = 4096;
/// The minimal number of requests of a measurement: the kernel does not count the processor time of
/// a single one.
const REQUESTS_MIN: u64 = 100;
/// How long an export without requests is observed.
const IDLE: Duration = Duration::from_secs(2);

/// What to ask for.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Requests in flight.
    pub depth: usize,
    /// Reads instead of writes.
    pub is_read: bool,
    /// Bytes of the device that are used.
    pub span: u64,
    /// How long.
    pub runtime: Duration,
}

/// The measurements.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measure {
    /// Requests per second.
    pub iops: f64,
    /// Their times, in nanoseconds.
    pub p50: f64,
    /// The same.
    pub p999: f64,
    /// Processor time of the server for a request, in nanoseconds. In process: of the caller.
    pub server: f64,
}

impl Measure {
    fn of(times: &Histogram, elapsed: Duration, server: f64) -> Measure {
        let count = times.count().max(1) as f64;
        Measure {
            iops: count / elapsed.as_secs_f64(),
            p50: times.percentile(50.0),
            p999: times.percentile(99.9),
            server: server.max(0.0) / count,
        }
    }
}

/// Returns whether the measurement continues: for `runtime`, and until it has [`REQUESTS_MIN`]
/// requests, because this program may get no processor in all that time.
fn goes_on(times: &Histogram, start: Instant, runtime: Duration) -> bool {
    times.count() < REQUESTS_MIN || start.elapsed() < runtime
}

/// Two sleeping threads that wake each other in turn, each through an eventfd: the minimal cost of
/// a request if neither side polls. The processor time of the second thread counts.
pub fn wake_ups(runtime: Duration) -> Result<Measure> {
    let eventfd = || eventfd(0, EventfdFlags::CLOEXEC);
    let (ask, answer, mut word) = (eventfd()?, eventfd()?, 1_u64.to_le_bytes());
    let mut times = Histogram::default();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| -> Result<f64> {
            let mut word = [0; 8];
            loop {
                rustix::io::read(&ask, &mut word)?;
                if u64::from_le_bytes(word) > 1 {
                    return Ok(cpu::of_thread());
                }
                rustix::io::write(&answer, &word)?;
            }
        });
        let start = Instant::now();
        while goes_on(&times, start, runtime) {
            let begun = now();
            rustix::io::write(&ask, &1_u64.to_le_bytes())?;
            rustix::io::read(&answer, &mut word)?;
            times.add(now() - begun);
        }
        let elapsed = start.elapsed();
        rustix::io::write(&ask, &2_u64.to_le_bytes())?;
        let spent = server.join().expect("to wait does not panic")?;
        Ok(Measure::of(&times, elapsed, spent))
    })
}

/// Two threads that never sleep: one passes a page to the other and polls for the answer. This is
/// the minimal cost of a request if one processor writes its data and another one reads it.
pub fn hand_overs(runtime: Duration) -> Result<Measure> {
    let file = memfd_create("hand-overs", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, 2 * BLOCK)?;
    let memory = ClientMemory::map(&file, 0, 2 * BLOCK)?;
    let (asked, answered) = (memory.u32_at(0), memory.u32_at(256));
    let wait_for = |word: &AtomicU32, is_wanted: &dyn Fn(u32) -> bool| loop {
        glance(GLANCES, || is_wanted(word.load(Ordering::Acquire)));
        let found = word.load(Ordering::Acquire);
        if is_wanted(found) {
            return found;
        }
    };
    let mut times = Histogram::default();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (mut last, mut page) = (0, vec![0; BLOCK as usize]);
            while last != u32::MAX {
                last = wait_for(asked, &|nth| nth != last);
                memory.load(BLOCK, &mut page);
                answered.store(last, Ordering::Release);
            }
            cpu::of_thread()
        });
        let (start, page, mut nth) = (Instant::now(), vec![7; BLOCK as usize], 0);
        while goes_on(&times, start, runtime) {
            let begun = now();
            nth += 1;
            memory.store(BLOCK, &page);
            asked.store(nth, Ordering::Release);
            wait_for(answered, &|answer| answer == nth);
            times.add(now() - begun);
        }
        let elapsed = start.elapsed();
        asked.store(u32::MAX, Ordering::Release);
        let spent = server.join().expect("to look does not panic");
        Ok(Measure::of(&times, elapsed, spent))
    })
}

impl Load {
    /// Without an export.
    pub fn in_process(&self, device: &Arc<Device>) -> Result<Measure> {
        let mut local = Local::new(device)?;
        let mut random = Prng::new(1);
        let mut begun = vec![0; self.depth];
        let mut times = Histogram::default();
        let mut free: Vec<(usize, Buffer)> =
            (0..self.depth).map(|slot| (slot, Buffer::zeroed(BLOCK as usize))).collect();
        let (start, spent) = (Instant::now(), cpu::of_thread());
        while goes_on(&times, start, self.runtime) {
            while let Some((slot, buffer)) = free.pop() {
                let at = random.below(self.span / BLOCK) * BLOCK;
                begun[slot] = now();
                let token = slot as u64;
                local.submit(match self.is_read {
                    true => Bio::read(at, buffer, token),
                    false => Bio::write(at, buffer, false, token),
                });
            }
            let bio = local.wait().ok_or_else(|| anyhow!("a request got lost"))?;
            bio.status.map_err(|status| anyhow!("a request failed: {status}"))?;
            times.add(now() - begun[bio.token as usize]);
            free.push((bio.token as usize, bio.buffer));
        }
        let (elapsed, spent) = (start.elapsed(), cpu::of_thread() - spent);
        Ok(Measure::of(&times, elapsed, spent))
    }

    /// Through a vhost-user server at `uri`, whose processor time `server` says.
    pub fn over_vhost(&self, uri: &Uri, server: impl Fn() -> f64) -> Result<Measure> {
        let front = Front::connect(uri)?;
        let mut queue = front.queue()?;
        let mut random = Prng::new(1);
        let mut begun = vec![0; self.depth];
        let mut free: Vec<usize> = (0..self.depth).collect();
        let mut times = Histogram::default();
        let mut data = vec![7; BLOCK as usize];
        let op = if self.is_read { Op::Read } else { Op::Write };
        let (start, spent) = (Instant::now(), server());
        while goes_on(&times, start, self.runtime) {
            while let Some(slot) = free.pop() {
                let offset = random.below(self.span / BLOCK) * BLOCK;
                begun[slot] = now();
                let ask = Ask { op, offset, len: BLOCK, fua: false, token: slot as u64 };
                ensure!(queue.start(ask, |bytes| bytes.put(&data))?, "no room for a request");
            }
            queue.wait(None);
            while let Some(answer) = queue.poll(|_, bytes| bytes.get(&mut data)) {
                answer.result.map_err(|status| anyhow!("a request failed: {status}"))?;
                times.add(now() - begun[answer.token as usize]);
                free.push(answer.token as usize);
            }
        }
        let (elapsed, spent) = (start.elapsed(), server() - spent);
        Ok(Measure::of(&times, elapsed, spent))
    }

    /// Through a server of udm's own; both sides poll as given.
    pub fn over_udm(&self, device: &Arc<Device>, socket: &Path, poll: Poll) -> Result<Measure> {
        let uri = Uri::new(socket, poll);
        let _server = Server::start(device, &uri)?;
        self.over_vhost(&uri, || cpu::of_threads("udm-vhost-1.0"))
    }
}

/// Sleeps per second of the server's threads while a client is connected and sends no requests.
pub fn idle_vhost(device: &Arc<Device>, socket: &Path, poll: Poll) -> Result<f64> {
    let uri = Uri::new(socket, poll);
    let _server = Server::start(device, &uri)?;
    let front = Front::connect(&Uri { poll: Poll::Never, ..uri })?;
    let mut queue = front.queue()?;
    for token in 0..200 {
        let ask = Ask { op: Op::Read, offset: 0, len: BLOCK, fua: false, token };
        ensure!(queue.start(ask, |_| ())?, "no room for a request");
        while queue.poll(|_, _| ()).is_none() {
            queue.wait(None);
        }
    }
    Ok(idle("udm-vhost"))
}

/// The same over NBD, for a server that is at `socket`.
pub fn idle_nbd(socket: &Path) -> Result<f64> {
    let mut client = UnixStream::connect(socket)?;
    client.read_exact(&mut [0; 18])?;
    client.write_all(&[0, 0, 0, 3])?;
    client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0")?;
    client.read_exact(&mut [0; 10])?;
    let mut request = [0; 28];
    request[..4].copy_from_slice(&[0x25, 0x60, 0x95, 0x13]);
    request[26] = 2;
    for _ in 0..200 {
        client.write_all(&request)?;
        client.read_exact(&mut [0; 16 + 512])?;
    }
    Ok(idle("udm-nbd"))
}

fn idle(threads: &str) -> f64 {
    // Until they sleep, which takes longer if others have the processor.
    let mut before = f64::NAN;
    for _ in 0..200 {
        let sleeps = cpu::sleeps_of_threads(threads);
        if sleeps == before {
            break;
        }
        before = sleeps;
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(IDLE);
    (cpu::sleeps_of_threads(threads) - before) / IDLE.as_secs_f64()
}

/// A server of another kind, ended when dropped.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    /// Where it listens.
    pub socket: PathBuf,
}

impl Peer {
    /// qemu-storage-daemon with its null device, by vhost-user-blk.
    pub fn qemu(socket: &Path, bytes: u64) -> Result<Peer> {
        let path = socket.display();
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--object", "iothread,id=thread"]);
        command.arg("--blockdev").arg(format!("driver=null-co,node-name=null,size={bytes}"));
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export,node-name=null,addr.type=unix,addr.path={path},\
             writable=on,iothread=thread"
        ));
        Peer::start(command, socket)
    }

    /// nbdkit's memory plugin.
    pub fn nbdkit(socket: &Path, bytes: u64) -> Result<Peer> {
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U"]).arg(socket).arg("memory").arg(bytes.to_string());
        Peer::start(command, socket)
    }

    fn start(mut command: Command, socket: &Path) -> Result<Peer> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot start {name}"))?;
        let peer = Peer { child, socket: socket.to_path_buf() };
        let start = Instant::now();
        while UnixStream::connect(socket).is_err() {
            if start.elapsed() > Duration::from_secs(10) {
                bail!("{name} does not listen at {}", socket.display());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(peer)
    }

    /// Its processor time, in nanoseconds.
    pub fn cpu(&self) -> f64 {
        cpu::of_child(self.child.id())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
