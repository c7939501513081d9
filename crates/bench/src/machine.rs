//! A description of the machine that was measured.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use udm::units::human_bytes;

/// A machine, and when.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's model.
    pub cpu: String,
    /// How many of them.
    pub processors: usize,
    /// Whether a hypervisor stands below.
    pub is_virtual: bool,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// The kernel's release.
    pub kernel: String,
    /// udm's version.
    pub udm: String,
    /// The day, in UTC.
    pub date: String,
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

impl Machine {
    /// This one, now.
    pub fn here() -> Machine {
        let info = read("/proc/cpuinfo");
        let memory = read("/proc/meminfo");
        let kib = field(&memory, "MemTotal").and_then(|text| text.split(' ').next()?.parse().ok());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Machine {
            cpu: field(&info, "model name").unwrap_or(std::env::consts::ARCH).to_owned(),
            processors: std::thread::available_parallelism().map_or(1, |count| count.get()),
            is_virtual: field(&info, "flags").is_some_and(|flags| flags.contains("hypervisor")),
            memory_bytes: kib.unwrap_or(0_u64) << 10,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            udm: env!("CARGO_PKG_VERSION").to_owned(),
            date: date(now.as_secs()),
        }
    }

    /// In one line.
    pub fn sentence(&self) -> String {
        format!(
            "{} x {}{}, {} of memory, Linux {}",
            self.processors,
            self.cpu,
            if self.is_virtual { " (virtual)" } else { "" },
            human_bytes(self.memory_bytes),
            self.kernel
        )
    }
}

/// Days as people write them.
fn date(seconds: u64) -> String {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let mut days = seconds / 86_400;
    let mut year = 1970;
    while days >= if is_leap(year) { 366 } else { 365 } {
        days -= if is_leap(year) { 366 } else { 365 };
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < len {
            break;
        }
        days -= len;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_machines() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_798_761_599), "2026-12-31");
        let here = Machine::here();
        assert!(here.processors > 0 && !here.kernel.is_empty());
    }
}
