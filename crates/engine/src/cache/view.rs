//! A read-only view of a cache: none of its three devices is written to.
//!
//! Dirty blocks are read from the cache device, and all other data from the origin, so that bad
//! sectors of the cache device affect dirty blocks only. Conditions that matter only for writing do
//! not prevent a view: a metadata device that is marked for a check, or blocks beyond the end of a
//! cache device that was cut short (reads of those fail).

use crate::bio::{Bio, Op};
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result, Status};
use crate::recovery::gather::{Gather, Run};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::target::{Fact, Health, Port, Target, TargetLimits, flag, number, origin_facts, text};
use crate::units::{SECTOR, human_pair};

use super::args::TableArgs;
use super::binding::Devices;
use super::metadata::{Superblock, load};
use super::{binding, open, origin};

/// The target.
#[derive(Debug)]
pub struct View {
    /// The table's words after the target's name.
    words: String,
    devices: Devices,
    block_bytes: u64,
    /// Dirty blocks of the origin, in its order, and their slots.
    dirty: Vec<(u64, u64)>,
    /// Slots that the cache device has.
    slots: u64,
    notes: Vec<String>,
    gather: Gather,
    lost_reads: AtomicU64,
}

impl View {
    /// Reads the metadata of the cache that `args` describe, of which clients see `len_bytes`.
    pub fn open(args: &TableArgs, words: String, len_bytes: u64, devices: Devices) -> Result<View> {
        let limits = devices.origin.limits();
        if len_bytes > limits.size_bytes {
            let (len, size) = human_pair(len_bytes, limits.size_bytes);
            let what = format!("the table is {len} long, but origin {} has {size}", limits.name);
            return Err(Error::new(Kind::Invalid, format!("cache: {what}")));
        }
        devices.cache.expect_data(0);
        let loaded = load(&devices.metadata).map_err(|error| error.at(open::NO_METADATA))?;
        open::check_block_size(args, &devices.metadata, &loaded.superblock)?;
        if !args.rebinds && loaded.contents.mapped() > 0 {
            let remedy = "add `rebind true` to the table";
            let bound = binding::check(&devices, &loaded.superblock, remedy);
            bound.map_err(|error| error.at("cache"))?;
        }
        let notes = notes_of(&loaded.superblock);
        let contents = loaded.contents.opened(&loaded.superblock);
        if !args.rebinds {
            let remedy = "add `rebind true` to the table";
            let same = origin::same(&devices, &loaded.superblock);
            origin::check(same, &devices, &loaded.superblock, &contents, remedy)?;
        }
        let block_bytes = u64::from(args.block_sectors) * SECTOR;
        let slot_of = |slot| Some((contents.block(slot)?, slot));
        let mut dirty: Vec<(u64, u64)> = contents.dirty.iter().filter_map(slot_of).collect();
        dirty.sort_unstable();
        let slots = devices.cache.limits().size_bytes / block_bytes;
        Ok(View {
            words,
            devices,
            block_bytes,
            dirty,
            slots,
            notes,
            gather: Gather::default(),
            lost_reads: AtomicU64::new(0),
        })
    }

    /// The slot of a block that only the cache has.
    fn slot_of(&self, block: u64) -> Option<u64> {
        let nth = self.dirty.binary_search_by_key(&block, |(block, _)| *block).ok()?;
        Some(self.dirty[nth].1)
    }

    fn read(&self, bio: Bio, port: &mut Port) {
        let mut runs: Vec<Run> = Vec::new();
        let mut at = bio.offset;
        while at < bio.end() {
            let (block, within) = (at / self.block_bytes, at % self.block_bytes);
            let len = bio.end().min(at - within + self.block_bytes) - at;
            let (disk, from_there) = match self.slot_of(block) {
                None => (&self.devices.origin, at),
                Some(slot) if slot < self.slots => {
                    (&self.devices.cache, slot * self.block_bytes + within)
                }
                Some(_) => {
                    self.lost_reads.fetch_add(1, Ordering::Relaxed);
                    return port.finish(bio, Err(Status::Io));
                }
            };
            match runs.last_mut() {
                Some(last) if Arc::ptr_eq(&last.disk, disk) && last.at + last.len == from_there => {
                    last.len += len;
                }
                _ => {
                    let (disk, from) = (disk.clone(), at - bio.offset);
                    runs.push(Run { disk, at: from_there, from, len });
                }
            }
            at += len;
        }
        self.gather.read(bio, runs, port);
    }

    /// Bytes that only the cache has: those that it can read, and those that it lost.
    fn dirty_bytes(&self) -> (u64, u64) {
        let all = self.dirty.len() as u64;
        let lost = self.dirty.iter().filter(|(_, slot)| *slot >= self.slots).count() as u64;
        ((all - lost) * self.block_bytes, lost * self.block_bytes)
    }
}

/// Notes for the user about metadata that is only read.
fn notes_of(superblock: &Superblock) -> Vec<String> {
    let mut notes = Vec::new();
    if superblock.needs_check() {
        notes.push("the metadata has the needs-check flag".into());
    }
    if !superblock.is_clean() {
        notes.push("it was not shut down cleanly, so every block in it counts as dirty".into());
    }
    notes
}

impl Target for View {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        match bio.op {
            Op::Read => self.read(bio, port),
            // This target holds no volatile data.
            Op::Flush => port.finish(bio, Ok(())),
            Op::Write | Op::Discard | Op::WriteZeroes => port.finish(bio, Err(Status::ReadOnly)),
        }
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        self.gather.complete(io, port);
    }

    fn health(&self) -> Health {
        Health {
            origin: self.devices.origin.errors(),
            medium: self.devices.cache.errors(),
            ..Health::default()
        }
    }

    fn limits(&self) -> TargetLimits {
        let limits = super::limits_of(&*self.devices.cache, &*self.devices.origin);
        TargetLimits { has_discard: false, ..limits }
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn status(&self) -> String {
        let (dirty, lost) = self.dirty_bytes();
        format!("read-only {dirty} {lost}")
    }

    fn table(&self) -> String {
        self.words.clone()
    }

    fn facts(&self) -> Vec<Fact> {
        let (dirty, lost) = self.dirty_bytes();
        let name = |disk: &Arc<dyn Disk>| disk.limits().name.clone();
        let lost_reads = self.lost_reads.load(Ordering::Relaxed);
        let mut facts = vec![
            text("metadata_device", &name(&self.devices.metadata), "where the mappings are"),
            text("cache_device", &name(&self.devices.cache), "where cached data is"),
            flag("cache_is_read_only", true, "udm writes to none of the devices"),
            number("readable_dirty_bytes", dirty, "data that only the cache has"),
            number("lost_bytes", lost, "data that only the cache had; reads fail"),
            number("lost_reads_total", lost_reads, "reads that failed because data is lost"),
        ];
        facts.extend(origin_facts(&*self.devices.origin, "origin"));
        let notes = self.notes.iter();
        facts.extend(notes.map(|note| {
            text("attach_note", note, "damage or losses that udm found when it opened the cache")
        }));
        facts
    }
}
