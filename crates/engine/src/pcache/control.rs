//! Opening and steering a cache: from what the attach found to a running target; status, table,
//! messages.

use super::attach::{Structures, check_size, has_data_crc};
use super::batch::Sharing;
use super::format::{Content, content, format, is_blank};
use super::layout::{
    CACHE_INFO_AT, GC_PERCENT_MAX, INFO_GC_SHIFT, PAGE_STRIDE, Position, gc_percent_of,
};
use super::survey::Replayed;
use super::survey::{Reading, survey};
use super::takeup::{Left, keys_left, log_taken_up, take_up};
use super::*;
use crate::disk::DiskLimits;
use crate::mutants::{self, Mutant};
use crate::probe;
use crate::shm::SharedWords;
use crate::table::Word;
use zerocopy::IntoBytes;

/// Makes sure that the device holds a pcache: formats it where that can do no harm.
pub(super) fn prepare_media(
    media: &Media,
    backing: &Arc<dyn Disk>,
    args: &TableArgs,
    options: &OpenOptions,
    keeper: &Keeper,
) -> Result<()> {
    let len = media.pmem.len_bytes();
    if len < media.geometry.device_bytes_min {
        let cut = attach::cut_short(media);
        let (len, needed) = human_pair(len, media.geometry.device_bytes_min);
        return Err(Error::new(
            Kind::NoSpace,
            format!(
                "pcache: cache device {} has {len}, but at least {needed} is needed{cut}",
                media.name()
            ),
        ));
    }
    check_size(media)?;
    // Before anything is written, by force or not.
    Label::refuse_newer(media)?;
    let unseen = match options.force_format {
        true => memory::unseen(media, keeper, args)?,
        false => None,
    };
    match content(media)? {
        Content::CutFormat => format(media, args.has_data_crc),
        Content::Other if options.force_format => format(media, args.has_data_crc),
        Content::Other => {
            refuse_contents(media, backing)?;
            format(media, args.has_data_crc)
        }
        Content::Pcache if options.force_format => format_again(media, args),
        // Nobody has attached since; whether all of that format is durable, nobody knows.
        Content::Pcache if is_untouched(media) => format(media, args.has_data_crc),
        Content::Pcache => Ok(()),
    }?;
    unseen.iter().for_each(SharedWords::remove);
    Ok(())
}

/// Whether a format was the last that happened to the cache: a kernel that attaches stores a newer
/// cache_info.
fn is_untouched(media: &Media) -> bool {
    let is_of_format = Label::load(media).is_some_and(|(label, _)| label.is_of_format());
    is_of_format
        && attach::load_info(media).is_ok_and(|info| info.slot.seq == 1)
        && inspect::inspect(media.pmem.clone(), media.geometry).is_ok_and(|report| report.keys == 0)
}

/// Whatever is on a device that is no pcache is not formatted over without being asked.
fn refuse_contents(media: &Media, backing: &Arc<dyn Disk>) -> Result<()> {
    let found = probe::pmem(&*media.pmem, 0);
    let origin = probe::disk(backing, 0);
    let order = "pcache CACHE-DEVICE BACKING-DEVICE";
    let names = (&*backing.limits().name, order);
    match probe::objection(&found, is_blank(media)?, &origin, names) {
        None => Ok(()),
        Some(why) => {
            let what = format!("pcache: {} is not a pcache: {why}", media.name());
            Err(Error::new(Kind::Refused, what))
        }
    }
}

/// Formats a cache anew, unless dirty data is in it.
fn format_again(media: &Media, args: &TableArgs) -> Result<()> {
    if attach::load_info(media).is_err() {
        // Nothing can be found without it: whoever says so may start over.
        return format(media, args.has_data_crc);
    }
    let report = inspect::inspect(media.pmem.clone(), media.geometry).map_err(|error| {
        let what = "damaged, and may hold dirty data: erase its first 64 KiB if it may be lost";
        Error::new(error.kind(), format!("pcache: {error}; {what}"))
    })?;
    if report.dirty_bytes > 0 {
        return Err(Error::new(
            Kind::Refused,
            format!(
                "pcache: {} holds {} of dirty data that no other device has: write it back with \
                 `udm recover`, or erase its first 64 KiB if it may be lost",
                media.name(),
                human_bytes(report.dirty_bytes)
            ),
        ));
    }
    format(media, args.has_data_crc)
}

