//! What the machine, the judge and the explorer need to know of a target: how it is opened, what
//! its cache stands on, and what is looked at beside what clients see.

use std::fmt::Debug;
use std::sync::Arc;

use udm::pmem::Persistence;
use udm::shm::{Keeper, SharedWords};
use udm::target::Target;

use crate::elsewhere::What;
use crate::machine::Origin;
use crate::model::Model;
use crate::ssd::Ssd;
use crate::twin::{LINE, Twin};

/// What a cache stands on.
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

/// What a server is opened on.
#[derive(Clone, Debug)]
pub struct Devices {
    pub twin: Arc<Twin>,
    /// The same content, as a disk.
    pub ssd: Arc<Ssd>,
    pub origin: Arc<Origin>,
    pub shared: SharedWords,
    /// The memory lies where servers before this version kept it.
    pub is_old: bool,
}

impl Devices {
    pub fn keeper(&self) -> Keeper {
        match self.is_old {
            true => Keeper::old(self.shared.clone()),
            false => self.shared.clone().into(),
        }
    }
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
    /// Whether it says that the origin alone is consistent.
    fn is_origin_consistent(&self) -> bool;

    /// Whether it has read all that the cache says.
    fn is_complete(&self) -> bool;
}

/// A target to explore, with its table and its geometry.
pub trait Kind: Debug + Send + Sync {
    fn device_bytes(&self) -> usize;

    fn ground(&self) -> Ground;

    /// Sectors of the smallest request.
    fn block_slots(&self) -> usize {
        1
    }

    /// Whether requests may pass the cache by.
    fn passes_by(&self) -> bool;

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
    fn look(&self, twin: &Arc<Twin>, model: &Model, is_power_cut: bool) -> Result<(), String>;

    /// Looks at the attached target.
    fn check(&self, subject: &dyn Subject, model: &Model) -> Result<(), String>;

    /// Somebody else has the cache for a while. Says which slots got new versions, in order.
    fn elsewhere(
        &self,
        twin: &Twin,
        what: What,
        model: &mut Model,
        origin: &[u64],
    ) -> Vec<(usize, u64)>;
}
