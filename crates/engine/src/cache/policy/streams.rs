//! Streams: requests that continue where another request ended. A client reads or writes in order,
//! and will want the following data.

/// How many streams are followed at a time.
const STREAMS: usize = 64;
/// A request that begins this many bytes before the end also continues the stream: a client that
/// reads whole pages reads the last one again.
const OVERLAP_MAX: u64 = 4096;

/// A stream: where its last request ended, and how long it is, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    end: u64,
    len: u64,
}

/// The latest streams; a single request is also one. A new stream replaces the one without a
/// request for the longest time.
#[derive(Debug)]
pub(super) struct Streams {
    /// The latest last.
    streams: Vec<Stream>,
}

impl Streams {
    pub(super) fn new() -> Streams {
        Streams { streams: Vec::with_capacity(STREAMS) }
    }

    /// A request for `len` bytes at byte `start` of the origin. Returns the earlier length of the
    /// stream, if the request continues one.
    pub(super) fn follow(&mut self, start: u64, len: u64) -> Option<u64> {
        let goes_on = |stream: &Stream| stream.end.wrapping_sub(start) <= OVERLAP_MAX;
        let found = self.streams.iter().rposition(goes_on);
        let before = found.map(|nth| self.streams.remove(nth).len);
        if self.streams.len() == STREAMS {
            self.streams.remove(0);
        }
        let len_now = before.unwrap_or(0).saturating_add(len);
        self.streams.push(Stream { end: start.saturating_add(len), len: len_now });
        before
    }

    /// After the last request, this many bytes more are brought in. Requests for them are hits, and
    /// they are not followed: the next miss of the stream comes after them.
    pub(super) fn extend(&mut self, bytes: u64) {
        if let Some(stream) = self.streams.last_mut() {
            stream.end = stream.end.saturating_add(bytes);
            stream.len = stream.len.saturating_add(bytes);
        }
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
            assert_eq!(streams.follow((1 << 40) + nth * 8192, 4096), None, "the reads have gaps");
        }
        assert_eq!(streams.follow((1 << 30) + 512, 1), None, "that was long ago");
        assert_eq!(streams.follow(99 * 4096 + 100, 4096), Some(100 * 4096), "a part again");
        streams.extend(12288);
        assert_eq!(streams.follow(99 * 4096 + 100 + 16384, 1), Some(101 * 4096 + 12288));
        assert_eq!(streams.follow(u64::MAX, u64::MAX), None);
    }
}
