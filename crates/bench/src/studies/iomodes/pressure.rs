//! A memory cgroup for this process, so that files are larger than the memory they may use.

use std::fs;
use std::path::{Path, PathBuf};

/// A limit for the process's memory while this value lives; then the process returns to its old
/// group.
#[derive(Debug)]
pub struct Pressure {
    group: PathBuf,
    before: PathBuf,
}

impl Pressure {
    /// Lets this process, with its page cache, have `bytes`. An error says in words why not.
    pub fn of(bytes: u64) -> Result<Pressure, String> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let (before, limit) =
            find(&own, &mounts).ok_or("this process is not in a memory cgroup")?;
        let group = before.join(format!("udm-bench-{}", std::process::id()));
        let say = |what: &Path, error: std::io::Error| format!("{}: {error}", what.display());
        fs::create_dir(&group).map_err(|error| say(&group, error))?;
        let pressure = Pressure { group, before };
        let limit = pressure.group.join(limit);
        fs::write(&limit, bytes.to_string()).map_err(|error| say(&limit, error))?;
        // Version 1 does not slow writers down: it kills them, if all that it could free is still
        // on its way to the disk. They are to wait for that instead. Version 2 has no such file.
        let kills = pressure.group.join("memory.oom_control");
        if kills.exists() {
            fs::write(&kills, "1").map_err(|error| say(&kills, error))?;
        }
        let procs = pressure.group.join("cgroup.procs");
        fs::write(&procs, std::process::id().to_string()).map_err(|error| say(&procs, error))?;
        Ok(pressure)
    }
}

impl Drop for Pressure {
    fn drop(&mut self) {
        let _ = fs::write(self.before.join("cgroup.procs"), std::process::id().to_string());
        let _ = fs::remove_dir(&self.group);
    }
}

/// The folder of this process' memory cgroup, and the name of its limit: version 1, else 2.
fn find(own: &str, mounts: &str) -> Option<(PathBuf, &'static str)> {
    let mount = |is_meant: &dyn Fn(&str, &str) -> bool| {
        mounts.lines().find_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let [_, place, kind, options, ..] = words.as_slice() else { return None };
            is_meant(kind, options).then(|| PathBuf::from(place))
        })
    };
    let path = |is_meant: &dyn Fn(&str) -> bool| {
        own.lines().find_map(|line| {
            let mut words = line.splitn(3, ':');
            let (_, controllers, path) = (words.next()?, words.next()?, words.next()?);
            is_meant(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let is_memory = |list: &str| list.split(',').any(|word| word == "memory");
    let first = mount(&|kind, options| kind == "cgroup" && is_memory(options));
    if let (Some(mount), Some(path)) = (first, path(&is_memory)) {
        return Some((mount.join(path), "memory.limit_in_bytes"));
    }
    let second = mount(&|kind, _| kind == "cgroup2")?;
    Some((second.join(path(&str::is_empty)?), "memory.max"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_of_cgroups_are_found() {
        let first = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                     cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0";
        let own = "9:memory:/a/b\n0::/c";
        assert_eq!(
            find(own, first),
            Some((PathBuf::from("/sys/fs/cgroup/memory/a/b"), "memory.limit_in_bytes"))
        );
        let second = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0";
        assert_eq!(
            find("0::/user.slice", second),
            Some((PathBuf::from("/sys/fs/cgroup/user.slice"), "memory.max"))
        );
        assert_eq!(find("0::/", "tmpfs /tmp tmpfs rw 0 0"), None);
    }
}
