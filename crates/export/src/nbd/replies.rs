//! The queue of replies to one client, in order.
//!
//! Headers and short data are gathered in one buffer, so that one call sends many replies. Long
//! data is not copied: the buffer of the finished read is queued itself.

use std::collections::VecDeque;

use udm::buffer::{Buffer, BufferPool};

/// Data up to this many bytes is copied after its header.
const COPY_BYTES_MAX: usize = 16 << 10;
/// Bytes gathered before a new buffer is started.
const GATHER_BYTES: usize = 128 << 10;

/// Replies that are not sent yet.
#[derive(Debug, Default)]
pub struct Replies {
    /// Full buffers; all older than `gathering`.
    ready: VecDeque<Buffer>,
    gathering: Option<Buffer>,
    unsent_bytes: usize,
}

impl Replies {
    /// Appends `bytes`.
    pub fn put(&mut self, bytes: &[u8], pool: &mut BufferPool) {
        debug_assert!(bytes.len() <= GATHER_BYTES, "the caller hands long data over as a buffer");
        self.unsent_bytes += bytes.len();
        if let Some(buffer) = &self.gathering
            && buffer.len() + bytes.len() > GATHER_BYTES
        {
            self.ready.extend(self.gathering.take());
        }
        let buffer = self.gathering.get_or_insert_with(|| {
            let mut buffer = pool.take(GATHER_BYTES);
            buffer.set_len(0);
            buffer
        });
        let at = buffer.len();
        buffer.set_len(at + bytes.len());
        buffer.as_mut_slice()[at..].copy_from_slice(bytes);
    }

    /// Appends a header and its data.
    pub fn put_data(&mut self, header: &[u8], data: Buffer, pool: &mut BufferPool) {
        self.put(header, pool);
        if data.len() <= COPY_BYTES_MAX {
            self.put(data.as_slice(), pool);
            pool.put(data);
        } else {
            self.unsent_bytes += data.len();
            self.ready.extend(self.gathering.take());
            self.ready.push_back(data);
        }
    }

    /// Takes the next buffer to send, as a whole. Return it through [`Replies::sent`].
    pub fn take_next(&mut self) -> Option<Buffer> {
        self.ready.pop_front().or_else(|| self.gathering.take())
    }

    /// Records that a buffer was sent in full.
    pub fn sent(&mut self, buffer: Buffer, pool: &mut BufferPool) {
        self.unsent_bytes -= buffer.len();
        pool.put(buffer);
    }

    /// Bytes that are not sent in full yet, including those of taken buffers.
    pub fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }
}
