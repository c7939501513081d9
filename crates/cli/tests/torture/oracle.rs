//! The values that each sector may show.
//!
//! Each write has its own value (zeroes have the value 0), a stamp of its request and, once
//! answered, a stamp of its end. An answered write *supersedes* another one if it was requested
//! after the other's end. A write that is not superseded may be read. A write without an answer, or
//! with an error, may be visible or not, and supersedes no other write.
//!
//! When a server has died with all its memory, only durable writes supersede: FUA writes, and
//! writes answered before the request of a flush that was answered.
//!
//! A read during a write may show a sector of both where the kernel copies the data: the kernel
//! locks neither tmpfs nor ext4 against readers. In up to 1 of 100 reads, a program sees this if it
//! reads and writes a page of such a file at the same time. At rest, every sector is whole.
//!
//! The sectors that a new server shows are the truth from then on. So each sector is judged as if
//! it had been written and answered at that moment. The same applies to a server that saw a device
//! fail, except for failed writes that it shows: the next server may not have them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::load::Asked;

pub const SECTOR: usize = 512;

/// Sectors that share a lock.
const UNIT_SECTORS: u64 = 128;

/// Events that are remembered, for the report of a failure.
const EVENTS_MAX: usize = 200_000;
/// Those of them that a report shows.
const EVENTS_SHOWN: usize = 80;

/// An end that has not come.
const NEVER: u64 = u64::MAX;

/// The content of a sector in its version `value`; 0 is a sector of zeroes.
pub fn fill(number: u64, value: u64, sector: &mut [u8]) {
    for pair in sector.chunks_exact_mut(16) {
        pair[..8].copy_from_slice(&(if value == 0 { 0 } else { number }).to_le_bytes());
        pair[8..].copy_from_slice(&value.to_le_bytes());
    }
}

/// The value that a sector holds, or `None` if it is not one and whole.
pub fn value_of(number: u64, sector: &[u8]) -> Option<u64> {
    let value = u64::from_le_bytes(sector[8..16].try_into().unwrap());
    let mut expected = [0; SECTOR];
    fill(number, value, &mut expected);
    (sector == expected).then_some(value)
}

#[derive(Clone, Debug)]
struct Write {
    value: u64,
    begin: u64,
    end: u64,
    /// Answered without an error, so that it supersedes.
    is_sure: bool,
    is_fua: bool,
    /// Flushes failed when it was not durable: it may never become so.
    is_doubted: bool,
}

impl Write {
    fn asked(value: u64, begin: u64) -> Write {
        Write { value, begin, end: NEVER, is_sure: false, is_fua: false, is_doubted: false }
    }
}

/// How much was lost when a server died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The server lives, but a device has failed under it. It may show a failed write that the next
    /// server does not have.
    Nothing,
    /// The process only.
    Process,
    /// And the memory that would have outlived it.
    Memory,
    /// A device failed, and the next server reports that the data that was not durable is lost.
    Told,
    /// The power failed after an orderly end: only data of failed flushes may be lost.
    Power,
}

#[derive(Default)]
struct Unit {
    sectors: Vec<Vec<Write>>,
    /// Reads in flight: the values that they may show are kept.
    reads: u64,
}

enum Event {
    Note(String),
    Asked { connection: u64, asked: Asked, begin: u64 },
    Answered { begin: u64, first: u64, count: u64, error: u32 },
}

/// The oracle's knowledge of a device's sectors.
pub struct Oracle {
    clock: AtomicU64,
    values: AtomicU64,
    /// Writes answered before this are durable.
    durable: AtomicU64,
    /// Flushes may fail: no answer makes a write durable.
    is_doubting: AtomicBool,
    /// Sectors that the kernel copies to and from their files.
    by_calls: Vec<Range<u64>>,
    /// Sectors of several values that reads have shown there.
    mixed: AtomicU64,
    units: Vec<Mutex<Unit>>,
    events: Mutex<VecDeque<Event>>,
}

