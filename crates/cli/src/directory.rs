//! Whether a directory is ours alone: files put into it can command servers.
//!
//! 1. udm never changes an existing directory: if other users may enter it, udm refuses it, because
//!    it may be `/tmp`, named by mistake.
//! 2. The directory belongs to this user, even if this user is root: another owner could open it
//!    again, and put files into it.
//! 3. The path leads to the directory for every process: its last component is not a link, and no
//!    directory or link above it can be replaced by another user. A directory above it that others
//!    may write counts as safe if it is sticky, as `/tmp` is: there, only an entry's owner renames
//!    or removes it.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{Mode, OFlags};

/// Rights of others than the owner.
const OTHERS: u32 = 0o077;
/// Rights of others than the owner to add, rename and remove entries.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Opens the directory at `path`, which is absolute, and makes it if there is none.
pub fn open_own(path: &Path) -> Result<File> {
    let user = rustix::process::geteuid().as_raw();
    let parent = path.parent().context("it is the root of the file system")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(parent)
        .with_context(|| format!("make {}", parent.display()))?;
    check_way(parent, user, OTHERS_WRITE, "set UDM_RUNTIME_DIR to a directory elsewhere")?;
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error)?,
        _ => {}
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let handle = File::from(opened.map_err(|errno| {
        let is_link = fs::symlink_metadata(path).is_ok_and(|there| there.is_symlink());
        match is_link {
            true => anyhow::anyhow!("it is a symbolic link; name the directory that it points to"),
            false => std::io::Error::from(errno).into(),
        }
    })?);
    check_rights(&handle.metadata()?, path, user)?;
    Ok(handle)
}

/// Checks the directory itself: ours, and closed to others.
fn check_rights(meta: &Metadata, path: &Path, user: u32) -> Result<()> {
    let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
    if owner != user {
        bail!(
            "it belongs to user {owner}, and this is user {user}; \
             set UDM_RUNTIME_DIR to a directory of user {user}"
        );
    }
    if mode & OTHERS != 0 {
        bail!(
            "other users may enter it (mode {mode:04o}); if only udm uses it, `chmod 700 {}`, else \
             set UDM_RUNTIME_DIR to a separate directory",
            path.display()
        );
    }
    Ok(())
}

/// Checks that other users cannot change the path to the directory `parent`, as given and resolved.
/// `others`: their rights to write. `advice` ends the error.
pub fn check_way(parent: &Path, user: u32, others: u32, advice: &str) -> Result<()> {
    let real = fs::canonicalize(parent).with_context(|| parent.display().to_string())?;
    let is_trusted = |owner: u32| owner == 0 || owner == user;
    let mut places: Vec<PathBuf> = parent.ancestors().map(Path::to_owned).collect();
    places.extend(real.ancestors().map(Path::to_owned));
    for place in places {
        let shown = place.display();
        let link = fs::symlink_metadata(&place).with_context(|| shown.to_string())?;
        if link.is_symlink() && !is_trusted(link.uid()) {
            let owner = link.uid();
            bail!("{shown} on its path is a symbolic link of user {owner}; {advice}");
        }
        let meta = fs::metadata(&place).with_context(|| shown.to_string())?;
        if !is_trusted(meta.uid()) {
            let owner = meta.uid();
            bail!("{shown} above it belongs to user {owner}, who can replace it; {advice}");
        }
        let mode = meta.mode() & 0o7777;
        if mode & others != 0 && mode & STICKY == 0 {
            bail!("other users may write {shown} above it (mode {mode:04o}); {advice}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn refusal(path: &Path) -> String {
        format!("{:#}", open_own(path).unwrap_err())
    }

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_new_one_is_closed_and_an_open_one_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let new = folder.path().join("a/b/udm");
        open_own(&new).unwrap();
        assert_eq!((mode_of(&new), mode_of(new.parent().unwrap())), (0o700, 0o700));
        for mode in [0o1777, 0o755, 0o710, 0o701, 0o2770] {
            set_mode(&new, mode);
            let text = refusal(&new);
            assert!(text.contains(&format!("mode {mode:04o}")) && text.contains("chmod 700"));
            assert_eq!(mode_of(&new), mode, "{text}");
        }
        set_mode(&new, 0o500);
        open_own(&new).unwrap();
    }

    #[test]
    fn links_and_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (own, link) = (folder.path().join("own"), folder.path().join("link"));
        open_own(&own).unwrap();
        symlink(&own, &link).unwrap();
        assert!(refusal(&link).contains("symbolic link"), "{}", refusal(&link));
        // A link above the directory is trusted if its owner is.
        open_own(&link.join("udm")).unwrap();
        assert!(own.join("udm").is_dir());
        fs::write(folder.path().join("file"), "").unwrap();
        assert!(refusal(&folder.path().join("file")).contains("Not a directory"));
    }

    #[test]
    fn whoever_may_write_above_it_could_replace_it() {
        let folder = tempfile::tempdir().unwrap();
        let above = folder.path().join("above");
        open_own(&above.join("udm")).unwrap();
        set_mode(&above, 0o777);
        let text = refusal(&above.join("udm"));
        assert!(text.contains("above it (mode 0777)"), "{text}");
        set_mode(&above, 0o1777);
        open_own(&above.join("udm")).unwrap();
        // The same if only a link leads to the directory.
        set_mode(&above, 0o775);
        symlink(&above, folder.path().join("link")).unwrap();
        assert!(refusal(&folder.path().join("link/udm")).contains("mode 0775"));
    }

    #[test]
    fn root_refuses_what_belongs_to_others() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join("theirs");
        open_own(&theirs).unwrap();
        let ours = theirs.join("udm");
        open_own(&ours).unwrap();
        std::os::unix::fs::chown(&theirs, Some(1234), None).unwrap();
        assert!(refusal(&theirs).contains("belongs to user 1234, and this is user 0"));
        assert!(refusal(&ours).contains("above it belongs to user 1234, who can replace it"));
        symlink(folder.path(), folder.path().join("link")).unwrap();
        std::os::unix::fs::lchown(folder.path().join("link"), Some(1234), None).unwrap();
        assert!(
            refusal(&folder.path().join("link/udm")).contains("is a symbolic link of user 1234")
        );
    }
}
