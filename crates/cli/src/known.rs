//! The facts by which a cache is known again.

/// A cache of a table, with the facts that identify its medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The device that holds the mark, as the table names it.
    pub device: String,
    /// The mark of the last attach; none if it is damaged.
    pub mark: Option<String>,
    /// Whether a server that died left memory for the cache, in the place that its label names.
    pub is_in_memory: bool,
    /// Whether the device holds a cache of the line's type.
    pub is_there: bool,
    /// Whether the cache's label records that it does not have a server.
    pub is_at_rest: bool,
    /// Whether the line accepts the loss of the data in a server's memory.
    pub accepts_loss: bool,
}
