//! The arguments of `export` and `unexport`.

use clap::Args;
use udm_export::FORMS;

use super::JsonArgs;
use crate::runtime::DeviceName;

/// Arguments of `export`.
#[derive(Debug, Args)]
#[command(after_help = "Choose the export for the client:
  a virtual machine       vhost-user:///PATH: rings in the guest's memory, one thread per ring
  a program in C          vhost-user, with udm_connect() of libudm; or no export, with udm_open()
  a mount on this host    ublk: creates /dev/ublkbN (as root, after `modprobe ublk_drv`); without
                          ublk, nbd+unix:///PATH and nbd-client
  another host            nbds://ADDR:PORT?tls=FOLDER: NBD over TLS

vhost-user polls a ring briefly before it sleeps, while polls find requests; at most 10 % of the
time goes into polls that find none (`udm info` prints the times). ?poll=never sleeps immediately;
?poll=always never sleeps and occupies one processor per ring. NBD also takes ?poll=never.
vhost-user serves one client at a time; ?shared serves several, which must coordinate their writes.

ublk:N?queues=Q&depth=D sets the number of the disk, the number of queues, and the number of
requests per queue. If the server is killed, the disk waits for the next server: run the same `udm
create` again, or `udm export` with the same disk. ?shared=FILE (Linux 7.1) names a file on tmpfs or
hugetlbfs in which clients with direct I/O keep their data (fio --mem=mmapshared:FILE): the server
copies from and to this file without a system call. Give the file its final length first.

Examples:
  udm export vol ublk:
  udm export vol 'ublk:?shared=/dev/shm/buffers'
  udm export vol nbd://127.0.0.1:10809
  udm export vol nbd://127.0.0.1:10809/vol      at an address that several devices share
  udm export vol 'nbds://0.0.0.0:10809?tls=/etc/udm/pki'
  udm export vol vhost-user:///run/udm/vol.vhost")]
pub struct ExportArgs {
    /// The device's name
    pub name: DeviceName,
    /// The address for clients.
    #[arg(help = FORMS)]
    pub uri: String,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `unexport`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  udm unexport vol nbd://127.0.0.1:10809")]
pub struct UnexportArgs {
    /// The device's name
    pub name: DeviceName,
    /// The export, as `udm info` prints it
    pub uri: String,
    /// Close the export even if clients are connected
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}
