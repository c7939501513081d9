//! Records of the kernel's perf events, as bytes. Lengths in them are checked, not believed: what
//! does not fit is skipped, and counted.

/// A marker that begins a part of a call chain, instead of an address. This is the largest marker.
const CONTEXT_MAX: u64 = -4095_i64 as u64;
const CONTEXT_KERNEL: u64 = -128_i64 as u64;
const KIND_LOST: u32 = 2;
const KIND_SAMPLE: u32 = 9;
const HEADER_BYTES: usize = 8;

/// Registers in a sample, at most.
const REGS_MAX: usize = 4;
/// Registers that are asked for.
#[cfg(target_arch = "x86_64")]
pub const REGS: usize = 3;
#[cfg(target_arch = "aarch64")]
pub const REGS: usize = 4;

/// One look at a thread.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'a> {
    pub thread: u32,
    /// The kernel's frames, the innermost first.
    pub kernel: Vec<u64>,
    /// The program's registers, in the kernel's order; none if the thread is the kernel's own.
    pub regs: Option<[u64; REGS_MAX]>,
    /// The top of the program's stack.
    pub stack: &'a [u8],
}

/// The contents of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Record<'a> {
    Sample(Sample<'a>),
    /// The number of samples that were lost because the ring was full.
    Lost(u64),
    /// An unknown kind of record.
    Other,
    /// Less than it says it is.
    Broken,
}

/// Walks through bytes.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: u64) -> Option<&'a [u8]> {
        let count = usize::try_from(count).ok()?;
        let (part, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(part)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }
}

/// The records in `bytes`, each to its own length.
pub fn records(mut bytes: &[u8]) -> impl Iterator<Item = Record<'_>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let len = bytes.get(6..HEADER_BYTES).map(|len| u16::from_le_bytes([len[0], len[1]]));
        let len = usize::from(len.unwrap_or(0));
        if len < HEADER_BYTES || len > bytes.len() {
            // The position of the next record is unknown.
            bytes = &[];
            return Some(Record::Broken);
        }
        let (record, rest) = bytes.split_at(len);
        bytes = rest;
        let kind = u32::from_le_bytes([record[0], record[1], record[2], record[3]]);
        let body = &record[HEADER_BYTES..];
        Some(match kind {
            KIND_SAMPLE => sample(body).map_or(Record::Broken, Record::Sample),
            KIND_LOST => lost(body).map_or(Record::Broken, Record::Lost),
            _ => Record::Other,
        })
    })
}

fn lost(body: &[u8]) -> Option<u64> {
    let mut bytes = Bytes(body);
    let _id = bytes.u64()?;
    bytes.u64()
}

/// Address, process and thread, call chain, registers, stack: in this order.
fn sample(body: &[u8]) -> Option<Sample<'_>> {
    let mut bytes = Bytes(body);
    let _address = bytes.u64()?;
    let (_process, thread) = (bytes.u32()?, bytes.u32()?);
    let count = bytes.u64()?;
    let mut chain = Bytes(bytes.take(count.checked_mul(8)?)?);
    let (mut kernel, mut is_kernel) = (Vec::new(), false);
    while let Some(address) = chain.u64() {
        if address >= CONTEXT_MAX {
            is_kernel = address == CONTEXT_KERNEL;
        } else if is_kernel {
            kernel.push(address);
        }
    }
    let abi = bytes.u64()?;
    let mut regs = None;
    if abi != 0 {
        let mut values = [0; REGS_MAX];
        for value in &mut values[..REGS] {
            *value = bytes.u64()?;
        }
        regs = Some(values);
    }
    let size = bytes.u64()?;
    let mut stack: &[u8] = &[];
    if size > 0 {
        let copied = bytes.take(size)?;
        let valid = usize::try_from(bytes.u64()?).ok()?;
        stack = copied.get(..valid)?;
    }
    Some(Sample { thread, kernel, regs, stack })
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm::prng::Prng;

    /// A record of this kind with these 64-bit words.
    fn record(kind: u32, words: &[u64]) -> Vec<u8> {
        let mut bytes = kind.to_le_bytes().to_vec();
        let len = (HEADER_BYTES + words.len() * 8) as u16;
        bytes.extend([0, 0]);
        bytes.extend(len.to_le_bytes());
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes
    }

    const USER: u64 = -512_i64 as u64;

    /// A sample in the kernel, of thread 7, with two words of stack, of which one is valid.
    fn words() -> Vec<u64> {
        let mut words = vec![0xffff_8000, 7 << 32 | 5];
        words.extend([5, CONTEXT_KERNEL, 0xffff_8000, 0xffff_9000, USER, 0x40]);
        words.push(2);
        words.extend((0..REGS as u64).map(|nth| 100 + nth));
        words.extend([16, 0xaa, 0xbb, 8]);
        words
    }

    #[test]
    fn a_sample_is_read_with_its_two_stacks() {
        let mut bytes = record(KIND_SAMPLE, &words());
        bytes.extend(record(KIND_LOST, &[1, 42]));
        bytes.extend(record(3, &[1]));
        let found: Vec<Record<'_>> = records(&bytes).collect();
        let [Record::Sample(sample), Record::Lost(42), Record::Other] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!((sample.thread, &sample.kernel[..]), (7, &[0xffff_8000, 0xffff_9000][..]));
        assert_eq!(sample.regs.unwrap()[..2], [100, 101]);
        assert_eq!(sample.stack, 0xaa_u64.to_le_bytes());
    }

    #[test]
    fn lengths_that_lie_break_one_record_and_nothing_else() {
        // Frames, bytes of stack, and valid bytes, in the words of a sample.
        let last = words().len() - 1;
        for (place, lie) in [
            (2, u64::MAX),
            (2, 1 << 61),
            (2, 6000),
            (last - 3, u64::MAX),
            (last - 3, 24),
            (last, 17),
            (last, u64::MAX),
        ] {
            let mut words = words();
            words[place] = lie;
            let mut bytes = record(KIND_SAMPLE, &words);
            bytes.extend(record(KIND_LOST, &[1, 2]));
            let found: Vec<Record<'_>> = records(&bytes).collect();
            assert_eq!(found, [Record::Broken, Record::Lost(2)], "{place}: {lie}");
        }
        // A record that is shorter than its header, or longer than the remaining bytes, ends the
        // walk.
        for len in [0_u16, 7, 9, 4096] {
            let mut bytes = record(KIND_LOST, &[]);
            bytes[6..8].copy_from_slice(&len.to_le_bytes());
            assert_eq!(records(&bytes).collect::<Vec<_>>(), [Record::Broken], "{len}");
        }
        assert_eq!(records(&[1, 2, 3]).collect::<Vec<_>>(), [Record::Broken]);
    }

    #[test]
    fn any_bytes_are_survived() {
        let mut prng = Prng::new(11);
        let whole = record(KIND_SAMPLE, &words());
        for round in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..=round % 5 {
                let place = prng.below(bytes.len() as u64) as usize;
                bytes[place] = prng.below(256) as u8;
            }
            bytes.truncate(prng.below(bytes.len() as u64 + 1) as usize);
            assert!(records(&bytes).count() <= bytes.len() / HEADER_BYTES + 1);
        }
    }
}
