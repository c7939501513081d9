//! Remembers the fastest store instructions for each processor model and kind of medium, in a file
//! of the state directory.
//!
//! 1. If the file does not have an entry for a medium, the medium is [measured](super::calibrate),
//!    and udm adds the result.
//! 2. If the state directory or the space for a scratch file is missing, copies keep the default
//!    plan; this is not an error.
//!
//! The file has one line for each pair, of three fields with tabs between them: the primitives by
//! the lowest size of their class, the kind of medium, the processor.

use std::path::{Path, PathBuf};

use super::calibrate::{candidates, find_plan};
use super::copy::{CAN_FLUSH, COPY_CLASSES, CopyPlan};
use super::dax::DaxPmem;
use super::{Persistence, Pmem};

/// The file within the state directory.
const FILE: &str = "copies";

/// Gives `pmem` the fastest known copy plan, and measures first if none is known. A device other
/// than a file is measured only if `may_store` returns true for it: measuring stores to it.
pub fn tune(pmem: &mut DaxPmem, may_store: fn(&DaxPmem) -> bool) {
    if !CAN_FLUSH || pmem.medium().persistence != Persistence::Cpu {
        return;
    }
    if let Some(folder) = state_dir() {
        tune_from(&folder, pmem, may_store);
    }
}

fn tune_from(folder: &Path, pmem: &mut DaxPmem, may_store: fn(&DaxPmem) -> bool) {
    let key = Key::of(pmem);
    let plan = recall(folder, &key).or_else(|| {
        // A result that cannot be remembered would be measured at every start.
        std::fs::create_dir_all(folder).ok()?;
        let before = pmem.plan();
        let plan = find_plan(pmem, may_store(pmem));
        pmem.set_plan(before);
        remember(folder, &key, &plan?).ok()?;
        plan
    });
    if let Some(plan) = plan {
        pmem.set_plan(plan);
    }
}

/// The processor and the kind of medium that a calibration is valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    cpu: String,
    medium: String,
}

impl Key {
    /// This processor, and the kind of `pmem`.
    pub fn of(pmem: &DaxPmem) -> Key {
        let description = &pmem.medium().description;
        let kind = description.split(':').next().unwrap_or_default();
        Key { cpu: cpu_model(), medium: kind.into() }
    }

    /// The end of a line of the file.
    fn fields(&self) -> String {
        let field = |text: &str| text.replace(['\t', '\n'], " ");
        format!("\t{}\t{}", field(&self.medium), field(&self.cpu))
    }
}

/// The processor's model, with the numbers that tell steppings apart.
fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let part = |name: &str| {
        let value = info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then_some(value.trim())
        });
        value.unwrap_or("?")
    };
    let numbers = ["vendor_id", "cpu family", "model", "stepping"].map(part);
    let [vendor, family, model, stepping] = numbers;
    format!("{} ({vendor} {family}/{model}/{stepping})", part("model name"))
}

/// The directory for results that outlive a restart of the machine, if there is one:
/// `$UDM_STATE_DIR`, else `/var/lib/udm` for root, else the user's own.
pub fn state_dir() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let own = set("UDM_STATE_DIR").map(PathBuf::from);
    let system = rustix::process::getuid().is_root().then(|| PathBuf::from("/var/lib/udm"));
    let user = set("XDG_STATE_HOME").map(|folder| Path::new(&folder).join("udm"));
    let home = set("HOME").map(|folder| Path::new(&folder).join(".local/state/udm"));
    own.or(system).or(user).or(home)
}

/// The lines of the file, without those of `key`.
fn others(text: &str, key: &Key) -> Vec<String> {
    let end = key.fields();
    text.lines().filter(|line| !line.ends_with(&end)).map(str::to_owned).collect()
}

