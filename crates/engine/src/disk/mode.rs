//! The purpose of opening a file or block device.

/// The purpose of opening a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OpenMode {
    /// To read and write, alone: a lock on a file, an exclusive claim of a block device. If the
    /// device is already in use: [`Kind::Busy`](crate::error::Kind::Busy).
    #[default]
    Exclusive,
    /// To inspect. Takes no lock, changes no data.
    ReadOnly,
    /// To read, while others only read: a shared lock on a file.
    Shared,
}
