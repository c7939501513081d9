//! The rows of a region's side table, in chunks: a growing table is not copied, and takes no more
//! memory than it needs.

use std::ops::{Index, IndexMut};

use super::BLOCK_SECTORS;

/// The entries of a block in pieces, one for each sector.
pub(super) type Row = [u64; BLOCK_SECTORS];

/// Rows in one allocation.
const CHUNK: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Rows {
    chunks: Vec<Box<[Row]>>,
    len: u32,
}

impl Rows {
    /// How many rows there are.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Adds a row; its number.
    pub(super) fn push(&mut self, row: Row) -> u32 {
        let number = self.len;
        if (number as usize).is_multiple_of(CHUNK) {
            self.chunks.push(vec![Row::default(); CHUNK].into());
        }
        self.len += 1;
        self[number] = row;
        number
    }

    /// A row, if there is one with this number.
    pub(super) fn get(&self, number: u32) -> Option<&Row> {
        let chunk = self.chunks.get(number as usize / CHUNK)?;
        Some(&chunk[number as usize % CHUNK])
    }

    /// Bytes of memory in addition to the value itself.
    pub(super) fn memory_bytes(&self) -> u64 {
        let table = self.chunks.capacity() * size_of::<Box<[Row]>>();
        (table + self.chunks.len() * CHUNK * size_of::<Row>()) as u64
    }
}

impl Index<u32> for Rows {
    type Output = Row;

    fn index(&self, number: u32) -> &Row {
        &self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }
}

impl IndexMut<u32> for Rows {
    fn index_mut(&mut self, number: u32) -> &mut Row {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }
}
