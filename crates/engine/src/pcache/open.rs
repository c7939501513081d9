//! Opening a cache: ensures that the device holds one that fits the table, reads it, and turns the
//! findings of the attach into a running target.

use zerocopy::IntoBytes;

use crate::base::attaching::AttachProgress;
use crate::common::contents::NOT_BY_FORCE;
use crate::common::per_port::PerPort;
use crate::common::throttle::Throttle;
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::pcache::slots::SlotState;
use crate::pmem::{Persistence, Pmem};
use crate::probe;
use crate::shm::{SharedStore, SharedWords};
use crate::sync::Arc;
use crate::units::{human_bytes, human_pair};

use super::args::TableArgs;
use super::attach::{
    self, Left, Reading, ReplayPace, Replayed, Sharing, Structures, check_size, keys_left,
    log_taken_up, survey, take_up,
};
use super::background::Background;
use super::backing::Backing;
use super::counters::Counters;
use super::format::{Content, content, format, is_blank};
use super::gc::{Collector, Gc};
use super::identity::Identity;
use super::index::{FLAT_FROM, Index};
use super::inspect;
use super::keylog::KeyLog;
use super::label::Label;
use super::layout::{CacheInfo, Geometry, Key, Position};
use super::media::{Media, cut_short};
use super::memory::{self, Memory};
use super::openset::{self, OpenSets};
use super::pace::usable_bytes;
use super::quarantine::Quarantine;
use super::signals::Signals;
use super::stripes::{STRIPES_MAX, Stripes};
use super::writeback::Writeback;
use super::zero::Zeroes;
use super::{BACKING_BYTES_MAX, Pcache};

/// Options for opening a cache that are not in the table line.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Format the device even if it may hold something else.
    pub force_format: bool,
    /// Size of segments; the kernel's except in tests.
    pub geometry: Geometry,
    /// Open key sets, 1 to 16.
    pub stripes: usize,
    /// A fresh random number: names this attach.
    pub attach_id: u64,
    /// Receives the progress of the attach.
    pub progress: Arc<AttachProgress>,
    /// How much of the log is replayed before the first request, and how fast the rest.
    pub replay: ReplayPace,
    /// A 4 MiB region of the index with at least this many entries keeps them in an array. Any
    /// value is correct.
    pub flat_from: usize,
    /// Threads that may share the reading of a long log.
    pub threads: usize,
}

impl OpenOptions {
    /// The kernel's geometry, eight stripes, and one thread.
    pub fn new(attach_id: u64) -> OpenOptions {
        OpenOptions {
            force_format: false,
            geometry: Geometry::KERNEL,
            stripes: 8,
            attach_id,
            progress: Arc::default(),
            replay: ReplayPace::default(),
            flat_from: FLAT_FROM,
            threads: 1,
        }
    }
}

impl Pcache {
    /// Opens the cache that `args` describes, formatting the device if it is empty.
    pub fn open(
        args: TableArgs,
        len_bytes: u64,
        cache: Arc<dyn Pmem>,
        backing: Arc<dyn Disk>,
        memory: impl Into<SharedStore>,
        options: &OpenOptions,
    ) -> Result<Pcache> {
        assert!((1..=STRIPES_MAX).contains(&options.stripes));
        let geometry = options.geometry;
        let media = Media { pmem: cache, geometry, shared: None };
        let shared_store = memory.into();
        let limits = backing.limits().clone();
        if limits.size_bytes > BACKING_BYTES_MAX {
            let (found, most) = human_pair(limits.size_bytes, BACKING_BYTES_MAX);
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "pcache: backing device {} has {found}; more than {most} is not supported",
                    limits.name
                ),
            ));
        }
        if len_bytes > limits.size_bytes {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "pcache: the table is {len_bytes} bytes long, but backing device {} has {}",
                    limits.name, limits.size_bytes
                ),
            ));
        }
        prepare_media(&media, &backing, &args, options, &shared_store)?;
        let opening = Opening { args, media, backing, shared_store, options };
        let note = match opening.attach(None)? {
            Attached::Open(pcache) => return pcache.with_room(),
            Attached::OtherMemory(note) => note,
            Attached::Stale(note) => {
                format(&opening.media, opening.args.has_data_crc)?;
                note
            }
        };
        match opening.attach(Some(note))? {
            Attached::Open(pcache) => pcache.with_room(),
            Attached::OtherMemory(_) => unreachable!("new memory has one owner"),
            Attached::Stale(_) => unreachable!("without a stamp, stale data is not noticed"),
        }
    }

    /// All stored data is known to exist, so holes may be filled now.
    fn with_room(self) -> Result<Pcache> {
        self.media.pmem.reserve()?;
        Ok(self)
    }
}

