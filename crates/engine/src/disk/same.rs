//! "Is this the disk, as I left it?": the one question that each attach, recovery and wipe asks
//! about the disks of a cache, and its four answers.
//!
//! It compares the recorded identity with the present one (`identity`), and the recorded stamp with
//! the present data (`stamp`).

use super::stamp::Compared;
use super::{Disk, DiskLimits, Match, Stamp};
use crate::sync::Arc;
use crate::units::human_pair;

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Same {
    /// It is, and no other program wrote to it.
    Yes,
    /// It is another disk. `has_its_data`: its data is the recorded one, so it is a copy, or the
    /// disk in a new place.
    Another {
        /// See there.
        has_its_data: bool,
    },
    /// It is the same disk, and another program changed it; the difference in a few words.
    Changed(&'static str),
    /// All recorded facts agree, but they are too few for "yes": the cache lacks a stamp, because
    /// its server died, or the disk's identity is one that others may have.
    CannotTell,
}

/// The records of a cache about one of its disks.
#[derive(Clone, Copy, Debug)]
pub struct Recorded {
    /// How the disk's identity compares with the recorded one.
    pub identity: Match,
    /// The stamp.
    pub stamp: Option<Stamp>,
    /// The bytes that the stamp covers.
    pub bytes: u64,
}

/// The words of a refusal that the answer does not have.
#[derive(Clone, Copy, Debug)]
pub struct Refused<'a> {
    /// The cache, by the name of its medium.
    pub cache: &'a str,
    /// The disk.
    pub disk: &'a DiskLimits,
    /// The disk's role.
    pub role: &'a str,
    /// The recorded identity, or an empty text if only a checksum of it is recorded.
    pub known: &'a str,
    /// The recorded size, if there is one.
    pub known_bytes: Option<u64>,
    /// The amount of dirty data, or an empty text if it is unknown.
    pub dirty: &'a str,
    /// The arguments that accept the disk nevertheless.
    pub remedy: &'a str,
}

impl Same {
    /// Asks the question.
    pub fn of(disk: &Arc<dyn Disk>, recorded: &Recorded) -> Same {
        let is_other = recorded.identity == Match::Other;
        let compare = |stamp: Stamp| stamp.compare(disk, recorded.bytes, is_other);
        match recorded.stamp.map_or(Compared::Unknown, compare) {
            compared if is_other => Same::Another { has_its_data: compared == Compared::Alike },
            Compared::Alike => Same::Yes,
            Compared::Differs(why) => Same::Changed(why),
            Compared::Unknown => Same::CannotTell,
        }
    }

    /// Whether the disk has the data of which the cache holds clean copies, as far as is known.
    pub fn has_its_data(self) -> bool {
        match self {
            Same::Yes | Same::CannotTell => true,
            Same::Another { has_its_data } => has_its_data,
            Same::Changed(_) => false,
        }
    }

    /// Whether a stamp proves that.
    pub fn is_proven(self) -> bool {
        matches!(self, Same::Yes | Same::Another { has_its_data: true })
    }

    /// An error text, if the cache must not be used with this disk without the user's consent. For
    /// [`Same::Changed`], the caller has found dirty data.
    pub fn refusal(self, words: &Refused<'_>) -> Option<String> {
        let Refused { cache, disk, role, known, known_bytes, dirty, remedy } = *words;
        let name = &disk.name;
        match self {
            Same::Yes | Same::CannotTell => None,
            Same::Another { .. } => {
                let (old, new) = match known_bytes {
                    Some(known) => {
                        let (old, new) = human_pair(known, disk.size_bytes);
                        (old, format!(", {new}"))
                    }
                    None => (String::new(), String::new()),
                };
                let old: Vec<&str> = [known, &old].into_iter().filter(|w| !w.is_empty()).collect();
                let old = match old.is_empty() {
                    true => String::new(),
                    false => format!(" ({})", old.join(", ")),
                };
                let dirty = match dirty {
                    "" => String::new(),
                    dirty => format!(", and holds {dirty} of dirty data"),
                };
                Some(format!(
                    "{cache} belongs to another {role}{old} than {name} ({}{new}){dirty}; if it is \
                     the same data in a new place, {remedy}",
                    disk.identity
                ))
            }
            Same::Changed(why) => Some(format!(
                "{name} was changed since its cache ended ({why}), and the cache holds {dirty} of \
                 dirty data of its older state: to overwrite the present data of {name} with it, \
                 {remedy}"
            )),
        }
    }

    /// A note for the user about clean data that is dropped.
    pub fn dropped(self, origin: &str) -> String {
        let why = match self {
            Same::Changed(why) => format!("was changed since its cache ended ({why})"),
            _ => "is not the device that the cache belongs to".to_owned(),
        };
        format!(
            "{origin} {why}: the clean data in the cache was dropped, and will be read from \
            {origin}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RamDisk;

    const BYTES: u64 = 4 << 20;

    #[test]
    fn there_are_four_answers() {
        let ram = Arc::new(RamDisk::new(BYTES, 512).with_evidence());
        let disk: Arc<dyn Disk> = ram.clone();
        let stamp = Stamp::at_end(&disk, BYTES);
        let ask = |identity, stamp| Same::of(&disk, &Recorded { identity, stamp, bytes: BYTES });
        for identity in [Match::Exact, Match::Possible] {
            assert_eq!(ask(identity, stamp), Same::Yes);
            assert_eq!(ask(identity, None), Same::CannotTell);
        }
        assert_eq!(ask(Match::Other, stamp), Same::Another { has_its_data: true });
        assert_eq!(ask(Match::Other, None), Same::Another { has_its_data: false });
        ram.poke(0, &[1]);
        assert!(matches!(ask(Match::Exact, stamp), Same::Changed(_)));
        assert!(matches!(ask(Match::Possible, stamp), Same::Changed(_)));
        assert_eq!(ask(Match::Other, stamp), Same::Another { has_its_data: false });
    }

    #[test]
    fn two_answers_refuse() {
        let ram = RamDisk::new(BYTES, 512).named("O");
        let words = Refused {
            cache: "C",
            disk: ram.limits(),
            role: "origin",
            known: "",
            known_bytes: None,
            dirty: "1.0 MiB",
            remedy: "say so",
        };
        assert_eq!(Same::Yes.refusal(&words), None);
        assert_eq!(Same::CannotTell.refusal(&words), None);
        let another = Same::Another { has_its_data: true }.refusal(&words).unwrap();
        let expected = "C belongs to another origin than O (O), and holds 1.0 MiB of dirty data; \
                        if it is the same data in a new place, say so";
        assert_eq!(another, expected);
        let known = Refused { known: "X", known_bytes: Some(BYTES / 2), dirty: "", ..words };
        let another = Same::Another { has_its_data: false }.refusal(&known).unwrap();
        assert!(
            another.starts_with("C belongs to another origin (X, 2.0 MiB) than O (O, 4.0 MiB);")
        );
        let changed = Same::Changed("its length has changed").refusal(&words).unwrap();
        assert!(changed.starts_with("O was changed") && changed.ends_with("with it, say so"));
    }
}
