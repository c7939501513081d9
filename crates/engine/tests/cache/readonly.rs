//! A cache that is served read-only: the data that it shows, and that it writes none.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::Devices;
use udm::cache::metadata::contents::mapping;
use udm::cache::metadata::format::write_whole;
use udm::cache::metadata::superblock::{CLEAN_SHUTDOWN, NEEDS_CHECK};
use udm::cache::metadata::{Contents, Superblock};
use udm::cache::{TableArgs, View};
use udm::disk::{Disk, Ring, SimDisk};
use udm::error::{Result, Status};
use udm::table::Word;
use udm::target::{FactValue, Port, Target};

use crate::fixture::{BLOCK, Fixture, disks};

const ORIGIN: u64 = 6 * BLOCK + 512;
const TABLE: &str = "64 0 smq 0";

fn view_of(disks: &[Arc<SimDisk>; 3], table: &str, len_bytes: u64) -> Result<View> {
    let words = format!("M C O {table}");
    let args = TableArgs::parse(&Word::list(&words))?;
    let [metadata, cache, origin] = disks.clone();
    View::open(&args, words, len_bytes, Devices { metadata, cache, origin })
}

/// Carries out one bio.
fn carried_out(view: &View, bio: Bio) -> Bio {
    let (mut port, mut ring) = (Port::new(0), Ring::without_kernel());
    view.submit(bio, &mut port);
    loop {
        if let Some(done) = port.done.pop_front() {
            return done;
        }
        for io in port.ios.drain(..) {
            assert_eq!(io.op, Op::Read, "an I/O other than a read");
            io.disk.clone().start(io, &mut ring);
        }
        while let Some(io) = ring.pop_completed() {
            view.complete(io, &mut port);
        }
    }
}

fn read(view: &View, at: u64, len: u64) -> std::result::Result<Vec<u8>, Status> {
    let done = carried_out(view, Bio::read(at, Buffer::zeroed(len as usize), 0));
    done.status.map(|()| done.buffer.as_slice().to_vec())
}

fn notes(view: &View) -> Vec<String> {
    let notes = view.facts().into_iter().filter(|fact| fact.name == "attach_note");
    let text = |value| if let FactValue::Text(text) = value { text } else { panic!("no text") };
    notes.map(|fact| text(fact.value)).collect()
}

/// Disks of which slot `nth` holds as many times the byte 0x40 + `nth`, block `nth` of the origin
/// 0x80 + `nth`; slot 1 holds block 4, slot 2 block 3, which is dirty.
fn crafted(flags: &[u32]) -> [Arc<SimDisk>; 3] {
    let disks = disks(4, ORIGIN);
    let fill = |disk: &SimDisk, nth: u64, byte: u8| disk.poke(nth * BLOCK, &[byte; BLOCK as usize]);
    (0..4).for_each(|nth| fill(&disks[1], nth, 0x40 + nth as u8));
    (0..6).for_each(|nth| fill(&disks[2], nth, 0x80 + nth as u8));
    let mut contents = Contents::empty(4);
    contents.mappings[1] = mapping(Some(4));
    contents.mappings[2] = mapping(Some(3));
    contents.dirty.set(2);
    let mut superblock = Superblock::fresh(2, 64);
    flags.iter().for_each(|flag| superblock.put_flag(*flag, true));
    let metadata: Arc<dyn Disk> = disks[0].clone();
    write_whole(&metadata, superblock, &contents).unwrap();
    disks
}

#[test]
fn what_is_dirty_is_the_caches_and_the_rest_the_origins() {
    let disks = crafted(&[CLEAN_SHUTDOWN]);
    let before = disks.clone().map(|disk| disk.image());
    let view = view_of(&disks, TABLE, ORIGIN).unwrap();
    assert!(view.is_read_only() && notes(&view).is_empty());
    assert_eq!(view.status(), format!("read-only {BLOCK} 0"));
    let all = read(&view, 0, ORIGIN).unwrap();
    for (nth, block) in all.chunks(BLOCK as usize).enumerate() {
        let expected = [0x80, 0x81, 0x82, 0x42, 0x84, 0x85, 0][nth];
        assert!(block.iter().all(|byte| *byte == expected), "block {nth}");
    }
    let edge = read(&view, 3 * BLOCK - 512, 1024).unwrap();
    assert_eq!((edge[0], edge[512]), (0x82, 0x42));
    for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
        let bio = match op {
            Op::Write => Bio::write(0, Buffer::zeroed(512), false, 0),
            op => Bio::bare(op, 0, 512, false, 0),
        };
        assert_eq!(carried_out(&view, bio).status, Err(Status::ReadOnly));
    }
    assert!(carried_out(&view, Bio::flush(0)).status.is_ok());
    assert!(disks.map(|disk| disk.image()) == before);
}

#[test]
fn without_a_clean_shutdown_everything_is_dirty_and_a_mark_is_no_reason_to_refuse() {
    let disks = crafted(&[NEEDS_CHECK]);
    let view = view_of(&disks, TABLE, ORIGIN).unwrap();
    let notes = notes(&view);
    assert!(notes[0].contains("the metadata has the needs-check flag"), "{notes:?}");
    assert!(notes[1].contains("every block in it counts as dirty"), "{notes:?}");
    assert_eq!(read(&view, 4 * BLOCK, 512).unwrap()[0], 0x41);
    let mut fixture = Fixture::new(TABLE, disks);
    assert!(fixture.try_open().is_err(), "a mark keeps others from writing");
}

#[test]
fn what_a_shorter_cache_device_lost_cannot_be_read() {
    let mut disks = crafted(&[CLEAN_SHUTDOWN]);
    disks[1] = Arc::new(SimDisk::new(2 * BLOCK, 512).named("cache"));
    let view = view_of(&disks, TABLE, ORIGIN).unwrap();
    assert_eq!(view.status(), format!("read-only 0 {BLOCK}"));
    assert_eq!(read(&view, 3 * BLOCK, 512), Err(Status::Io));
    assert_eq!(read(&view, 2 * BLOCK, 2 * BLOCK), Err(Status::Io));
    assert_eq!(read(&view, 4 * BLOCK, 512).unwrap()[0], 0x84);
}

#[test]
fn what_is_no_cache_or_another_one_is_refused() {
    let refused = |disks: &[Arc<SimDisk>; 3], table: &str, len: u64| {
        view_of(disks, table, len).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let blank = disks(4, ORIGIN);
    let line = refused(&blank, TABLE, ORIGIN);
    assert!(line.contains("the device is not formatted"), "{line}");
    assert!(blank[0].image().iter().all(|byte| *byte == 0));
    let disks = crafted(&[CLEAN_SHUTDOWN]);
    assert!(refused(&disks, "128 0 smq 0", ORIGIN).contains("blocks of 64 sectors, not 128"));
    assert!(refused(&disks, TABLE, ORIGIN + 512).contains("the table is"));
    // Once it was served, it is known whose it is.
    let mut fixture = Fixture::new(TABLE, disks.clone());
    fixture.open();
    fixture.remove();
    let mut others = disks;
    others[2] = Arc::new(SimDisk::new(ORIGIN, 512).named("another"));
    assert!(refused(&others, TABLE, ORIGIN).contains("belongs to another origin"));
    view_of(&others, &format!("{TABLE} rebind true"), ORIGIN).unwrap();
}