/// Checks that table, cache and backing device belong together.
pub(super) fn check_binding(
    media: &Media,
    found: &Structures,
    args: &TableArgs,
    limits: &DiskLimits,
) -> Result<()> {
    let stored = has_data_crc(&found.info.record);
    if args.has_data_crc != stored {
        return Err(Error::new(
            Kind::Invalid,
            format!(
                "pcache: {}: invalid option for data_crc: the cache was formatted with data_crc \
                 {stored}, the table says {}",
                media.name(),
                args.has_data_crc
            ),
        ));
    }
    let Some((label, _)) = &found.label else { return Ok(()) };
    if !args.rebinds && !label.is_bound_to(&limits.identity, limits.size_bytes) {
        let (known, found) = human_pair(label.backing_bytes, limits.size_bytes);
        return Err(Error::new(
            Kind::Refused,
            format!(
                "pcache: {} caches another backing device ({}, {known}), not {} ({}, {found}); if \
                 it is the same data in a new place, add `rebind true` to the table",
                media.name(),
                label.identity,
                limits.name,
                limits.identity
            ),
        ));
    }
    Ok(())
}

/// A cache that is being opened.
pub(super) struct Opening<'a> {
    pub(super) args: TableArgs,
    pub(super) media: Media,
    pub(super) backing: Arc<dyn Disk>,
    pub(super) keeper: Keeper,
    pub(super) options: &'a OpenOptions,
}

/// How an opening ends.
pub(super) enum Attached {
    Open(Box<Pcache>),
    /// The memory that was found is not this medium's, and the user accepts what is lost; a note
    /// says what that is.
    OtherMemory(String),
}

