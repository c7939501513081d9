//! A cache of a table that has not taken effect. Another cache serves its media until then, so udm
//! checks only properties that cannot change. The cache is opened when the other cache is at rest.
//! Sizes, mode and policy may be others then.

use super::binding::Devices;
use super::{Cache, OpenOptions, TableArgs, open};
use crate::bio::Bio;
use crate::disk::DiskIo;
use crate::error::Result;
use crate::sync::Arc;
use crate::table::Word;
use crate::target::{Port, Target, TargetLimits};

/// A cache that will be opened.
#[derive(Debug)]
pub struct Incoming {
    args: TableArgs,
    len_bytes: u64,
    devices: Devices,
    options: OpenOptions,
}

impl Incoming {
    /// Checks all that can be checked while another cache serves, without writes.
    pub fn new(
        args: TableArgs,
        len_bytes: u64,
        devices: Devices,
        options: OpenOptions,
    ) -> Result<Incoming> {
        open::check(&args, len_bytes, &devices)?;
        Ok(Incoming { args, len_bytes, devices, options })
    }
}

impl Target for Incoming {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn submit(&self, _: Bio, _: &mut Port) {
        unreachable!("it takes effect before anything is asked of it");
    }

    fn complete(&self, _: DiskIo, _: &mut Port) {
        unreachable!("it sends no I/O");
    }

    fn limits(&self) -> TargetLimits {
        super::limits_of(&*self.devices.cache, &*self.devices.origin)
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        let Devices { metadata, cache, origin } = &self.devices;
        let name =
            |disk: &Arc<dyn crate::disk::Disk>| Word::new(&disk.limits().kernel_name).quoted();
        format!("{} {} {} {}", name(metadata), name(cache), name(origin), self.args.words())
    }

    fn take_effect(&self) -> Result<Option<Arc<dyn Target>>> {
        let (args, devices) = (self.args.clone(), self.devices.clone());
        Ok(Some(Arc::new(Cache::open(args, self.len_bytes, devices, self.options.clone())?)))
    }
}