/// Ensures that the device holds a pcache: formats it if that can do no harm.
fn prepare_media(
    media: &Media,
    backing: &Arc<dyn Disk>,
    args: &TableArgs,
    options: &OpenOptions,
    shared_store: &SharedStore,
) -> Result<()> {
    let len = media.pmem.len_bytes();
    if len < media.geometry.device_bytes_min {
        let cut = cut_short(media);
        let (len, needed) = human_pair(len, media.geometry.device_bytes_min);
        return Err(Error::new(
            Kind::NoSpace,
            format!(
                "pcache: cache device {} has {len}, but needs at least {needed}{cut}",
                media.name()
            ),
        ));
    }
    check_size(media)?;
    // Before anything is written, by force or not.
    Label::refuse_newer(media)?;
    let unseen = match options.force_format {
        true => memory::unseen(media, shared_store, args)?,
        false => None,
    };
    match content(media)? {
        Content::CutFormat => {}
        Content::Other if options.force_format => {}
        Content::Other => refuse_contents(media, backing)?,
        Content::Pcache if options.force_format => refuse_dirty(media)?,
        // No attach since the format; whether all of that format is durable is unknown.
        Content::Pcache if is_untouched(media) => {}
        Content::Pcache => return Ok(()),
    }
    options.progress.note_format();
    format(media, args.has_data_crc)?;
    unseen.iter().for_each(SharedWords::remove);
    Ok(())
}

/// Whether no attach has followed the format: a kernel that attaches stores a newer cache_info.
fn is_untouched(media: &Media) -> bool {
    let is_of_format = Label::load(media).is_some_and(|(label, _)| label.is_of_format());
    is_of_format
        && attach::load_info(media).is_ok_and(|info| info.slot.seq == 1)
        && inspect::inspect(media.pmem.clone(), media.geometry).is_ok_and(|report| report.keys == 0)
}

/// Refuses to format over the content of a device that is not a pcache, unless asked to.
fn refuse_contents(media: &Media, backing: &Arc<dyn Disk>) -> Result<()> {
    let found = probe::pmem(&*media.pmem, 0);
    let origin = probe::disk(backing, 0);
    let order = "pcache CACHE-DEVICE BACKING-DEVICE";
    let names = (&*backing.limits().name, order);
    let objection = probe::objection(&found, is_blank(media)?, &origin, names);
    let behind = || probe::data_on_pmem(&*media.pmem, 0).map(probe::data_found);
    match objection.or_else(behind) {
        None => Ok(()),
        Some(why) => {
            let what = format!("pcache: {} is not a pcache: {why}", media.name());
            Err(Error::new(Kind::Refused, what))
        }
    }
}

/// Even by force, dirty data that only this cache has is not discarded.
fn refuse_dirty(media: &Media) -> Result<()> {
    let report = inspect::inspect(media.pmem.clone(), media.geometry).map_err(|error| {
        let what = "it is damaged, and may hold dirty data";
        Error::new(error.kind(), format!("pcache: {error}; {what}; {NOT_BY_FORCE}"))
    })?;
    if report.dirty_bytes == 0 {
        return Ok(());
    }
    let what = format!(
        "pcache: {} holds {} of dirty data, which only the cache has; {NOT_BY_FORCE}",
        media.name(),
        human_bytes(report.dirty_bytes)
    );
    Err(Error::new(Kind::Refused, what))
}

/// A cache that is being opened.
struct Opening<'a> {
    args: TableArgs,
    media: Media,
    backing: Arc<dyn Disk>,
    shared_store: SharedStore,
    options: &'a OpenOptions,
}

/// The result of an opening.
enum Attached {
    Open(Box<Pcache>),
    /// The memory belongs to another medium, and the user accepts the loss, which a note describes.
    OtherMemory(String),
    /// All cached data is clean, and older than the backing device; a note gives the reason.
    Stale(String),
}

