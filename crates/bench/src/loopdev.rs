//! A block device over a file: a loop device of the kernel, for root. It bypasses the page cache of
//! its file. Otherwise the pages of the file would be counted in addition to its own.
//!
//! The kernel removes the loop device when no process has it open (`LO_FLAGS_AUTOCLEAR`), so even
//! if this process is killed.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const CONTROL: &str = "/dev/loop-control";
/// From linux/loop.h.
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Others may take the free device that the kernel has named: then it names another one.
const TRIES: usize = 32;

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of linux/loop.h.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// A loop device, until this is dropped.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    /// Whether it bypasses the page cache of its file.
    pub is_direct: bool,
    /// The device exists while this file is open.
    _open: File,
}

impl LoopDevice {
    /// Makes one over `file`.
    pub fn over(file: &Path) -> Result<LoopDevice> {
        let open = |path: &Path| {
            let file = File::options().read(true).write(true).open(path);
            file.with_context(|| format!("cannot open {}", path.display()))
        };
        let backing = open(file)?;
        let control = open(Path::new(CONTROL))?;
        for _ in 0..TRIES {
            // SAFETY: the call takes no argument, and the descriptor is open.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(std::io::Error::last_os_error()).context("no free loop device");
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path)?;
            for flags in [LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO, LO_FLAGS_AUTOCLEAR] {
                match configure(&device, &backing, flags) {
                    Ok(()) => {
                        let dio = format!("/sys/block/loop{number}/loop/dio");
                        let dio = fs::read_to_string(dio).unwrap_or_default();
                        let is_direct = dio.trim() == "1";
                        return Ok(LoopDevice { path, is_direct, _open: device });
                    }
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) => break,
                    // Not past the page cache of this file system, then.
                    Err(error) if flags & LO_FLAGS_DIRECT_IO == 0 => {
                        return Err(error).with_context(|| path.display().to_string());
                    }
                    Err(_) => {}
                }
            }
        }
        bail!("others took every loop device first")
    }

    /// Its node.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn configure(device: &File, backing: &File, flags: u32) -> std::io::Result<()> {
    let info = LoopInfo {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        sizelimit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
    let fd = backing.as_raw_fd() as u32;
    let config = LoopConfig { fd, block_size: 0, info, reserved: [0; 8] };
    // SAFETY: the kernel reads a whole loop_config, which this is, and keeps none of it.
    let outcome =
        unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, std::ptr::from_ref(&config)) };
    if outcome < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_structures_have_their_sizes() {
        assert_eq!((size_of::<LoopInfo>(), size_of::<LoopConfig>()), (232, 304));
    }

    #[test]
    fn a_loop_device_is_there_as_long_as_it_is_held() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        File::create(&file).unwrap().set_len(4 << 20).unwrap();
        let device = match LoopDevice::over(&file) {
            Ok(device) => device,
            Err(error) => return eprintln!("SKIPPED: no loop device to be had: {error:#}"),
        };
        let name = device.path().file_name().unwrap().to_str().unwrap().to_owned();
        let backing = format!("/sys/block/{name}/loop/backing_file");
        let is_ours = || {
            let text = fs::read_to_string(&backing).unwrap_or_default();
            Path::new(text.trim()) == file
        };
        assert!(is_ours());
        drop(device);
        assert!(!is_ours(), "the kernel took it apart");
    }
}
