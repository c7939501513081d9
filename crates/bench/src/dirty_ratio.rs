//! The kernel's limits for dirty memory, above which writers wait or the kernel begins to write
//! out: reads the current limits, and sets others for one run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::cleanup::Afterwards;

/// Where the kernel has its settings.
const FOLDER: &str = "/proc/sys/vm";
/// Writers wait; write-out begins. Each is a ratio, or bytes if those are not 0.
const SETTINGS: [(&str, &str); 2] =
    [("dirty_ratio", "dirty_bytes"), ("dirty_background_ratio", "dirty_background_bytes")];

/// Other ratios, until this is dropped or the process is gone.
#[derive(Debug)]
pub struct DirtyRatio {
    _put_back: Afterwards,
}

impl DirtyRatio {
    /// Lets writers wait when `percent` of memory is dirty, and begins to write out at half of it.
    pub fn set(percent: u32) -> Result<DirtyRatio> {
        DirtyRatio::set_in(Path::new(FOLDER), percent)
    }

    fn set_in(folder: &Path, percent: u32) -> Result<DirtyRatio> {
        let mut words = Vec::new();
        for (ratio, bytes) in SETTINGS {
            let [ratio, bytes] = [folder.join(ratio), folder.join(bytes)];
            let (was_ratio, was_bytes) = (read(&ratio)?, read(&bytes)?);
            // Whichever of the two is written makes the other one 0.
            let (path, value) =
                if was_bytes == 0 { (ratio, was_ratio) } else { (bytes, was_bytes) };
            words.extend([path.into_os_string(), value.to_string().into()]);
        }
        let put_back = Afterwards::write(&words)?;
        for ((ratio, _), percent) in SETTINGS.iter().zip([percent, percent / 2]) {
            let path = folder.join(ratio);
            fs::write(&path, percent.to_string()).with_context(|| {
                format!("cannot set {}: --dirty-ratio is for root", path.display())
            })?;
        }
        let is_set = read(&folder.join(SETTINGS[0].0))?;
        ensure!(
            is_set == u64::from(percent),
            "the kernel made {is_set} of --dirty-ratio {percent}"
        );
        Ok(DirtyRatio { _put_back: put_back })
    }
}

/// The current setting, in words.
pub fn in_words() -> String {
    in_words_of(Path::new(FOLDER))
}

fn in_words_of(folder: &Path) -> String {
    let one = |(ratio, bytes): (&str, &str)| {
        let path = |name: &str| -> PathBuf { folder.join(name) };
        match (read(&path(bytes)), read(&path(ratio))) {
            (Ok(0), Ok(percent)) => format!("{percent} %"),
            (Ok(bytes), _) => format!("{bytes} bytes"),
            _ => "unknown".into(),
        }
    };
    let [waits, begins] = SETTINGS.map(one);
    format!("writers wait at {waits} of memory, write-out begins at {begins}")
}

fn read(path: &Path) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    text.trim().parse().with_context(|| format!("{}: {text:?}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings as the kernel shows them: writers' ratio and bytes, the background's.
    fn settings(values: [u64; 4]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let names = SETTINGS.iter().flat_map(|(ratio, bytes)| [ratio, bytes]);
        for (name, value) in names.zip(values) {
            fs::write(folder.path().join(name), format!("{value}\n")).unwrap();
        }
        folder
    }

    fn now(folder: &tempfile::TempDir) -> [u64; 4] {
        let [one, two] = SETTINGS;
        [one.0, one.1, two.0, two.1].map(|name| read(&folder.path().join(name)).unwrap())
    }

    #[test]
    fn ratios_are_put_back_when_all_went_well_and_when_it_did_not() {
        let folder = settings([20, 0, 10, 0]);
        let set = DirtyRatio::set_in(folder.path(), 40).unwrap();
        assert_eq!(now(&folder), [40, 0, 20, 0]);
        drop(set);
        assert_eq!(now(&folder), [20, 0, 10, 0]);
        let panics = std::panic::catch_unwind(|| {
            let _set = DirtyRatio::set_in(folder.path(), 6).unwrap();
            assert_eq!(now(&folder), [6, 0, 3, 0]);
            std::panic::resume_unwind(Box::new("a study goes wrong"));
        });
        assert!(panics.is_err());
        assert_eq!(now(&folder), [20, 0, 10, 0]);
    }

    #[test]
    fn bytes_that_were_set_are_put_back_as_bytes() {
        let folder = settings([0, 1 << 28, 10, 0]);
        drop(DirtyRatio::set_in(folder.path(), 40).unwrap());
        // The kernel itself sets the ratio to 0 then; this folder simulates the files only.
        assert_eq!(now(&folder), [40, 1 << 28, 10, 0]);
        let text = in_words_of(folder.path());
        assert_eq!(text, "writers wait at 268435456 bytes of memory, write-out begins at 10 %");
        // A failure in the middle leaves what was there.
        let folder = settings([20, 0, 10, 0]);
        fs::remove_file(folder.path().join("dirty_background_bytes")).unwrap();
        assert!(DirtyRatio::set_in(folder.path(), 40).is_err());
        assert_eq!(read(&folder.path().join("dirty_ratio")).unwrap(), 20);
    }
}