impl Opening<'_> {
    /// Reads the cache, and attaches. `forgotten`: without the memory that is there, and why.
    pub(super) fn attach(&self, forgotten: Option<String>) -> Result<Attached> {
        let Opening { args, options, .. } = self;
        let limits = self.backing.limits();
        let keeper = self.keeper.clone();
        let memory = Memory::of(&self.media, keeper, args, options, forgotten.is_some())?;
        let media = Media { shared: Some(memory.words()), ..self.media.clone() };
        let mut found = attach::load_structures(&media)?;
        // A refused medium is not touched.
        check_binding(&media, &found, args, limits)?;
        let is_rewritten = openset::has_failed(&memory.words());
        if is_rewritten {
            media.rewrite()?;
            found = attach::load_structures(&media)?;
        }
        let reading = Reading {
            backing_bytes: limits.size_bytes,
            log_damage: args.log_damage,
            at_once_max: options.replay.at_once_max,
            sharing: Sharing::among(options.threads),
            new_index: &|| Index::with_flats(limits.size_bytes, options.flat_from),
            progress: &options.progress,
        };
        let mut replayed = survey(&media, &found, &reading)?;
        if replayed.keys <= options.replay.at_once_max {
            replayed.finish(&media, &found.segments)?;
        }
        if is_rewritten {
            let note = "a flush of the cache device had failed: all it holds was stored again";
            replayed.notes.push(note.to_string());
        }
        replayed.notes.extend(memory.notes.iter().cloned().chain(forgotten));
        self.assemble(media, memory, found, replayed)
    }

    /// Turns what was found into a running cache: takes up the keys that a dead server left in
    /// memory, and names this attach on the label. memory.rs says why in this order.
    fn assemble(
        &self,
        media: Media,
        mut memory: Memory,
        found: Structures,
        mut replayed: Replayed,
    ) -> Result<Attached> {
        let (args, options) = (self.args.clone(), self.options);
        let backing = Arc::clone(&self.backing);
        let info = found.info.record;
        // First of all: it may refuse, and a refused medium is not touched.
        let left = memory.left()?;
        let left = match keys_left(&media, &found, &mut replayed, left, &args)? {
            Left::Keys(keys) => keys,
            Left::OfAnother(note) => return Ok(Attached::OtherMemory(note)),
        };
        let marks_from = first_mark(&found, &replayed, &info);
        memory.name(options.stripes, &info, replayed.head)?;
        let (label, slot) =
            name_attach(&media, &backing, &memory, options, &found, &replayed, marks_from)?;
        let (log, open) = self.take_over(&media, &memory, &found, &mut replayed, &left)?;
        let segments = Arc::clone(&found.segments);
        // A kernel would mis-count keys of reused segments: collection passes them first of all.
        let stale_until = (replayed.stale_keys > 0).then_some(replayed.dirty_tail);
        let replay = replayed.rest;
        let writeback = Writeback::new(&log, marks_from, replayed.torn_until);
        let retention = args.retention.policy(segments.blocks());
        let events = Arc::default();
        Ok(Attached::Open(Box::new(Pcache {
            is_replaying: AtomicBool::new(replay.is_some()),
            crcs: replayed.crcs,
            stripes: (0..options.stripes).map(|_| Stripe::default()).collect(),
            open,
            close_scratch: Mutex::new(Vec::with_capacity(options.stripes * KEYS_MAX)),
            zero_extent: Mutex::default(),
            known_zeroes: Mutex::default(),
            zero_crc: Mutex::new((0, crate::crc::pcache_crc(&[]))),
            misses: Mutex::default(),
            background: Mutex::new(Background { writeback, replay, ..Background::default() }),
            collector: Mutex::new(Gc::new(stale_until, replayed.hidden_until)),
            bad: Quarantine::new(&label.bad, backing.limits().size_bytes),
            backing,
            label: Mutex::new((label, slot)),
            superblock_flags: found.superblock.flags.get(),
            seg_num: found.superblock.seg_num.get(),
            flags: AtomicU32::new(info.flags.get()),
            info: Mutex::new(found.info),
            room: Room::new(&events, segments.blocks() * crate::units::BLOCK),
            alarm: Alarm::new(&events),
            events,
            dirty_at_start: replayed.dirty_bytes,
            cleaned_bytes: AtomicU64::new(0),
            is_draining: AtomicBool::new(false),
            is_suspended: AtomicBool::new(false),
            is_origin_limiting: AtomicBool::new(false),
            fill_bell: FillBell::new(segments.count(), args.high_watermark),
            counters: Counters::default(),
            notes: Mutex::new(replayed.notes),
            replay_pace: options.replay,
            index: replayed.index,
            write_reserve: gc::write_reserve(&*retention, segments.count()),
            retention,
            has_retained: AtomicBool::new(false),
            segments,
            args,
            media,
            log,
        })))
    }

    /// The log takes up the keys that were left in memory, which belongs to this attach alone then.
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
        // From here on the memory is this attach's alone: the keys in it are in the log.
        let open =
            OpenSets::begin(memory.words(), options.stripes, options.attach_id, &info, log.head());
        memory.words().keep_last_name();
        Ok((log, open))
    }
}

/// The log as it was found, with its tails where the attach wants them.
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
    marks_from: Option<Position>,
) -> Result<(Label, SlotState)> {
    let limits = backing.limits();
    let mut label = Label {
        attach_id: options.attach_id,
        backing_bytes: limits.size_bytes,
        identity: limits.identity.clone(),
        marks_from: marks_from.unwrap_or(replayed.dirty_tail),
        info: [0; 24],
        bad: found.label.as_ref().map_or_else(Vec::new, |(label, _)| label.bad.clone()),
        torn_until: replayed.torn_until,
        served: memory.serving(),
    };
    label.info.copy_from_slice(found.info.record.as_bytes());
    // Also beside a label that a format left, which counts for nothing else.
    let mut slot = Label::load(media).map_or(SlotState::unwritten(0), |(_, slot)| slot);
    if mutants::is(Mutant::LabelUnwritten) {
        return Ok((label, slot));
    }
    label
        .store_twice(media, &mut slot)
        .map_err(|status| media.damaged(format_args!("cannot store the label: {status}")))?;
    Ok((label, slot))
}

/// From where on the log surely carries flush marks; `None`: from dirty_tail on.
fn first_mark(found: &Structures, replayed: &Replayed, info: &CacheInfo) -> Option<Position> {
    let was_ours = found.label.as_ref().is_some_and(|(label, _)| {
        label.info == *info.as_bytes() || mutants::is(Mutant::MarksOnKernelLog)
    });
    match &found.label {
        // Only we have written since, and the place where we began is before dirty_tail.
        Some(_) if was_ours && !replayed.has_met_marks => None,
        Some((label, _)) if was_ours => Some(label.marks_from),
        _ => Some(replayed.head),
    }
}