/// The remembered plan. None if it names a primitive that this processor does not have.
fn recall(folder: &Path, key: &Key) -> Option<CopyPlan> {
    let text = std::fs::read_to_string(folder.join(FILE)).ok()?;
    let primitives = text.lines().find_map(|line| line.strip_suffix(&key.fields()))?;
    let candidates = candidates();
    let mut by_class = [CopyPlan::usual().choose(0); COPY_CLASSES];
    let mut words = primitives.split(' ');
    for (class, primitive) in by_class.iter_mut().enumerate() {
        let (size, name) = words.next()?.split_once('=')?;
        if size.parse() != Ok(first_size(class)) {
            return None;
        }
        *primitive = *candidates.iter().find(|candidate| candidate.name() == name)?;
    }
    words.next().is_none().then(|| CopyPlan::new(by_class))
}

/// Keeps a plan for later starts. The path of the file.
pub fn remember(folder: &Path, key: &Key, plan: &CopyPlan) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(folder)?;
    let path = folder.join(FILE);
    let mut lines = others(&std::fs::read_to_string(&path).unwrap_or_default(), key);
    let primitives: Vec<String> = (0..COPY_CLASSES)
        .map(first_size)
        .map(|size| format!("{size}={}", plan.choose(size as usize).name()))
        .collect();
    lines.push(primitives.join(" ") + &key.fields());
    // Another server may be reading: the file appears whole.
    let draft = folder.join(format!(".{FILE}.{}", std::process::id()));
    std::fs::write(&draft, lines.join("\n") + "\n")?;
    std::fs::rename(&draft, &path)?;
    Ok(path)
}

/// The smallest size of a class, in bytes.
fn first_size(class: usize) -> u64 {
    if class == 0 { 0 } else { 32 << class }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::dax::DaxOptions;
    use super::*;

    fn pmem(folder: &Path) -> DaxPmem {
        let path = folder.join("medium");
        File::create(&path).unwrap().set_len(8 << 20).unwrap();
        let options = DaxOptions { persistence: Some(Persistence::Cpu), ..DaxOptions::default() };
        DaxPmem::open(&path, options).unwrap()
    }

    #[test]
    fn a_medium_is_tuned_by_what_is_remembered_or_else_measured() {
        let folder = tempfile::tempdir().unwrap();
        let mut pmem = pmem(folder.path());
        let Some(first) = candidates().first().copied() else { return };
        let state = folder.path().join("state");
        let key = Key::of(&pmem);
        remember(&state, &key, &CopyPlan::only(first)).unwrap();
        tune_from(&state, &mut pmem, |_| false);
        assert_eq!(pmem.plan(), CopyPlan::only(first));
        std::fs::remove_dir_all(&state).unwrap();
        tune_from(&state, &mut pmem, |_| false);
        assert_eq!(recall(&state, &key), Some(pmem.plan()));
    }

    #[test]
    fn plans_are_remembered_by_processor_and_medium() {
        let folder = tempfile::tempdir().unwrap();
        let key = |medium: &str| Key { cpu: "c".into(), medium: medium.into() };
        let Some(first) = candidates().first().copied() else { return };
        let plan = CopyPlan::only(first);
        remember(folder.path(), &key("a"), &plan).unwrap();
        remember(folder.path(), &key("b"), &CopyPlan::usual()).unwrap();
        assert_eq!(recall(folder.path(), &key("a")), Some(plan));
        assert_eq!(recall(folder.path(), &key("b")), Some(CopyPlan::usual()));
        assert_eq!(recall(folder.path(), &key("c")), None);
        // A plan with an unknown primitive does not count, nor does a damaged file.
        let path = folder.path().join(FILE);
        let text = std::fs::read_to_string(&path).unwrap().replace(first.name(), "abacus");
        std::fs::write(&path, text).unwrap();
        assert_eq!(recall(folder.path(), &key("a")), None);
        std::fs::write(&path, "0=\tb\tc\n").unwrap();
        assert_eq!(recall(folder.path(), &key("b")), None);
    }
}
