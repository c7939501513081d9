//! Serves memory through the linear target over NBD until its standard input ends:
//! `cargo run --release --example serve_memory -- nbd+unix:///tmp/memory.sock 1024`.

use std::io::Read;

use udm::device::{Device, LoadedTable};
use udm::disk::RamDisk;
use udm::simple::{Linear, LinearArgs};
use udm::sync::Arc;
use udm::table::Table;
use udm::units::{MIB, SECTOR};
use udm_export::nbd::{Server, Uri};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let uri: Uri = args.next().ok_or("usage: serve_memory URI MIB")?.parse()?;
    let size_bytes = args.next().map_or(Ok(1024), |mib| mib.parse::<u64>())? * MIB;
    let table = Table::parse(&format!("0 {} linear memory 0", size_bytes / SECTOR))?;
    let disk = Arc::new(RamDisk::new(size_bytes, 512));
    let linear = Linear::new(&LinearArgs::parse(&table.lines[0].args)?, size_bytes, disk)?;
    let device = Device::with_table("memory", LoadedTable::single(Arc::new(linear), size_bytes))?;
    let server = Server::start(&device, &uri)?;
    println!("{}", server.uri().for_clients());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    println!("{:?}", server.connections());
    server.stop();
    Ok(())
}