impl Pcache {
    /// Nobody serves the cache any more, and all that was acknowledged is in its log; else nothing
    /// is said, and the next server takes it up.
    pub(super) fn end(&self) {
        if self.has_open_keys() || self.log.has_failed() {
            return;
        }
        if self.say_at_rest() {
            self.open.end();
        }
    }

    /// For a mutant: what an attach says before anybody is served.
    pub(super) fn say_served(&self) {
        let boot = self.media.shared.as_ref().map_or(0, SharedWords::boot);
        let mut label = lock(&self.label);
        let (label, slot) = &mut *label;
        label.served = Some(super::label::Serving { boot, place: String::new() });
        let _ = label.store_twice(&self.media, slot);
    }

    pub(super) fn say_at_rest(&self) -> bool {
        let mut label = lock(&self.label);
        let (label, slot) = &mut *label;
        label.served = None;
        label.store_twice(&self.media, slot).is_ok()
    }

    /// The kernel's status: `sb_flags segs segs used gc% flags head dirty_tail key_tail`.
    pub(super) fn status_line(&self) -> String {
        let flags = self.flags.load(Ordering::Relaxed);
        format!(
            "{:x} {} {} {} {} {:x} {} {} {}",
            self.superblock_flags,
            self.seg_num,
            self.seg_num,
            self.segments.used(),
            gc_percent_of(flags),
            flags,
            self.log.head(),
            self.log.dirty_tail(),
            self.log.key_tail()
        )
    }

    /// The kernel's table words (it prints `crc` where it wants `data_crc`), then ours.
    pub(super) fn table_words(&self) -> String {
        format!(
            "{} {} 4 cache_mode writeback crc {}{}",
            Word::new(self.media.pmem.medium().kernel_name.as_str()).quoted(),
            Word::new(self.backing.limits().kernel_name.as_str()).quoted(),
            self.args.has_data_crc,
            self.args.own_words()
        )
    }

    /// `gc_percent <0..90>`, stored durably before it is answered.
    pub(super) fn take_message(&self, words: &[String]) -> Result<String> {
        let invalid = |what: String| Error::new(Kind::Invalid, format!("pcache: message {what}"));
        let [name, value] = words else {
            return Err(invalid(format!(
                "of {} words: only 'gc_percent <n>' is known",
                words.len()
            )));
        };
        if !name.eq_ignore_ascii_case("gc_percent") {
            return Err(invalid(format!("'{name}': only 'gc_percent <n>' is known")));
        }
        let digits = value.strip_prefix('+').unwrap_or(value);
        let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let percent = digits.parse::<u32>().ok().filter(|n| is_plain && *n <= GC_PERCENT_MAX);
        let percent = percent.ok_or_else(|| {
            invalid(format!("gc_percent '{value}': not a number from 0 to {GC_PERCENT_MAX}"))
        })?;
        self.set_gc_percent(percent)?;
        self.events.work();
        Ok(String::new())
    }

    fn set_gc_percent(&self, percent: u32) -> Result<()> {
        let mut info = lock(&self.info);
        let next = info.slot.next();
        let flags = info.record.flags.get() & !(0x7F << INFO_GC_SHIFT) | percent << INFO_GC_SHIFT;
        let record = CacheInfo::new(
            next.seq,
            info.record.first_segment.get(),
            info.record.n_segs.get(),
            flags,
        );
        let failed =
            |status: Status| self.media.damaged(format_args!("cannot store cache_info: {status}"));
        // Shared memory and label must know the record by the time it can be found on media.
        self.open.announce_info(&record);
        self.media.store_slot(CACHE_INFO_AT, PAGE_STRIDE, next, &record).map_err(failed)?;
        self.open.confirm_info(&record);
        info.record = record;
        info.slot = next;
        self.flags.store(flags, Ordering::Relaxed);
        let mut label = lock(&self.label);
        label.0.info.copy_from_slice(record.as_bytes());
        let (label, slot) = &mut *label;
        label.store(&self.media, slot).map_err(failed)
    }
}
