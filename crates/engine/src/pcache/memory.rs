//! The shared memory of an attach, which outlives its server: found again, or made.
//!
//! The label says "served" from before the first acknowledged write until all keys are in the log,
//! and names the memory. This is the order in which an attach changes label and memory, and the
//! reason why a death or a power failure between any two steps loses no write:
//!
//! 1. *New memory* (no server had the cache): the memory is made, empty, for this attach; then the
//!    label says "served", durably, in both slots; then the cache is changed, and serves. A death
//!    before the label is stored leaves a file that no label names, until the machine is restarted.
//! 2. *Memory that a dead server left*: this attach is announced in it, and it gets a second name;
//!    then the label names this attach; then the keys are logged; then they are removed from
//!    memory. Until the label is stored the old name leads to the memory, afterwards the new one,
//!    and either attach is its owner. Keys that are logged twice are two keys with the same place.
//! 3. *An orderly end*: `suspend` logs all keys; then the label says "at rest", in both slots; then
//!    the memory is removed. Between the two it is a file that no label names. If a step fails, the
//!    label is not changed.
//! 4. A power failure ends the boot of the machine. If the label says "served" in an earlier boot,
//!    that is reported, and its memory is not looked for.
//!
//! Before step 2 the memory is compared with the medium (takeup.rs): a copy of a medium has the
//! same label.

use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::shm::{Served, SharedStore, SharedWords, Taken, recall};
use crate::units::human_bytes;

use super::OpenOptions;
use super::args::TableArgs;
use super::label::{Label, Serving};
use super::layout::{CacheInfo, KEY_CLEAN, Position};
use super::media::Media;
use super::openset::{self, LeftBehind, OpenSets, announce_attach, found_end, words_needed};

/// The memory of an attach that is under way.
#[derive(Debug)]
pub struct Memory {
    taken: Taken,
    /// The last server died in this boot, and its memory, which would tell of a failed sync, is not
    /// found.
    pub is_in_doubt: bool,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The server that has the cache, or had it and died, according to the label.
pub fn served(label: &Label, shared_store: &SharedStore) -> Option<Served> {
    label.served.as_ref().filter(|served| served.has_memory()).map(|served| Served {
        id: label.attach_id,
        is_of_this_boot: served.boot == shared_store.boot(),
        place: shared_store.path_in(&served.place, label.attach_id),
    })
}

/// The memory that belongs to the medium, if the label names one. If it is missing, this refuses,
/// unless the loss is accepted.
pub fn its_memory(
    media: &Media,
    shared_store: &SharedStore,
    accepts_loss: bool,
    notes: &mut Vec<String>,
) -> Result<Option<SharedWords>> {
    let label = Label::load(media).map(|(label, _)| label).filter(|label| !label.is_of_format());
    if label.is_none() && Label::is_lost(media) && !accepts_loss {
        return Err(Error::new(
            Kind::Io,
            format!(
                "{}: both copies of the label are damaged (bytes 0 and {}), so its backing device \
                 is unknown, and acknowledged writes may be in shared memory; to continue without \
                 them, add `lost_memory accept` to the table",
                media.name(),
                Label::STRIDE
            ),
        ));
    }
    let Some(label) = label else { return Ok(None) };
    let id = label.attach_id;
    let is_its = |words: &SharedWords, bug| Ok(openset::is_of(words, id)? || mutants::is(bug));
    if label.served.is_none() {
        // A server before this version named it by the medium's path, and the label says nothing.
        let old = shared_store.find_old()?;
        return match old
            .as_ref()
            .map(|words| is_its(words, Mutant::OldSharedOfAnybody))
            .transpose()?
        {
            Some(true) => Ok(old),
            _ => Ok(None),
        };
    }
    let is_its = |words: &SharedWords| is_its(words, Mutant::SharedOfAnybody);
    recall(
        shared_store,
        served(&label, shared_store).as_ref(),
        accepts_loss,
        media.name(),
        is_its,
        notes,
    )
}

/// Memory of the medium that is to be formatted by force: refused if it holds writes.
pub fn unseen(
    media: &Media,
    shared_store: &SharedStore,
    args: &TableArgs,
) -> Result<Option<SharedWords>> {
    let found = its_memory(media, shared_store, args.accepts_loss, &mut Vec::new())?;
    let left = found.as_ref().map(OpenSets::left_behind).transpose()?.flatten();
    let keys = left.iter().flat_map(|left| &left.keys).map(|(key, _)| key);
    let dirty = keys.filter(|key| key.flags.get() & KEY_CLEAN == 0);
    let bytes: u64 = dirty.map(|key| u64::from(key.len.get())).sum();
    if bytes > 0 && !args.accepts_loss {
        return Err(Error::new(
            Kind::Refused,
            format!(
                "pcache: {}: its last server died, and {} of acknowledged writes are only in \
                 shared memory in {}: open the cache without formatting it, or add `lost_memory \
                 accept` to the table",
                media.name(),
                human_bytes(bytes),
                shared_store.place()
            ),
        ));
    }
    Ok(found)
}

impl Memory {
    /// The memory of the last server, if it died, or new memory. `is_to_go`: the memory of that
    /// server turned out to belong to another medium.
    pub fn of(
        media: &Media,
        shared_store: SharedStore,
        args: &TableArgs,
        options: &OpenOptions,
        is_to_go: bool,
    ) -> Result<Memory> {
        let mut notes = Vec::new();
        let found = match is_to_go {
            true => None,
            false => its_memory(media, &shared_store, args.accepts_loss, &mut notes)?,
        };
        let needed = words_needed(options.stripes);
        let label = Label::load(media).map(|(label, _)| label);
        let is_in_doubt = found.is_none()
            && match &label {
                Some(label) => {
                    label.served.as_ref().is_some_and(|served| served.boot == shared_store.boot())
                }
                None => Label::is_lost(media),
            };
        let owner = label.map_or(0, |label| label.attach_id);
        let attaches = (options.attach_id, owner);
        let taken = Taken::of(shared_store, found, (needed, needed), attaches, media.name())?;
        Ok(Memory { taken, is_in_doubt, notes })
    }

    /// The memory itself.
    pub fn words(&self) -> SharedWords {
        self.taken.words().clone()
    }

    /// The keys that a dead server left in it.
    pub fn left(&self) -> Result<Option<LeftBehind>> {
        if self.taken.is_new() { Ok(None) } else { OpenSets::left_behind(self.taken.words()) }
    }

    /// The label is about to name it. From here on the memory is kept, whatever happens.
    pub fn name(&mut self, stripes: usize, info: &CacheInfo, head: Position) -> Result<()> {
        if self.taken.is_new() {
            let _ = OpenSets::begin(self.words(), stripes, self.taken.attach_id(), info, head);
        }
        self.taken.name(|words, owner, attach_id| {
            found_end(words, head);
            announce_attach(words, owner, attach_id);
        })
    }

    /// The part of the label about the server.
    pub fn serving(&self) -> Option<Serving> {
        let is_late = mutants::is(Mutant::ServedSaidLate);
        let shared_store = self.taken.shared_store();
        let serving = || Serving { boot: shared_store.boot(), place: shared_store.place() };
        (!is_late).then(serving)
    }
}
