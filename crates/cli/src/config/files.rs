//! The files themselves: their folder, the rights that they need, and their names in messages.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{Mode, OFlags};
use udm::units::human_bytes;

use super::{Config, parse};
use crate::directory;
use crate::runtime::DeviceName;

/// The folder of the files that are used if none is named. The systemd units always use it.
pub const FOLDER: &str = "/etc/udm";
/// The extension of a configuration file's name.
pub const EXTENSION: &str = "conf";
/// The right of users other than the owner and its group.
const OTHERS_WRITE: u32 = 0o002;
/// A longer file is refused.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The folder of the files: `$UDM_CONFIG_DIR`, else `/etc/udm`.
pub fn folder() -> PathBuf {
    let own = std::env::var_os("UDM_CONFIG_DIR").filter(|folder| !folder.is_empty());
    own.map_or_else(|| FOLDER.into(), PathBuf::from)
}

/// The file of a device, if none is named.
pub fn file_of(name: &DeviceName) -> PathBuf {
    folder().join(format!("{name}.{EXTENSION}"))
}

/// A path for messages: its control characters are escaped.
pub fn shown(path: &Path) -> String {
    escaped(&path.display().to_string())
}

/// A text without control characters.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c.is_control() {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
    }
    escaped
}

/// The text of a file.
pub fn text_of(path: &Path) -> Result<String> {
    // The open of a FIFO would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let meta = file.metadata()?;
    if !meta.is_file() {
        bail!("not a regular file");
    }
    check_rights(path, &meta)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        bail!("longer than {}", human_bytes(FILE_BYTES_MAX));
    }
    String::from_utf8(bytes).map_err(|_| anyhow!("not UTF-8 text"))
}

/// An error if another user than this one and root may change or replace the file.
fn check_rights(path: &Path, meta: &Metadata) -> Result<()> {
    let user = rustix::process::geteuid().as_raw();
    if meta.uid() != 0 && meta.uid() != user {
        bail!("it belongs to user {}, who can change it", meta.uid());
    }
    if meta.mode() & OTHERS_WRITE != 0 {
        bail!("any user may change it: `chmod o-w {}`", shown(path));
    }
    for file in [std::path::absolute(path)?, path.canonicalize()?] {
        let parent = file.parent().unwrap_or(Path::new("/"));
        directory::check_way(parent, user, OTHERS_WRITE, "put the file elsewhere")?;
    }
    Ok(())
}

/// The configuration in the file at `path`; its first mistake is the error.
pub fn read(path: &Path) -> Result<Config> {
    let text = text_of(path).with_context(|| shown(path))?;
    parse(&text).map_err(|mistakes| {
        let more = match mistakes.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more: `udm check-config {}`)", shown(path)),
        };
        anyhow!("{}:{}{more}", shown(path), mistakes[0])
    })
}

/// The name of the device that the file at `path` describes.
pub fn name_of(path: &Path) -> Result<DeviceName> {
    let place = || format!("{}: a configuration file is named NAME.{EXTENSION}", shown(path));
    let is_named = path.extension().is_some_and(|extension| extension == EXTENSION);
    let stem = path.file_stem().and_then(|stem| stem.to_str()).filter(|_| is_named);
    let stem = stem.with_context(place)?;
    stem.parse().map_err(|why: String| anyhow!("{}: {why}", place()))
}

/// The configuration files in `folder`, in the order of their names. A missing folder is empty.
pub fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| shown(folder))?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = paths.collect::<std::io::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_name_is_the_files() {
        assert_eq!(name_of(Path::new("/etc/udm/vol-1.conf")).unwrap().as_str(), "vol-1");
        for wrong in ["/etc/udm/vol", "/etc/udm/.conf", "/etc/udm/a b.conf", "/etc/udm/vol.toml"] {
            assert!(name_of(Path::new(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_of_files_do_not_forge_lines() {
        assert_eq!(shown(Path::new("/etc/udm/a b.conf")), "/etc/udm/a b.conf");
        let path = Path::new("/etc/udm/x\n/etc/udm/y.conf: correct\u{1b}[2J");
        assert_eq!(shown(path), "/etc/udm/x\\n/etc/udm/y.conf: correct\\u{1b}[2J");
    }
}
