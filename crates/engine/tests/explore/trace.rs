//! The events in their partial order: of the cache medium, the origin and the clients.

use std::sync::Arc;

use crate::sectors::DiskEvent;
use crate::sim::{LINE, PendingLine};

/// A client's request, in slots (the sectors that the explorer uses).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// New versions for slots `first .. first + count`; all zero if `is_zero`.
    Write {
        first: usize,
        count: usize,
        fua: bool,
        is_zero: bool,
    },
    Flush,
    Percent(u32),
}

impl Ask {
    /// The slots that it writes to: first and count.
    pub fn slots(&self) -> Option<(usize, usize)> {
        match *self {
            Ask::Write { first, count, .. } => Some((first, count)),
            Ask::Flush | Ask::Percent(_) => None,
        }
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    Store {
        at: u32,
        bytes: Box<[u8]>,
    },
    Fence,
    /// The cache is a disk, and something happened to it.
    Disk(DiskEvent),
    /// Words of shared memory that changed.
    Shared(Vec<(u32, u64)>),
    Submit(u32, Ask),
    Ack(u32),
    /// A request failed: it may have had an effect or not.
    Failed(u32),
    /// The cache's disk has failed: unflushed data may be lost.
    CacheFailed,
    /// A write of data to the cache's disk has failed.
    CacheRefused,
    /// The attach succeeded: from here on the medium is bound to its origin.
    Attached,
    /// From here on the server reports whether the origin alone is consistent.
    Claim(bool),
    /// A format by force begins: the binding may go.
    Unbound,
    /// A write to the origin started: slot and content.
    OriginWrite(u32, Vec<(usize, u64)>),
    OriginDone(u32, bool),
    OriginFlush(u32),
    /// It was on its way when the process died, and has not happened.
    OriginGone(u32),
    /// The next server shows this of each slot.
    Left(Vec<u64>),
    /// A kernel had the devices: this is on the medium now, and it wrote these slots with these
    /// contents, each followed by a flush.
    Elsewhere(Vec<u8>, Vec<(usize, u64)>),
}

#[derive(Debug, Default)]
pub struct Trace {
    pub events: Vec<Event>,
}

impl Trace {
    pub fn push(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// Stores that are not fenced yet.
#[derive(Debug, Default)]
pub struct Stores {
    stores: Vec<(u32, Box<[u8]>)>,
}

/// With so few changed words, a line may leave in pieces: any subset, not only prefixes.
const SUBSET_WORDS_MAX: usize = 3;

impl Stores {
    pub fn push(&mut self, at: u32, bytes: Box<[u8]>) {
        self.stores.push((at, bytes));
    }

    pub fn stores(&self) -> impl Iterator<Item = (u32, &[u8])> {
        self.stores.iter().map(|(at, bytes)| (*at, &**bytes))
    }

    /// The lines that were stored to.
    pub fn line_numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = Vec::new();
        for (at, bytes) in self.stores() {
            numbers.extend(at / LINE as u32..=(at + bytes.len() as u32 - 1) / LINE as u32);
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    pub fn take(&mut self) -> Vec<(u32, Box<[u8]>)> {
        std::mem::take(&mut self.stores)
    }

    pub fn touches(&self, mut wanted: impl FnMut(u32) -> bool) -> bool {
        self.stores.iter().any(|(at, _)| wanted(*at))
    }

    /// Every line in flight with more than one possible content, over the durable `image`.
    pub fn lines(&self, read: impl Fn(u32) -> [u8; LINE]) -> Arc<[PendingLine]> {
        let mut words: Vec<(u32, u32, u32, &[u8])> = Vec::new();
        for (order, (at, bytes)) in self.stores.iter().enumerate() {
            let mut at = *at;
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let len = rest.len().min(8 - at as usize % 8);
                words.push((at / LINE as u32, order as u32, at, &rest[..len]));
                at += len as u32;
                rest = &rest[len..];
            }
        }
        words.sort_by_key(|&(line, order, at, _)| (line, order, at));
        let mut lines = Vec::new();
        for words in words.chunk_by(|a, b| a.0 == b.0) {
            let number = words[0].0;
            let durable = read(number);
            let options = contents(durable, words);
            if options.len() > 1 {
                let options = options.into_iter().map(|content| content.into()).collect();
                lines.push(PendingLine { number, options });
            }
        }
        lines.into()
    }
}

fn contents(durable: [u8; LINE], words: &[(u32, u32, u32, &[u8])]) -> Vec<[u8; LINE]> {
    let apply = |content: &mut [u8; LINE], at: u32, bytes: &[u8]| {
        let from = at as usize % LINE;
        let place = &mut content[from..from + bytes.len()];
        let has_changed = place != bytes;
        place.copy_from_slice(bytes);
        has_changed
    };
    let mut options = vec![durable];
    let mut now = durable;
    let mut changing = Vec::new();
    for &(_, _, at, bytes) in words {
        if apply(&mut now, at, bytes) {
            changing.push((at, bytes));
            options.push(now);
        }
    }
    let is_each_once = changing
        .iter()
        .enumerate()
        .all(|(n, (at, _))| changing[..n].iter().all(|(other, _)| other / 8 != at / 8));
    if changing.len() > 1 && changing.len() <= SUBSET_WORDS_MAX && is_each_once {
        for subset in 1..(1_u32 << changing.len()) - 1 {
            let mut content = durable;
            for (nth, (at, bytes)) in changing.iter().enumerate() {
                if subset >> nth & 1 == 1 {
                    apply(&mut content, *at, bytes);
                }
            }
            if !options.contains(&content) {
                options.insert(options.len() - 1, content);
            }
        }
    }
    // Later words may undo earlier ones: keep each content once, the newest last.
    let newest = now;
    let mut distinct: Vec<[u8; LINE]> = Vec::with_capacity(options.len());
    for content in options {
        if !distinct.contains(&content) {
            distinct.push(content);
        }
    }
    if let Some(place) = distinct.iter().position(|content| *content == newest)
        && place != 0
    {
        distinct.remove(place);
        distinct.push(newest);
    } else if distinct.len() > 1 {
        // The newest equals the durable one: it is listed at both ends.
        distinct.push(newest);
    }
    distinct
}
