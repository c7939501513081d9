//! Media made from the specification alone: this code does not use the engine's layout, so its
//! expectations are independent. Small segments, any chain, any log.

pub const SEGS_OFF: usize = 20480;
pub const SEG_META: usize = 12288;
const SB_MAGIC: u64 = 0x65B0_5EFA_96C5_96EF;
const KSET_MAGIC: u64 = 0x6768_94A6_4E16_4F1A;
pub const CLEAN: u32 = 2;

/// CRC-32C without inversion, from the kernel's seed, bit by bit.
pub fn crc(data: &[u8]) -> u32 {
    data.iter().fold(0x3B15A, |register: u32, byte| {
        (0..8).fold(register ^ u32::from(*byte), |register, _| {
            register >> 1 ^ if register & 1 == 1 { 0x82F6_3B78 } else { 0 }
        })
    })
}

fn seal(body: Vec<u8>) -> Vec<u8> {
    [crc(&body).to_le_bytes().to_vec(), body].concat()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub fn superblock(seg_num: u32, flags: u32, padding: u32) -> Vec<u8> {
    seal([words(&[flags]), SB_MAGIC.to_le_bytes().to_vec(), words(&[seg_num, padding])].concat())
}

/// seq, then payload; version and res hold what the kernel's stack held.
pub fn meta(seq: u8, junk: u32, payload: &[u32]) -> Vec<u8> {
    seal([words(&[u32::from(seq) | junk << 8]), words(payload)].concat())
}

pub fn cache_info(seq: u8, first: u32, n_segs: u32, flags: u32) -> Vec<u8> {
    meta(seq, 0, &[first, n_segs, flags, 0])
}

pub fn seg_info(seq: u8, next: Option<u32>) -> Vec<u8> {
    meta(seq, 0, &[2 | u32::from(next.is_some()), next.unwrap_or(0)])
}

pub fn generation(seq: u8, generation: u64) -> Vec<u8> {
    meta(seq, 0, &[generation as u32, (generation >> 32) as u32])
}

pub fn tail(seq: u8, at: (u32, u32)) -> Vec<u8> {
    meta(seq, 0, &[at.0, at.1])
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Key {
    pub off: u64,
    pub len: u32,
    pub flags: u32,
    pub segment: u32,
    pub at: u32,
    pub generation: u64,
    pub crc: u32,
}

impl Key {
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.off.to_le_bytes().to_vec();
        bytes.extend(words(&[self.len, self.flags, self.segment, self.at]));
        bytes.extend(self.generation.to_le_bytes());
        bytes.extend(words(&[self.crc, 0]));
        bytes
    }
}

pub fn kset(keys: &[Key]) -> Vec<u8> {
    let mut body = words(&[keys.len() as u32]);
    body.extend(KSET_MAGIC.to_le_bytes());
    body.extend(0_u64.to_le_bytes());
    body.extend(keys.iter().flat_map(Key::bytes));
    seal(body)
}

pub fn last(next: u32) -> Vec<u8> {
    let mut body = words(&[next]);
    body.extend(KSET_MAGIC.to_le_bytes());
    body.extend(1_u64.to_le_bytes());
    seal(body)
}

/// A cache device under construction.
#[derive(Clone)]
pub struct Builder {
    pub image: Vec<u8>,
    pub segment_bytes: usize,
    /// Physical number of each logical segment.
    pub chain: Vec<u32>,
    pub generations: Vec<u64>,
    /// Where the next record goes.
    pub head: (u32, u32),
    pub key_tail: (u32, u32),
    pub dirty_tail: (u32, u32),
    pub log: Vec<u32>,
    pub has_crc: bool,
    pub gc_percent: u32,
    /// Sequence numbers of everything start here.
    pub seq: u8,
}

impl Builder {
    /// A cache of small segments whose log begins in logical segment 0.
    pub fn new(count: u32) -> Builder {
        Builder {
            image: vec![0; SEGS_OFF + count as usize * (64 << 10)],
            segment_bytes: 64 << 10,
            chain: (0..count).collect(),
            generations: vec![0; count as usize],
            head: (0, 0),
            key_tail: (0, 0),
            dirty_tail: (0, 0),
            log: vec![0],
            has_crc: false,
            gc_percent: 70,
            seq: 1,
        }
    }

    pub fn data_bytes(&self) -> u32 {
        (self.segment_bytes - SEG_META) as u32
    }

    pub fn segment_at(&self, logical: u32) -> usize {
        SEGS_OFF + self.chain[logical as usize] as usize * self.segment_bytes
    }

    /// Device byte of a place in a logical segment's data area.
    pub fn place(&self, segment: u32, at: u32) -> usize {
        self.segment_at(segment) + SEG_META + at as usize
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn data(&mut self, segment: u32, at: u32, bytes: &[u8]) {
        self.put(self.place(segment, at), bytes);
    }

    /// Stores data and the key that names it (with its CRC, if the cache has them).
    pub fn key(&mut self, off: u64, segment: u32, at: u32, data: &[u8], flags: u32) -> Key {
        self.data(segment, at, data);
        let crc = if self.has_crc { crc(data) } else { 0 };
        let generation = self.generations[segment as usize];
        Key { off, len: data.len() as u32, flags, segment, at, generation, crc }
    }

    /// Appends a key set with the kernel's rule of placement; `next` is where the log goes on if
    /// it does not fit.
    pub fn append(&mut self, keys: &[Key], next: u32) {
        let set = kset(keys);
        if (self.data_bytes() - self.head.1) as usize >= set.len() + 24 {
            return self.append_raw(&set);
        }
        self.append_last(next);
        self.append_raw(&set);
    }

    pub fn append_raw(&mut self, record: &[u8]) {
        self.data(self.head.0, self.head.1, &[record, &[0; 24]].concat());
        self.head.1 += record.len() as u32;
    }

    pub fn append_last(&mut self, next: u32) {
        self.data(next, 0, &[0; 24]);
        self.data(self.head.0, self.head.1, &last(next));
        self.head = (next, 0);
        self.log.push(next);
    }

    /// The device, with its fixed structures.
    pub fn finish(&self) -> Vec<u8> {
        let mut built = self.clone();
        let count = self.chain.len() as u32;
        let (old, new) = (self.seq.wrapping_sub(1), self.seq);
        built.put(4096, &superblock(count, 0, 0xDEAD_BEEF));
        let flags = self.gc_percent << 6 | 2 | u32::from(self.has_crc);
        built.put(8192, &cache_info(old, 99, 7, flags));
        built.put(12288, &cache_info(new, self.chain[0], count, flags));
        built.put(16384, &meta(new, 0x00AB_CDEF, &[self.key_tail.0, self.key_tail.1]));
        built.put(16400, &tail(old, (0, 0)));
        built.put(16416, &tail(old, (1, 8)));
        built.put(16432, &meta(new, 0x0012_3456, &[self.dirty_tail.0, self.dirty_tail.1]));
        for logical in 0..count {
            let at = self.segment_at(logical);
            built.put(at, &seg_info(new, self.chain.get(logical as usize + 1).copied()));
            built.put(at + 4096, &seg_info(old, Some(9999)));
            let now = self.generations[logical as usize];
            built.put(at + 8192, &generation(old, now.wrapping_sub(1)));
            built.put(at + 8208, &generation(new, now));
        }
        built.image
    }
}
