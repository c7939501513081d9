//! The interface of a target for the machine, the judge and the explorer: how it is opened, the
//! medium of its cache, and the checks in addition to the clients' view.

use std::fmt::Debug;
use std::sync::Arc;

use udm::pmem::Persistence;
use udm::shm::{SharedStore, SharedWords};
use udm::target::Target;

use crate::elsewhere::What;
use crate::machine::Origin;
use crate::model::Model;
use crate::sim::{LINE, SimMedium};
use crate::ssd::Ssds;

/// The kind of a cache's medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    Memory(Persistence),
    Disk,
}

impl Ground {
    pub fn persistence(self) -> Persistence {
        match self {
            Ground::Memory(persistence) => persistence,
            Ground::Disk => Persistence::Cpu,
        }
    }

    /// Bytes that a crash keeps or loses as a unit.
    pub fn line(self) -> usize {
        if self == Ground::Disk { 512 } else { LINE }
    }
}

/// The devices of a server.
#[derive(Clone, Debug)]
pub struct Devices {
    pub sim: Arc<SimMedium>,
    /// The same content, as disks.
    pub ssds: Ssds,
    pub origin: Arc<Origin>,
    pub shared: SharedWords,
    /// The memory lies where servers before this version kept it.
    pub is_old: bool,
}

impl Devices {
    /// The devices of a server of this kind.
    pub fn new(kind: &dyn Kind, sim: &Arc<SimMedium>, shared: SharedWords) -> Devices {
        let metadata = kind.metadata_bytes();
        Devices {
            sim: sim.clone(),
            ssds: Ssds::new(sim, kind.device_bytes() - metadata, metadata),
            origin: Origin::named("origin", sim),
            shared,
            is_old: false,
        }
    }

    pub fn shared_store(&self) -> SharedStore {
        match self.is_old {
            true => SharedStore::old(self.shared.clone()),
            false => self.shared.clone().into(),
        }
    }
}

/// When requests go to the origin alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassesBy {
    Never,
    /// In the mode `cleaner`, and discards.
    Sometimes,
    /// All blocks that the cache does not have.
    Always,
}

/// Who opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Server,
    /// A server that formats whatever there is.
    Formatter,
    /// The judge, who wants to see what is there, and no more.
    Judge,
}

/// A target that runs.
pub trait Subject: Target {
    /// Whether the target reports that the origin alone is consistent.
    fn is_origin_consistent(&self) -> bool;

    /// Whether it has read all that the cache says.
    fn is_complete(&self) -> bool;
}

/// A target to explore, with its table and its geometry.
pub trait Kind: Debug + Send + Sync {
    /// Bytes of the cache's medium, all of it.
    fn device_bytes(&self) -> usize;

    /// Those at the end of it that a second disk has.
    fn metadata_bytes(&self) -> usize {
        0
    }

    fn ground(&self) -> Ground;

    /// Sectors of the smallest request.
    fn block_slots(&self) -> usize {
        1
    }

    /// When requests pass the cache by.
    fn passes_by(&self) -> PassesBy;

    /// Bytes of the blocks that are copied as a whole, or 0. The explorer knows only a part of such
    /// a block; the rest is zeroes.
    fn copied_bytes(&self) -> u64 {
        0
    }

    /// How many words of shared memory it has. Without any, `owner_words` are not asked for.
    fn shared_words(&self) -> usize;

    /// The words of shared memory that name the attaches to which it belongs: the one that has
    /// it, and the one that is taking it over.
    fn owner_words(&self) -> [u32; 2];

    fn open(&self, devices: Devices, attaches: u64, who: Who) -> Result<Box<dyn Subject>, String>;

    /// Whether a cache without any data still belongs to its origin.
    fn binds_empty(&self) -> bool;

    /// Whether something stored there is worth a look at the medium.
    fn is_telling(&self, at: u32) -> bool;

    /// Looks at the medium without attaching.
    fn look(&self, sim: &Arc<SimMedium>, model: &Model, is_power_cut: bool) -> Result<(), String>;

    /// Looks at the attached target.
    fn check(&self, subject: &dyn Subject, model: &Model) -> Result<(), String>;

    /// Another program has the cache for a while. Returns the slots that got new versions, in
    /// order.
    fn elsewhere(
        &self,
        sim: &SimMedium,
        what: What,
        model: &mut Model,
        origin: &[u64],
    ) -> Vec<(usize, u64)>;
}
