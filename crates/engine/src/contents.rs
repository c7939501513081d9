//! What a cache device holds, as its engine has read it: for people, for programs, and for a table
//! that attaches it again.

use crate::shm::Served;

/// What a cache device holds.
#[derive(Debug)]
pub struct Contents {
    /// For people: a few words each, and the value.
    pub rows: Vec<(&'static str, String)>,
    /// For programs: the same, and more.
    pub fields: Vec<(&'static str, Value)>,
    /// What is damaged, a sentence each.
    pub damage: Vec<String>,
    /// The server that has the device, or had it and died.
    pub served: Option<Served>,
    /// What a table must say of it.
    pub shape: Shape,
}

/// A value for programs: what JSON can carry.
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

/// The words of a table line that attach a cache as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The shortest line, in sectors.
    pub sectors: u64,
    /// The words of the line, in order, without those that name the two devices.
    pub words: Vec<String>,
}

/// Whether memory has, or may have, writes that the medium has not: the server did not detach, and
/// the machine was not restarted since.
pub(crate) fn has_more(served: Option<&Served>) -> bool {
    served.is_some_and(|served| served.is_of_this_boot)
}
