//! The features that the machine and this user's process offer to all devices.

use anyhow::Result;
use rustix::process::{Resource, getrlimit};
use udm::pmem::copy::{CAN_FLUSH, Primitive};
use udm::shm::SharedWords;
use udm::units::human_bytes;
use udm_export::check::{self, Check, file_system};

use crate::runtime::RuntimeDir;

/// Words of the memory that is tested.
const WORDS: usize = 512;

/// The advice for a user without a runtime directory.
pub const NO_DIRECTORY: &str = "set UDM_RUNTIME_DIR to a directory that only this user can enter";

/// A device in the process of a program, which needs no export.
pub fn in_process(io_uring: &Check) -> Check {
    let name = "libudm";
    match io_uring.works {
        true => Check::good(name, "udm_open() serves a device in the program's own process"),
        false => Check { name, ..io_uring.clone() },
    }
}

/// All checks that do not concern a single device.
pub fn look(io_uring: Check, runtime: &Result<RuntimeDir>) -> Vec<Check> {
    vec![io_uring, runtime_directory(runtime), flushing(), check::huge_pages(), locked_memory()]
}

/// The check of the place where acknowledged, unflushed writes outlive a server.
fn runtime_directory(runtime: &Result<RuntimeDir>) -> Check {
    let name = "shared memory";
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            return Check::refused(name, &format!("{error:#}")).or(NO_DIRECTORY);
        }
    };
    let path = runtime.path().join(format!("doctor-{}.memory", std::process::id()));
    let place = format!("{} on {}", runtime.path().display(), file_system(runtime.path()));
    let made = SharedWords::create(&path, WORDS).map(|words| {
        words.remove();
        format!(
            "{place}: unflushed writes survive a killed server, but not a reboot or a power cut; \
             flushed writes are on the medium"
        )
    });
    Check::of(name, made)
}

/// The check of the CPU's instructions that make stores to persistent memory durable.
fn flushing() -> Check {
    let name = "store and flush";
    let all = Primitive::available().into_iter().filter(|primitive| primitive.is_durable());
    let names: Vec<&str> = all.map(Primitive::name).collect();
    if CAN_FLUSH && !names.is_empty() {
        return Check::good(name, format!("this processor has {}", names.join(", ")));
    }
    Check::bad(name, "no instruction of this processor is known to make stores leave its caches")
        .or("caches in memory are made durable by msync")
}

/// The check of the memory that this user's processes may lock.
fn locked_memory() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or_else(|| "no limit".to_owned(), human_bytes);
    Check::good("locked memory", format!("{limit}; udm locks none"))
}