impl Oracle {
    /// A device of zeroes. `by_calls`: the sectors that the kernel copies to and from their files.
    pub fn new(sectors: u64, by_calls: Vec<Range<u64>>) -> Oracle {
        let zero = Write { begin: 0, end: 0, is_sure: true, is_fua: true, ..Write::asked(0, 0) };
        let unit = |nth: u64| {
            let count = UNIT_SECTORS.min(sectors - nth * UNIT_SECTORS) as usize;
            Mutex::new(Unit { sectors: vec![vec![zero.clone()]; count], reads: 0 })
        };
        Oracle {
            clock: AtomicU64::new(1),
            values: AtomicU64::new(1),
            durable: AtomicU64::new(0),
            is_doubting: AtomicBool::new(false),
            by_calls,
            mixed: AtomicU64::new(0),
            units: (0..sectors.div_ceil(UNIT_SECTORS)).map(unit).collect(),
            events: Mutex::default(),
        }
    }

    /// How many sectors of several values reads have shown.
    pub fn mixed(&self) -> u64 {
        self.mixed.load(Ordering::SeqCst)
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// A value that no write has had yet.
    pub fn value(&self) -> u64 {
        self.values.fetch_add(1, Ordering::SeqCst)
    }

    pub fn note(&self, text: String) {
        self.remember(Event::Note(text));
    }

    fn remember(&self, event: Event) {
        let mut events = self.events.lock().unwrap();
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back(event);
    }

    /// Calls `action` with each sector's list and the unit's count of reads.
    fn each(&self, first: u64, count: u64, mut action: impl FnMut(u64, &mut Vec<Write>, u64)) {
        let mut number = first;
        while number < first + count {
            let unit = number / UNIT_SECTORS;
            let end = ((unit + 1) * UNIT_SECTORS).min(first + count);
            let mut unit = self.units[unit as usize].lock().unwrap();
            let reads = unit.reads;
            while number < end {
                action(number, &mut unit.sectors[(number % UNIT_SECTORS) as usize], reads);
                number += 1;
            }
        }
    }

    fn count_reads(&self, asked: &Asked, change: i64) {
        let last = (asked.first + asked.count - 1) / UNIT_SECTORS;
        for unit in asked.first / UNIT_SECTORS..=last {
            let reads = &mut self.units[unit as usize].lock().unwrap().reads;
            *reads = reads.checked_add_signed(change).unwrap();
        }
    }

    /// A request is about to be sent; the stamp of its begin.
    pub fn asked(&self, connection: u64, asked: &Asked) -> u64 {
        if asked.is_read() {
            self.count_reads(asked, 1);
        }
        let begin = self.now();
        self.remember(Event::Asked { connection, asked: *asked, begin });
        if let Some(value) = asked.value {
            let write = Write::asked(value, begin);
            self.each(asked.first, asked.count, |_, writes, _| writes.push(write.clone()));
        }
        begin
    }

    /// A write, a flush or a trim was answered.
    pub fn answered(&self, asked: &Asked, begin: u64, error: u32) {
        let end = self.now();
        let (first, count) = (asked.first, asked.count);
        self.remember(Event::Answered { begin, first, count, error });
        let is_doubting = self.is_doubting.load(Ordering::SeqCst);
        if asked.is_flush() && error == 0 && !is_doubting {
            self.durable.fetch_max(begin, Ordering::SeqCst);
        }
        if asked.value.is_none() {
            return;
        }
        let durable = self.durable.load(Ordering::SeqCst);
        self.each(asked.first, asked.count, |_, writes, reads| {
            let write = writes.iter_mut().find(|write| write.begin == begin).unwrap();
            write.end = end;
            write.is_sure = error == 0 && !asked.is_weak;
            write.is_fua = asked.is_fua && !is_doubting;
            if reads == 0 {
                forget(writes, durable);
            }
        });
    }

    /// A read was answered with `bytes`, or with `None` if it failed.
    pub fn was_read(&self, asked: &Asked, begin: u64, bytes: Option<&[u8]>) {
        let (first, count) = (asked.first, asked.count);
        self.remember(Event::Answered { begin, first, count, error: u32::from(bytes.is_none()) });
        if let Some(bytes) = bytes {
            self.each(asked.first, asked.count, |number, writes, _| {
                let sector = &bytes[(number - asked.first) as usize * SECTOR..][..SECTOR];
                let found = value_of(number, sector);
                let supersedes = |write: &Write| write.is_sure && write.end < begin;
                let is_mixed =
                    found.is_none() && self.by_calls.iter().any(|range| range.contains(&number));
                let is_right = match is_mixed {
                    true => may_mix(writes, number, sector, supersedes, begin),
                    false => may_show(writes, found, supersedes),
                };
                self.mixed.fetch_add(u64::from(is_mixed), Ordering::SeqCst);
                if !is_right {
                    self.fail(number, found, sector, writes, "a read during the load");
                }
            });
        }
        self.count_reads(asked, -1);
    }

    /// A read will not be answered: its client has hung up.
    pub fn give_up_read(&self, asked: &Asked) {
        self.count_reads(asked, -1);
    }

    /// The server is gone, and with it whatever it was asked for.
    pub fn server_is_gone(&self) {
        let end = self.now();
        let durable = self.durable.load(Ordering::SeqCst);
        for unit in &self.units {
            let mut unit = unit.lock().unwrap();
            for writes in &mut unit.sectors {
                let open = writes.iter_mut().filter(|write| write.end == NEVER);
                open.for_each(|write| write.end = end);
                forget(writes, durable);
            }
        }
    }

    /// Judges what is there after a server's end; that is the truth from here on.
    pub fn judge(&self, first: u64, bytes: &[u8], loss: Loss, what: &str) {
        let durable = self.durable.load(Ordering::SeqCst);
        self.each(first, (bytes.len() / SECTOR) as u64, |number, writes, _| {
            let sector = &bytes[(number - first) as usize * SECTOR..][..SECTOR];
            let found = value_of(number, sector);
            let supersedes = |write: &Write| match loss {
                Loss::Nothing | Loss::Process => write.is_sure,
                Loss::Memory | Loss::Told => is_durable(write, durable),
                Loss::Power => write.is_sure && !write.is_doubted,
            };
            if !may_show(writes, found, supersedes) {
                self.fail(number, found, sector, writes, what);
            }
            let begin = self.now();
            // After a power cut, that is the durable content.
            let is_fua = matches!(loss, Loss::Memory | Loss::Power);
            let value = found.unwrap();
            let is_of_failed = unsuperseded(writes, supersedes)
                .any(|write| write.value == value && !write.is_sure);
            if loss == Loss::Nothing && is_of_failed {
                return;
            }
            if !matches!(loss, Loss::Nothing | Loss::Process) || writes.len() > 1 {
                let end = self.now();
                let was_doubted =
                    writes.iter().any(|write| write.value == value && write.is_doubted);
                let is_doubted = was_doubted && !is_fua;
                let is_sure = true;
                writes.push(Write { value, begin, end, is_sure, is_fua, is_doubted });
                forget(writes, durable);
            }
        });
    }

    /// From now on flushes may fail, and lose what is not durable.
    pub fn doubt(&self) {
        self.is_doubting.store(true, Ordering::SeqCst);
    }

    /// Flushes do not fail any more. Writes that are not durable yet may never become durable. Only
    /// a failed flush reports that, and each client gets it at a different time.
    pub fn end_doubt(&self) {
        let durable = self.durable.load(Ordering::SeqCst);
        for unit in &self.units {
            let mut unit = unit.lock().unwrap();
            for write in unit.sectors.iter_mut().flatten() {
                write.is_doubted |= !is_durable(write, durable);
            }
        }
        self.is_doubting.store(false, Ordering::SeqCst);
    }

    /// Something that may be read from now on is not forgotten until `unpin`; the moment.
    pub fn pin(&self) -> u64 {
        self.units.iter().for_each(|unit| unit.lock().unwrap().reads += 1);
        self.now()
    }

    pub fn unpin(&self) {
        self.units.iter().for_each(|unit| unit.lock().unwrap().reads -= 1);
    }

    /// Whether a sector shows what was answered before the moment `begin`, or anything newer.
    pub fn is_as_new(&self, number: u64, sector: &[u8], begin: u64) -> bool {
        let found = value_of(number, sector);
        let mut is_right = false;
        self.each(number, 1, |_, writes, _| {
            let supersedes =
                |write: &Write| write.is_sure && !write.is_doubted && write.end < begin;
            is_right = may_show(writes, found, supersedes);
        });
        is_right
    }

    /// A sector is wrong.
    pub fn accuse(&self, number: u64, sector: &[u8], what: &str) {
        let found = value_of(number, sector);
        self.each(number, 1, |_, writes, _| self.fail(number, found, sector, writes, what));
    }

    /// A sector that is older than it was, which is known, or lost: any of its versions is right.
    pub fn accept(&self, number: u64, sector: &[u8], what: &str) {
        let found = value_of(number, sector);
        self.each(number, 1, |_, writes, _| {
            let Some(value) = found else { self.fail(number, found, sector, writes, what) };
            let (begin, end) = (self.now(), self.now());
            *writes =
                vec![Write { end, is_sure: true, is_fua: true, ..Write::asked(value, begin) }];
        });
    }

    /// Another program writes a sector of an origin; its cache may have something else for it.
    pub fn changed(&self, number: u64, value: u64, is_sure: bool) {
        self.each(number, 1, |_, writes, _| {
            let (begin, end) = (self.now(), self.now());
            writes.push(Write { end, is_sure, is_fua: true, ..Write::asked(value, begin) });
        });
    }

    pub fn is_doubtful(&self) -> bool {
        self.is_doubting.load(Ordering::SeqCst)
    }

    /// Says what was lost, with the history of that sector.
    fn fail(&self, number: u64, found: Option<u64>, bytes: &[u8], list: &[Write], what: &str) -> ! {
        println!("sector {number} shows {found:?} ({what}), which it may not: {:?}", &bytes[..32]);
        println!("values are numbers of writes, 0 is zeroes; the sector's writes:");
        list.iter().for_each(|write| println!("    {write:?}"));
        println!("durable: answered before {}", self.durable.load(Ordering::SeqCst));
        let events = self.events.lock().unwrap();
        let shown: Vec<&Event> = events.iter().filter(|event| event.is_about(number)).collect();
        println!("its last {} events:", EVENTS_SHOWN.min(shown.len()));
        shown.iter().skip(shown.len().saturating_sub(EVENTS_SHOWN)).for_each(|event| event.show());
        panic!("sector {number} is wrong");
    }

    /// The last things that were done.
    pub fn show_notes(&self) {
        // Reporting a wrong sector panics while these locks are held.
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let notes: Vec<&Event> =
            events.iter().filter(|event| matches!(event, Event::Note(_))).collect();
        notes.iter().skip(notes.len().saturating_sub(EVENTS_SHOWN)).for_each(|note| note.show());
    }
}

impl Event {
    fn is_about(&self, number: u64) -> bool {
        let (first, count) = match self {
            Event::Note(_) => return true,
            Event::Asked { asked, .. } if asked.is_flush() => return true,
            Event::Asked { asked, .. } => (asked.first, asked.count),
            Event::Answered { first, count, .. } => (*first, *count),
        };
        (first..first + count).contains(&number)
    }

