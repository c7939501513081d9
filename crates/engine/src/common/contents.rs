//! The contents of a cache device, as its engine has read them: as text, as values for programs,
//! and as a table line that attaches the cache again.

use crate::shm::Served;

/// The contents of a cache device.
#[derive(Debug)]
pub struct Contents {
    /// For people: a few words each, and the value.
    pub rows: Vec<(&'static str, String)>,
    /// For programs: the same, and more.
    pub fields: Vec<(&'static str, Value)>,
    /// The damage, one sentence for each.
    pub damage: Vec<String>,
    /// The server that has the device, or had it and died.
    pub served: Option<Served>,
    /// The arguments that a table for this cache must have.
    pub shape: Shape,
}

impl Contents {
    /// Bytes that the origin has not; none if damage hides that.
    pub fn dirty_bytes(&self) -> Option<u64> {
        match self.fields.iter().find(|(name, _)| *name == "dirty_bytes") {
            Some((_, Value::Number(bytes))) if self.damage.is_empty() => Some(*bytes),
            _ => None,
        }
    }
}

/// A value for programs, of a type that JSON can represent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// There is none.
    Nothing,
    /// A number.
    Number(u64),
    /// Yes or no.
    Flag(bool),
    /// Words.
    Text(String),
    /// Several.
    List(Vec<Value>),
    /// Several with names.
    Group(Vec<(&'static str, Value)>),
}

/// The arguments of a table line that attach this cache unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The shortest line, in sectors.
    pub sectors: u64,
    /// The words of the line, in order, without those that name the two devices.
    pub words: Vec<String>,
}

/// Added to the refusal to format a cache by force that has, or may have, dirty data.
pub(crate) const NOT_BY_FORCE: &str = "--force-format overwrites only a cache that is known to be \
                                       clean: write the data back with `udm recover`, or erase the \
                                       first 64 KiB of the device and use --force-format again if \
                                       the data may be lost";

/// Whether shared memory has, or may have, writes that the medium lacks: the server did not detach,
/// and the machine was not restarted since.
pub(crate) fn has_more(served: Option<&Served>) -> bool {
    served.is_some_and(|served| served.is_of_this_boot)
}
