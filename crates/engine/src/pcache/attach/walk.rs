//! Walking along the log of a cache that is being opened: every link is checked before it is
//! followed, and no segment is entered twice, so every walk ends.

use zerocopy::FromBytes;

use crate::error::Result;

use crate::pcache::keylog::{LogReader, ZERO_BEHIND, after};
use crate::pcache::layout::{
    KSET_HEADER_BYTES, KSET_LAST, KSET_MAGIC, Key, KsetHeader, Position, Record, parse_record,
};
use crate::pcache::media::Media;
use crate::pcache::segment::Segments;
use crate::recovery::IN_HOLE;

/// A walk along the log that checks its structure.
pub(in crate::pcache) struct Walk<'a> {
    pub(in crate::pcache) media: &'a Media,
    pub(in crate::pcache) segments: &'a Segments,
    pub(in crate::pcache) reader: LogReader,
    pub(in crate::pcache) position: Position,
    pub(in crate::pcache) is_log: Vec<bool>,
}

pub(in crate::pcache) enum Step {
    Keys(Vec<Key>),
    Last,
    End,
}

impl<'a> Walk<'a> {
    pub(in crate::pcache) fn new(
        media: &'a Media,
        segments: &'a Segments,
        from: Position,
    ) -> Walk<'a> {
        let mut is_log = vec![false; segments.count() as usize];
        is_log[from.segment as usize] = true;
        Walk { media, segments, reader: LogReader::default(), position: from, is_log }
    }

    /// The record at the present position; moves past it. `keys` is scratch space.
    pub(in crate::pcache) fn step(&mut self, keys: &mut Vec<Key>) -> Result<Step> {
        let position = self.position;
        let record =
            self.reader.read(self.media, self.segments, position, None).map_err(|status| {
                self.media.damaged(format_args!("cannot read the log at {position}: {status}"))
            })?;
        let Some(record) = record else { return Ok(Step::End) };
        let next = after(position, &record);
        let data_bytes = self.media.geometry.data_bytes();
        match record {
            Record::Last(segment) => {
                check_way(self.media, &mut self.is_log, position, segment)?;
                self.position = next;
                Ok(Step::Last)
            }
            Record::Keys(found) => {
                if next.offset + KSET_HEADER_BYTES as u32 > data_bytes {
                    return Err(self.media.damaged(format_args!(
                        "log at {position}: key set leaves no space for its end"
                    )));
                }
                keys.clear();
                keys.extend_from_slice(found);
                self.position = next;
                Ok(Step::Keys(std::mem::take(keys)))
            }
        }
    }

    /// Whether there are 24 zero bytes at the present position, as after every complete log.
    pub(in crate::pcache) fn ends_cleanly(&self) -> bool {
        let mut end = [0xFF; KSET_HEADER_BYTES];
        let at = self.segments.data_at(self.position.segment, self.position.offset);
        let is_there = !self.media.pmem.was_hole(at, KSET_HEADER_BYTES as u64);
        is_there && self.media.pmem.load(at, &mut end).is_ok() && end == [0; KSET_HEADER_BYTES]
    }
}

/// Checks that the log may continue in `segment` after `position`, and records that it does.
pub(in crate::pcache) fn check_way(
    media: &Media,
    is_log: &mut [bool],
    position: Position,
    segment: u32,
) -> Result<()> {
    let Some(is_log) = is_log.get_mut(segment as usize) else {
        return Err(media.damaged(format_args!(
            "log at {position}: continues in segment {segment} of {}",
            is_log.len()
        )));
    };
    if std::mem::replace(is_log, true) {
        return Err(
            media.damaged(format_args!("log at {position}: has a cycle at segment {segment}"))
        );
    }
    Ok(())
}

/// The result of following the log from `from` to its end: whether `wanted` was passed, the end and
/// whether it is a clean one, and the number of records.
pub(in crate::pcache) struct Outline {
    pub(in crate::pcache) has_met: bool,
    pub(in crate::pcache) end: Position,
    pub(in crate::pcache) is_clean: bool,
    pub(in crate::pcache) records: u64,
}

