//! Requests that go on where another ended: somebody reads or writes in order, and will want what
//! comes next.

/// How many streams are followed at a time.
const STREAMS: usize = 64;

/// A stream: where its last request ended, and how long it is, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    end: u64,
    len: u64,
}

/// The latest streams; a request alone is one, too. The one that was longest without a request
/// makes room for a new one.
#[derive(Debug)]
pub(super) struct Streams {
    /// The latest last.
    streams: Vec<Stream>,
}

impl Streams {
    pub(super) fn new() -> Streams {
        Streams { streams: Vec::with_capacity(STREAMS) }
    }

    /// A request for `len` bytes at byte `start` of the origin. Returns how many bytes the stream
    /// had before, if the request goes on with one.
    pub(super) fn follow(&mut self, start: u64, len: u64) -> Option<u64> {
        let found = self.streams.iter().rposition(|stream| stream.end == start);
        let before = found.map(|nth| self.streams.remove(nth).len);
        if self.streams.len() == STREAMS {
            self.streams.remove(0);
        }
        let len_now = before.unwrap_or(0).saturating_add(len);
        self.streams.push(Stream { end: start.saturating_add(len), len: len_now });
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_followed_among_other_requests() {
        let mut streams = Streams::new();
        assert_eq!(streams.follow(0, 4096), None);
        assert_eq!(streams.follow(1 << 30, 512), None);
        for nth in 1..100 {
            assert_eq!(streams.follow(nth * 4096, 4096), Some(nth * 4096));
            assert_eq!(streams.follow((1 << 40) + nth * 8192, 4096), None, "it leaves gaps");
        }
        assert_eq!(streams.follow((1 << 30) + 512, 1), None, "that was long ago");
        assert_eq!(streams.follow(u64::MAX, u64::MAX), None);
    }
}
