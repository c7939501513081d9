//! All exports of a device report the same limits, which combine the devices of all its lines.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)]

mod common;
#[path = "common/front.rs"]
mod front;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use front::{Front, USUAL};
use udm::build::{BuildOptions, NamedDevices, build};
use udm::device::Device;
use udm::disk::{Disk, DiskIo, DiskLimits, RamDisk, Ring};
use udm::sync::Arc;
use udm::table::Table;
use udm::topology::{TargetLimits, Topology};
use udm_export::nbd::Server;
use udm_export::ublk::proto::Params;
use udm_export::vhost;
use udm_export::vhost::poll::Poll;

const MIB: u64 = 1 << 20;

/// A disk with a topology.
#[derive(Debug)]
struct Shaped(RamDisk, DiskLimits);

impl Disk for Shaped {
    fn limits(&self) -> &DiskLimits {
        &self.1
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        self.0.start(io, ring);
    }
}

fn disk(block_bytes: u32, units: [u32; 4], has_discard: bool) -> Arc<dyn Disk> {
    let [physical_bytes, minimum_bytes, optimal_bytes, discard_bytes] = units;
    let topology = Topology { physical_bytes, minimum_bytes, optimal_bytes, discard_bytes };
    let ram = RamDisk::new(8 * MIB, block_bytes);
    let limits = DiskLimits { topology, has_discard, ..ram.limits().clone() };
    Arc::new(Shaped(ram, limits))
}

fn device(table: &str) -> Arc<Device> {
    let mut devices = NamedDevices::new();
    devices.add_disk("/plain", disk(512, [0; 4], false));
    devices.add_disk("/512e", disk(512, [4096, 0, 0, 4096], true));
    devices.add_disk("/4kn", disk(4096, [0; 4], true));
    devices.add_disk("/raid", disk(512, [4096, 65536, MIB as u32, 32768], true));
    devices.add_disk("/metadata", Arc::new(RamDisk::new(8 * MIB, 512)));
    let table = Table::parse(table).unwrap();
    let table = build(&table, &devices, &BuildOptions::named(1)).unwrap();
    Device::with_table("limits", table).unwrap()
}

/// The units in bytes, as an export reports them.
#[derive(Debug, PartialEq, Eq)]
struct Reported {
    block: u32,
    physical: u32,
    minimum: u32,
    optimal: u32,
    /// 0 without discards.
    discard: u32,
}

impl Reported {
    fn by_device(limits: TargetLimits) -> Reported {
        Reported {
            block: limits.block_bytes,
            physical: limits.physical_bytes,
            minimum: limits.minimum_bytes,
            optimal: limits.optimal_bytes,
            discard: if limits.has_discard { limits.discard_bytes } else { 0 },
        }
    }

    /// As a driver of virtio-blk reads them.
    fn by_vhost(device: &Arc<Device>) -> Reported {
        const DISCARD: u64 = 1 << 13;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _server = vhost::Server::start(device, &vhost::Uri::new(&path, Poll::Never)).unwrap();
        let mut front = Front::connect(&path);
        front.negotiate(USUAL);
        let has_discard = front.number(1) & DISCARD != 0;
        let config = front.config();
        let word = |at: usize| u32::from_ne_bytes(config[at..at + 4].try_into().unwrap());
        let (block, half) = (word(20), u16::from_ne_bytes(config[26..28].try_into().unwrap()));
        assert_eq!(config[25], 0, "the alignment offset");
        Reported {
            block,
            physical: block << config[24],
            minimum: block * u32::from(half),
            optimal: block * word(28),
            discard: if has_discard { word(44) * 512 } else { 0 },
        }
    }

    /// As the driver of ublk reads them.
    fn by_ublk(device: &Device) -> Reported {
        let params = Params::of(device).bytes();
        let word = |at: usize| u32::from_le_bytes(params[at..at + 4].try_into().unwrap());
        let [block, physical, optimal, minimum] = [12, 13, 14, 15].map(|at| 1 << params[at]);
        let discard = if word(48) > 0 { word(44) } else { 0 };
        assert_eq!(word(40), 0, "the alignment of discards");
        Reported { block, physical, minimum, optimal, discard }
    }
}

/// The smallest and the preferred request that NBD reports, and whether it reports trims.
fn by_nbd(device: &Arc<Device>) -> ([u32; 2], bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let uri = format!("nbd+unix://{}", path.display()).parse().unwrap();
    let server = Server::start(device, &uri).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&1_u32.to_be_bytes()).unwrap();
    // NBD_OPT_GO: the default name, and the request for NBD_INFO_BLOCK_SIZE.
    let go = [&b"IHAVEOPT"[..], &7_u32.to_be_bytes(), &8_u32.to_be_bytes()].concat();
    stream.write_all(&[&go[..], &[0, 0, 0, 0, 0, 1, 0, 3]].concat()).unwrap();
    let (mut blocks, mut has_trim) = (None, false);
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head).unwrap();
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        let mut data = vec![0; word(16) as usize];
        stream.read_exact(&mut data).unwrap();
        match (word(12), data.get(1)) {
            (1, _) => break,
            (3, Some(0)) => has_trim = data[11] & 1 << 5 != 0,
            (3, Some(3)) => {
                let word = |at: usize| u32::from_be_bytes(data[at..at + 4].try_into().unwrap());
                blocks = Some([word(2), word(6)]);
            }
            (3, _) => {}
            (reply, _) => panic!("reply {reply:#x}"),
        }
    }
    server.stop();
    (blocks.unwrap(), has_trim)
}

#[test]
fn all_exports_report_the_limits_of_all_lines() {
    const RAID: [u32; 5] = [512, 4096, 65536, MIB as u32, 32768];
    for (table, expected) in [
        ("0 8192 linear /plain 0", [512, 512, 512, 512, 0]),
        ("0 8192 linear /512e 0", [512, 4096, 4096, 4096, 4096]),
        ("0 8192 linear /4kn 0", [4096; 5]),
        ("0 8192 linear /raid 0", RAID),
        // The largest unit of each kind suits all lines, in any order of the lines.
        ("0 8192 linear /plain 0\n8192 8192 linear /raid 0", RAID),
        ("0 8192 linear /raid 0\n8192 8192 linear /plain 0", RAID),
        ("0 8192 linear /4kn 0\n8192 8192 linear /raid 0", [4096, 4096, 65536, MIB as u32, 32768]),
        // A unit that the start of a line, or of its part of the disk, breaks is not reported.
        ("0 8192 linear /raid 64", [512, 4096, 4096, 4096, 32768]),
        ("0 8192 linear /512e 1", [512; 5]),
        ("0 64 linear /plain 0\n64 8192 linear /raid 0", [512, 4096, 4096, 4096, 32768]),
        // All devices of a target count, and not the metadata.
        (
            "0 8192 cache /metadata /4kn /raid 64 1 writeback smq 0",
            [4096, 4096, 65536, MIB as u32, 32768],
        ),
        ("0 8192 delay /512e 0 0 /raid 0 0", RAID),
    ] {
        let device = device(table);
        let [block, physical, minimum, optimal, discard] = expected;
        let expected = Reported { block, physical, minimum, optimal, discard };
        assert_eq!(Reported::by_device(device.limits()), expected, "{table}");
        assert_eq!(Reported::by_vhost(&device), expected, "{table}: vhost-user");
        assert_eq!(Reported::by_ublk(&device), expected, "{table}: ublk");
        let nbd = ([block, minimum.max(4096)], discard > 0);
        assert_eq!(by_nbd(&device), nbd, "{table}: NBD");
    }
}