impl Opening<'_> {
    /// Reads the cache, and attaches. `forgotten`: ignore the existing memory, with the reason.
    fn attach(&self, forgotten: Option<String>) -> Result<Attached> {
        let Opening { args, options, .. } = self;
        let limits = self.backing.limits();
        let shared_store = self.shared_store.clone();
        let memory = Memory::of(&self.media, shared_store, args, options, forgotten.is_some())?;
        let media = Media { shared: Some(memory.words()), ..self.media.clone() };
        let found = attach::load_structures(&media)?;
        // A refused medium is not touched.
        let backing = Backing::of(&self.backing, &found);
        backing.check_binding(&media, &found, args)?;
        let is_in_doubt = memory.is_in_doubt && !mutants::is(Mutant::LostOpenSetsTrusted);
        let is_file = media.pmem.medium().persistence == Persistence::Msync;
        let has_failed = openset::has_failed(&memory.words());
        let reading = Reading {
            backing_bytes: limits.size_bytes,
            log_damage: args.log_damage,
            at_once_max: options.replay.at_once_max,
            drops_clean: backing.drops_clean,
            sharing: Sharing::among(options.threads),
            new_index: &|| Index::with_flats(limits.size_bytes, options.flat_from),
            progress: &options.progress,
        };
        let mut replayed = survey(&media, &found, &reading)?;
        if let Some(note) = backing.judge(args, &found, &mut replayed)? {
            return Ok(Attached::Stale(note));
        }
        // Not before the survey: it may refuse, and what is stored again looks whole.
        replayed.notes.extend(store_again(&media, has_failed, is_in_doubt && is_file)?);
        if replayed.counts.keys <= options.replay.at_once_max {
            replayed.finish(&media, &found.segments)?;
        }
        replayed.notes.extend(memory.notes.iter().cloned().chain(forgotten));
        self.assemble(media, memory, found, replayed, backing.drops_clean)
    }

    /// Turns the findings into a running cache: takes up the keys that a dead server left in
    /// memory, and names this attach on the label. memory.rs gives the reasons for this order.
    fn assemble(
        &self,
        media: Media,
        mut memory: Memory,
        found: Structures,
        mut replayed: Replayed,
        is_stale: bool,
    ) -> Result<Attached> {
        let (args, options) = (self.args.clone(), self.options);
        let backing = Arc::clone(&self.backing);
        let info = found.info.record;
        // First of all: this may refuse, and a refused medium is not touched.
        let left = memory.left()?;
        let left = match keys_left(&media, &found, &mut replayed, left, &args)? {
            Left::Keys(keys) => keys,
            Left::OfAnother(note) => return Ok(Attached::OtherMemory(note)),
        };
        let marks_from = first_mark(&found, &replayed, &info);
        memory.name(options.stripes, &info, replayed.head)?;
        let (label, slot) = name_attach(
            &media,
            &backing,
            &memory,
            options,
            &found,
            &replayed,
            (marks_from, is_stale),
        )?;
        let (log, open) = self.take_over(&media, &memory, &found, &mut replayed, &left)?;
        let segments = Arc::clone(&found.segments);
        // A kernel would mis-count keys of reused segments: collection passes them first.
        let stale_until = (replayed.counts.stale_keys > 0).then_some(replayed.dirty_tail);
        let gc = Gc::new(stale_until, replayed.hidden_until);
        let writeback = Writeback::new(&log, marks_from, replayed.torn_until);
        let policy = args.retention.policy(segments.blocks());
        let collector = Collector::new(gc, policy, &segments);
        let usable = usable_bytes(&segments, &collector);
        let throttle = Throttle::new(usable, usable / 100 * u64::from(args.high_watermark));
        Ok(Attached::Open(Box::new(Pcache {
            crcs: replayed.crcs,
            stripes: Stripes::new(open, replayed.counts.dirty_bytes),
            zeroes: Zeroes::default(),
            misses: PerPort::default(),
            background: Background::new(
                writeback,
                throttle,
                replayed.rest,
                options.replay.slice,
                replayed.notes,
            ),
            collector,
            bad: Quarantine::new(&label.bad, backing.limits().size_bytes),
            backing,
            identity: Identity::new(&media, &found, (label, slot)),
            signals: Signals::new(segments.count(), args.high_watermark),
            counters: Counters::default(),
            index: replayed.index,
            segments,
            args,
            media,
            log,
        })))
    }

    /// The log takes up the keys that were left in memory, which then belongs to this attach alone.
    fn take_over(
        &self,
        media: &Media,
        memory: &Memory,
        found: &Structures,
        replayed: &mut Replayed,
        left: &[Key],
    ) -> Result<(KeyLog, OpenSets)> {
        let (options, info) = (self.options, found.info.record);
        let log = log_found(media, found, replayed)?;
        let keys = take_up(media, found, replayed, self.backing.limits().size_bytes, left)?;
        if mutants::is(Mutant::SharedClearedFirst) {
            let at = log.head();
            let _ = OpenSets::begin(memory.words(), options.stripes, options.attach_id, &info, at);
        }
        log_taken_up(&log, media, &keys, replayed.is_unmarked)?;
        // From here on the memory belongs to this attach alone: its keys are in the log.
        let open =
            OpenSets::begin(memory.words(), options.stripes, options.attach_id, &info, log.head());
        memory.words().keep_last_name();
        Ok((log, open))
    }
}

