//! The engine itself with the policies of the target `cache`: a served cache over disks without
//! content replays a trace. The engine counts hits, and the disks count copied bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use udm::bio::Op;
use udm::cache::Devices;
use udm::cache::{Cache, OpenOptions, TableArgs};
use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::local::{Local, ManualClock};
use udm::table::Word;
use udm::target::Target;
use udm::topology::Topology;
use udm::units::{BLOCK, MIB, SECTOR};

use crate::rig::ram_disk;
use crate::simulator::{Piece, TICK, Tally, moment, pieces};
use crate::trace::Trace;

/// Room for the mappings of any of these caches.
const METADATA_BYTES: u64 = 16 * MIB;

/// A disk without content that counts what is written to it.
#[derive(Debug)]
struct CountingDisk {
    limits: DiskLimits,
    written: AtomicU64,
}

impl CountingDisk {
    fn new(name: &str, size_bytes: u64) -> Arc<CountingDisk> {
        let limits = DiskLimits {
            name: name.into(),
            size_bytes,
            block_bytes: 512,
            atomic_bytes: 512,
            has_discard: false,
            topology: Topology::default(),
            identity: name.into(),
            kernel_name: name.into(),
        };
        Arc::new(CountingDisk { limits, written: AtomicU64::new(0) })
    }

    fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

impl Disk for CountingDisk {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        if io.op == Op::Write {
            self.written.fetch_add(io.len, Ordering::Relaxed);
        }
        ring.finish(io, Ok(()));
    }
}

/// Sends a trace through a cache of `slots` blocks with the policy of this name. Each part of a
/// request in one block is a request of its own: it is hit if the cache device alone answers it.
/// The background has done what it can before the next one comes.
pub fn run(policy: &str, trace: &Trace, block_bytes: u64, slots: u32) -> Result<Tally> {
    let (pieces, origin_blocks) = pieces(trace, block_bytes);
    let fast = CountingDisk::new("fast", u64::from(slots) * block_bytes);
    let origin = CountingDisk::new("origin", origin_blocks * block_bytes);
    let devices =
        Devices { metadata: ram_disk(METADATA_BYTES), cache: fast.clone(), origin: origin.clone() };
    let words = format!("M C O {} 1 metadata2 {policy} 0", block_bytes / SECTOR);
    let args = TableArgs::parse(&Word::list(&words))?;
    let len = origin_blocks * block_bytes;
    let cache = Arc::new(Cache::open(args, len, devices, OpenOptions::default())?);
    let device = Device::with_table("hitratio", LoadedTable::single(cache.clone(), len))?;
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(&device)?.with_background(clock.clone());
    let (mut tally, mut memory) = (Tally::default(), vec![0; block_bytes as usize]);
    let (mut now, mut hits, mut own) = (0, 0, 0);
    for piece in &pieces {
        let then = moment(trace, piece.nth);
        if then >= now + TICK {
            clock.advance(then - now);
            now = then;
            device.events().work();
        }
        let len = u64::from(piece.len) * BLOCK;
        ask(&mut local, piece, block_bytes, &mut memory[..len as usize])?;
        local.turn();
        tally.asked += len;
        let hits_now = hits_of(&cache)?;
        let is_hit = hits_now != std::mem::replace(&mut hits, hits_now);
        tally.hit += if is_hit { len } else { 0 };
        own += if piece.is_write { len } else { 0 };
    }
    // A client's write goes to one of the devices in any case. The disks cannot tell how much of
    // the rest is write-back.
    tally.filled = fast.written() + origin.written() - own;
    Ok(tally)
}

fn ask(local: &mut Local, piece: &Piece, block_bytes: u64, memory: &mut [u8]) -> Result<()> {
    let at = piece.block * block_bytes + u64::from(piece.first) * BLOCK;
    let done = match piece.is_write {
        true => local.write_at(memory, at, false),
        false => local.read_at(memory, at),
    };
    done.ok().context("a request failed")
}

/// The kernel's counters in the status line, of reads and of writes.
fn hits_of(cache: &Cache) -> Result<u64> {
    let status = cache.status();
    let mut words = status.split(' ');
    let mut next = |nth: usize| words.nth(nth).and_then(|word| word.parse::<u64>().ok());
    let hits = next(4).zip(next(1)).map(|(reads, writes)| reads + writes);
    hits.context("a status line has hits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Request;

    fn trace(requests: Vec<Request>) -> Trace {
        Trace { name: String::new(), requests, seconds: Vec::new() }
    }

    fn one(block: u64, count: u32, is_write: bool) -> Request {
        Request { block, count, is_write }
    }

    #[test]
    fn what_was_read_is_hit_and_what_was_filled_is_counted() {
        let round = (0..64).map(|block| one(block * 8, 1, false));
        let requests: Vec<Request> = std::iter::repeat_n(round, 100).flatten().collect();
        for policy in ["probation", "smq"] {
            let tally = run(policy, &trace(requests.clone()), 32 << 10, 128).unwrap();
            assert_eq!(tally.asked, 64 * 100 * BLOCK);
            assert!(tally.hit >= tally.asked * 90 / 100, "{policy} {tally:?}");
            assert!((64 * BLOCK..=64 * 8 * BLOCK).contains(&tally.filled), "{policy} {tally:?}");
        }
    }
    #[test]
    fn writes_are_hits_when_their_block_is_whole_as_on_paper() {
        let trace = trace(vec![one(3, 1, true); 10]);
        let served = run("probation", &trace, 32 << 10, 8).unwrap();
        // The first write promotes the block, the second one reads the rest; both are written
        // twice.
        assert_eq!((served.hit, served.moved()), (8 * BLOCK, 9 * BLOCK));
        let paper =
            crate::simulator::run(crate::simulator::CachePolicy::Probation, &trace, 32 << 10, 8);
        assert_eq!((paper.hit, paper.moved()), (8 * BLOCK, 9 * BLOCK));
    }
}
