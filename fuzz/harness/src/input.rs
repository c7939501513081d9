//! Decisions drawn from the bytes of an input; when they run out, every decision is 0.

/// The remaining bytes.
#[derive(Clone, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Starts with all of them.
    pub fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    /// Whether all bytes are used.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Up to `count` bytes.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let bytes = self.take(N);
        let mut array = [0; N];
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// A byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `bound`, from two bytes.
    pub fn below(&mut self, bound: u64) -> u64 {
        u64::from(self.u16()) % bound
    }

    /// A number near `limit`, the first one that is too large, or another one.
    pub fn near(&mut self, limit: u64) -> u64 {
        match self.u8() {
            0 => limit,
            1 => limit.wrapping_add(1),
            2 => limit.wrapping_sub(1),
            3 => limit.wrapping_sub(8),
            4 => limit.wrapping_sub(24),
            5 => limit.wrapping_sub(512),
            6 => limit.wrapping_add(512),
            7 => u64::MAX,
            8 => 1 << 63,
            9 => u64::from(u32::MAX),
            10 => 1 << 31,
            11 => self.u64(),
            12 => u64::from(self.u32()),
            13 => u64::from(self.u16()),
            _ if limit == 0 => 0,
            15..=80 => u64::from(self.u8()) % limit,
            81..=120 => u64::from(self.u16()) * 8 % limit,
            121..=180 => u64::from(self.u16()) * 512 % limit,
            _ => u64::from(self.u16()) % limit,
        }
    }
}