    fn show(&self) {
        match self {
            Event::Note(text) => println!("    -- {text}"),
            Event::Asked { connection, asked, begin } => {
                println!("    {begin}: connection {connection} asks {asked}");
            }
            Event::Answered { begin, error: 0, .. } => println!("    {begin}: done"),
            Event::Answered { begin, error, .. } => println!("    {begin}: error {error}"),
        }
    }
}

/// Whether the write survives a server's death with its memory.
fn is_durable(write: &Write, durable: u64) -> bool {
    write.is_sure && !write.is_doubted && (write.is_fua || write.end < durable)
}

/// The writes that none of those that supersede has superseded.
fn unsuperseded(
    writes: &[Write],
    supersedes: impl Fn(&Write) -> bool,
) -> impl Iterator<Item = &Write> {
    let latest = writes.iter().filter(|write| supersedes(write)).map(|write| write.begin).max();
    writes.iter().filter(move |write| write.end >= latest.unwrap_or(0))
}

/// Whether `found` is a value that may be read.
fn may_show(writes: &[Write], found: Option<u64>, supersedes: impl Fn(&Write) -> bool) -> bool {
    unsuperseded(writes, supersedes).any(|write| Some(write.value) == found)
}

/// Whether a read that began then may show a sector of several values: each part is of a value that
/// may be read, and one of the parts is of a write that was in flight during the read.
fn may_mix(
    writes: &[Write],
    number: u64,
    sector: &[u8],
    supersedes: impl Fn(&Write) -> bool,
    begin: u64,
) -> bool {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let shown: Vec<&Write> = unsuperseded(writes, supersedes).collect();
    let numbers: Vec<u64> =
        shown.iter().map(|write| if write.value == 0 { 0 } else { number }).collect();
    let is_of = |pair: &[u8], wanted: &Write| word(&pair[8..]) == wanted.value;
    let mut pairs = sector.chunks_exact(16);
    let is_known = pairs.clone().all(|pair| {
        numbers.contains(&word(&pair[..8])) && shown.iter().any(|write| is_of(pair, write))
    });
    let is_beside = |write: &&&Write| write.end >= begin;
    is_known && pairs.any(|pair| shown.iter().filter(is_beside).any(|write| is_of(pair, write)))
}

/// Forgets what can never be read again.
fn forget(writes: &mut Vec<Write>, durable: u64) {
    let latest = writes.iter().filter(|write| is_durable(write, durable)).map(|write| write.begin);
    let latest = latest.max().unwrap_or(0);
    writes.retain(|write| write.end >= latest);
}

/// A read during a write may show parts of both, where the kernel copies, and no other data.
pub fn check_itself() {
    let done = |value, begin, end| Write { end, is_sure: true, ..Write::asked(value, begin) };
    let (mut old, mut new, mut foreign) = ([0; SECTOR], [0; SECTOR], [0; SECTOR]);
    fill(5, 1, &mut old);
    fill(5, 2, &mut new);
    fill(5, 3, &mut foreign);
    let mix = |one: &[u8; SECTOR], other: &[u8; SECTOR]| {
        let mut mixed = *one;
        mixed[200..].copy_from_slice(&other[200..]);
        mixed
    };
    let may = |writes: &[Write], sector: &[u8], begin: u64| {
        may_mix(writes, 5, sector, |write| write.end < begin, begin)
    };
    let beside = [done(1, 1, 2), done(2, 3, NEVER)];
    assert!(may(&beside, &mix(&old, &new), 4) && may(&beside, &mix(&new, &old), 4));
    assert!(!may(&beside, &mix(&old, &foreign), 4), "no client wrote that");
    // The write was answered before the read was asked for.
    let before = [done(1, 1, 2), done(2, 3, 4)];
    assert!(!may(&before, &mix(&old, &new), 5));
    // Another write is under way, but none of its parts is shown.
    let other = [done(1, 1, 4), done(2, 2, 5), done(3, 6, NEVER)];
    assert!(!may(&other, &mix(&old, &new), 7) && may(&other, &mix(&old, &foreign), 7));
    // Two writes at a time have left one of them, or parts by sectors, but no mixed sector.
    let together = [done(1, 1, 4), done(2, 2, 5)];
    assert!(!may(&together, &mix(&old, &new), 6));
}
