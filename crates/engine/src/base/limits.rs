//! Stated maxima: everything that can grow has one, and `udm info NAME --limits` prints them all.

/// A maximum, with its name (unit last) and its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Snake-case name with its unit last.
    pub name: &'static str,
    /// The most there can be.
    pub value: u64,
    /// The meaning of the maximum, in a few words.
    pub about: &'static str,
}

/// A maximum.
pub const fn limit(name: &'static str, value: u64, about: &'static str) -> Limit {
    Limit { name, value, about }
}
