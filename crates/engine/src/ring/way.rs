//! The ways in which the kernel can serve a ring: newer kernels know cheaper ones.

/// When the kernel does the rest of the work of a completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// When this thread enters it, and only there (Linux 6.1).
    Deferred,
    /// When this thread enters it for any reason, without interrupting it (Linux 5.19).
    Cooperative,
    /// By interrupting this thread, as in all kernels.
    Plain,
}

impl Way {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Way::Deferred => "a thread takes completions when it waits for them",
            Way::Cooperative => "completions do not interrupt threads (Linux 6.1 costs less)",
            Way::Plain => "completions interrupt threads (Linux 6.1 costs less)",
        }
    }
}

/// All ways, the one that costs least first.
pub(crate) const WAYS: [Way; 3] = [Way::Deferred, Way::Cooperative, Way::Plain];