pub(in crate::pcache) fn outline(
    media: &Media,
    segments: &Segments,
    from: Position,
    wanted: Position,
) -> Result<Outline> {
    let mut walk = Walk::new(media, segments, from);
    let mut has_met = false;
    let mut records = 0;
    let mut keys = Vec::new();
    loop {
        has_met |= walk.position == wanted;
        match walk.step(&mut keys)? {
            Step::End => break,
            Step::Last => records += 1,
            Step::Keys(used) => {
                records += 1;
                keys = used;
            }
        }
    }
    Ok(Outline { has_met, end: walk.position, is_clean: walk.ends_cleanly(), records })
}

/// The damage after a log's end that is not zeroes: such a log ends in a torn append, or in damage.
/// If a record follows that was appended later, it is damage.
pub(in crate::pcache) fn damage_behind(
    media: &Media,
    segments: &Segments,
    end: Position,
) -> Result<Option<String>> {
    // The log is zeroed ahead of its end, so data was stored at this end, and the hole is a loss.
    if media.pmem.was_hole(segments.data_at(end.segment, end.offset), KSET_HEADER_BYTES as u64) {
        return Ok(Some(format!(
            "the log ends at {end}, which {IN_HOLE}: flushed writes may be lost"
        )));
    }
    let mut bytes = vec![0; (media.geometry.data_bytes() - end.offset) as usize];
    segments
        .load(end.segment, end.offset, &mut bytes)
        .map_err(|status| media.damaged(format_args!("cannot read the log at {end}: {status}")))?;
    Ok(if let Some(distance) = appended_later(segments, &bytes) {
        Some(format!(
            "log damaged at {end}: more of it follows {distance} bytes further on, so flushed \
             writes may be lost"
        ))
    } else if is_damaged_last(&bytes) {
        Some(format!(
            "log damaged at {end}: it continues in another segment, but the number of that segment \
             cannot be read, so flushed writes may be lost"
        ))
    } else {
        None
    })
}

/// How far after `end` a record follows that was surely appended later: a whole key set with
/// current keys, or a record that leads to the next segment. Records after a long stretch of zeroes
/// are old, because the log is zeroed ahead of its end.
fn appended_later(segments: &Segments, bytes: &[u8]) -> Option<usize> {
    let mut zeroes = 0;
    for (nth, word) in bytes.chunks_exact(8).enumerate().skip(1) {
        zeroes = if word == [0; 8] { zeroes + 8 } else { 0 };
        if zeroes >= ZERO_BEHIND {
            return None;
        }
        let is_later = match parse_record(&bytes[nth * 8..]) {
            Some(Record::Keys(keys)) => holds_current_keys(segments, keys),
            Some(Record::Last(next)) => next < segments.count(),
            None => false,
        };
        if is_later {
            return Some(nth * 8);
        }
    }
    None
}

/// Whether there is a LAST record with a wrong CRC. A torn one looks different: some stores of
/// eight bytes are missing over bytes that were zero, so one of its words is zero.
fn is_damaged_last(end: &[u8]) -> bool {
    let Ok((header, _)) = KsetHeader::read_from_prefix(end) else { return false };
    let (magic, flags) = (header.magic.get(), header.flags.get());
    let is_last = flags == KSET_LAST || magic == KSET_MAGIC && flags != 0;
    let has_first_word = header.crc.get() != 0 || header.key_num.get() != 0;
    is_last && magic != 0 && has_first_word
}

fn holds_current_keys(segments: &Segments, keys: &[Key]) -> bool {
    !keys.is_empty() && keys.iter().all(|key| is_current(segments, key))
}

fn is_current(segments: &Segments, key: &Key) -> bool {
    let segment = key.segment.get();
    segment < segments.count() && segments.generation(segment) == key.generation.get()
}
