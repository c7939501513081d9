//! What the machine and this user's process offer to all devices.

use anyhow::Result;
use rustix::process::{Resource, getrlimit};
use udm::pmem::copy::{CAN_FLUSH, Primitive};
use udm::shm::SharedWords;
use udm::units::human_bytes;
use udm_bench::machine::file_system;
use udm_export::check::{self, Check};

use crate::runtime::RuntimeDir;

/// Words of the memory that is tried.
const WORDS: usize = 512;

/// What helps a user who has no runtime directory.
pub const NO_DIRECTORY: &str = "set UDM_RUNTIME_DIR to a directory of this user alone";

/// A device in the process of a program, which needs no door.
pub fn in_process(io_uring: &Check) -> Check {
    let name = "libudm";
    match io_uring.works {
        true => Check::good(name, "udm_open() serves a device in the program's own process"),
        false => Check { name, ..io_uring.clone() },
    }
}

/// Everything that belongs to no one device.
pub fn look(io_uring: Check, runtime: &Result<RuntimeDir>) -> Vec<Check> {
    vec![io_uring, runtime_directory(runtime), flushing(), check::huge_pages(), locked_memory()]
}

/// Where what was acknowledged and not flushed outlives a server.
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
            "{place}: what clients did not flush outlives a killed server, but no restart of the \
             machine and no power cut; what they flushed is on the medium"
        )
    });
    Check::of(name, made)
}

/// The instructions by which stores get to memory that keeps its content.
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

/// Memory that this user's processes may lock.
fn locked_memory() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    let limit = limit.map_or_else(|| "no limit".to_owned(), human_bytes);
    Check::good("locked memory", format!("{limit}; udm locks none"))
}