/// Stores all data again if a sync of the medium has failed, or if that is not known. Returns a
/// note for the user.
fn store_again(media: &Media, has_failed: bool, is_in_doubt: bool) -> Result<Option<String>> {
    const LOST: &str = "the shared memory of the last server, which would tell whether a flush of \
                        the cache device has failed, was not found";
    if has_failed {
        media.rewrite("a flush of it has failed since the machine was started")?;
        let note = "a flush of the cache device had failed: udm stored all its data again";
        return Ok(Some(note.to_owned()));
    }
    if !is_in_doubt {
        return Ok(None);
    }
    if let Some(at) = media.first_unreadable() {
        return Ok(Some(format!(
            "{LOST}, and udm did not store its data again, because the MiB at byte {at} cannot be \
             read: if a flush has failed, a power failure may lose data"
        )));
    }
    media.rewrite(LOST)?;
    Ok(Some(format!("{LOST}: udm stored all its data again")))
}

/// The log in the state that was found, with the tails that the attach chose.
fn log_found(media: &Media, found: &Structures, replayed: &mut Replayed) -> Result<KeyLog> {
    let segments = Arc::clone(&found.segments);
    let (head, key_tail, dirty_tail) = (replayed.head, found.key_tail, found.dirty_tail);
    let log = KeyLog::new(media.clone(), segments, head, key_tail, dirty_tail);
    log.note_logged(replayed.key_counts());
    let failed = |status| media.damaged(format_args!("cannot store: {status}"));
    if mutants::is(Mutant::DirtyTailAtHead) {
        replayed.dirty_tail = replayed.head;
    }
    log.set_dirty_tail(replayed.dirty_tail).map_err(failed)?;
    log.set_key_tail(replayed.key_tail).map_err(failed)?;
    Ok(log)
}

/// Stores the label of this attach.
fn name_attach(
    media: &Media,
    backing: &Arc<dyn Disk>,
    memory: &Memory,
    options: &OpenOptions,
    found: &Structures,
    replayed: &Replayed,
    (marks_from, is_stale): (Option<Position>, bool),
) -> Result<(Label, SlotState)> {
    let limits = backing.limits();
    let mut label = Label {
        attach_id: options.attach_id,
        backing_bytes: limits.size_bytes,
        identity: limits.identity.words().to_owned(),
        marks_from: marks_from.unwrap_or(replayed.dirty_tail),
        info: [0; 24],
        bad: found.label.as_ref().map_or_else(Vec::new, |(label, _)| label.bad.clone()),
        torn_until: replayed.torn_until,
        served: memory.serving(),
        stamp: None,
        is_stale,
    };
    label.info.copy_from_slice(found.info.record.as_bytes());
    // A format may have left a label in the other slot. That label is ignored.
    let mut slot = Label::load(media).map_or(SlotState::unwritten(0), |(_, slot)| slot);
    if mutants::is(Mutant::LabelUnwritten) {
        return Ok((label, slot));
    }
    label
        .store_twice(media, &mut slot)
        .map_err(|status| media.damaged(format_args!("cannot store the label: {status}")))?;
    Ok((label, slot))
}

/// The position from which the log surely has flush marks; `None`: from dirty_tail on.
fn first_mark(found: &Structures, replayed: &Replayed, info: &CacheInfo) -> Option<Position> {
    let was_ours = found.label.as_ref().is_some_and(|(label, _)| {
        label.info == *info.as_bytes() || mutants::is(Mutant::MarksOnKernelLog)
    });
    match &found.label {
        // Only this server's version has written since, and the start of its marks is before
        // dirty_tail.
        Some(_) if was_ours && !replayed.has_met_marks => None,
        Some((label, _)) if was_ours => Some(label.marks_from),
        _ => Some(replayed.head),
    }
}
