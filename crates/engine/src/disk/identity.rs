//! The identity of a device or file: it stays the same over restarts, and differs from all others.
//!
//! docs/identity.md lists the facts for each kind of disk. The rules:
//!
//! 1. A fact that is absent or zero never counts as a match: it is not part of an identity.
//! 2. A number that the kernel chooses for each mount or boot is not part of an identity, if
//!    there is a better fact: the device's number, the number of a loop device, the inodes of FUSE.
//! 3. A disk that is a part of another disk has the identity of the other one, with the place of
//!    the part. So a loop device has the identity of its file.
//! 4. If the facts do not tell a disk from all others, its place stands in: the mount and the path
//!    of a file, the kernel's name of a block device. Then the identity has a doubt.
//! 5. The identity is recorded as a text or a checksum of it, so all kernels must spell it alike: a
//!    fact that only newer kernels report is used only if the others do not suffice.
//! 6. A cache may have been marked by an earlier udm, or under an older kernel, with another
//!    spelling of the identity. The spelling counts; if it was too coarse, it counts as "cannot
//!    tell".

use super::facts::{Backing, DiskFacts, Facts, FileFacts};
use super::ioctls::Uuid;

/// An identity has at most this many bytes.
const IDENTITY_BYTES_MAX: usize = 200;

/// Serial numbers that makers put into many of their devices, in lower case, letters and digits
/// only. A text of one repeated character counts as such a number.
const SERIALS_OF_MANY: [&str; 12] = [
    "none",
    "na",
    "unknown",
    "default",
    "defaultstring",
    "notspecified",
    "tobefilledbyoem",
    "0123456789",
    "0123456789abcde",
    "0123456789abcdef",
    "123456789abc",
    "123456789012",
];

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    words: String,
    former: Vec<Former>,
    doubt: Option<String>,
}

/// The identity as an earlier udm spelled it, or as udm spells it under an older kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Former {
    words: String,
    /// Whether no other disk had the same.
    is_exact: bool,
}

/// The result of comparing an identity with a recorded one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// It is the same disk.
    Exact,
    /// It agrees with everything that is recorded, as other disks may.
    Possible,
    /// It is another disk.
    Other,
}

impl Identity {
    /// The identity in words, of at most 200 bytes: these are recorded.
    pub fn words(&self) -> &str {
        &self.words
    }

    /// The reason why another disk may have the same identity, if there is one.
    pub fn doubt(&self) -> Option<&str> {
        self.doubt.as_deref()
    }

    /// Compares it with a recorded identity. `is_recorded` tells whether these words are recorded.
    pub fn compare(&self, is_recorded: impl Fn(&str) -> bool) -> Match {
        if is_recorded(&self.words) {
            return if self.doubt.is_none() { Match::Exact } else { Match::Possible };
        }
        let found = self.former.iter().filter(|former| is_recorded(&former.words));
        match found.map(|former| former.is_exact).max() {
            Some(true) => Match::Exact,
            Some(false) => Match::Possible,
            None => Match::Other,
        }
    }

    /// The identity of the part of this disk that begins at byte `start`.
    fn from(self, start: u64) -> Identity {
        let part = if start > 0 { format!(" from byte {start}") } else { String::new() };
        let of = |words: String| shortened(words + &part);
        let former = self.former.into_iter();
        let former = former.map(|former| Former { words: of(former.words), ..former }).collect();
        Identity { words: of(self.words), former, ..self }
    }
}

impl From<&str> for Identity {
    fn from(words: &str) -> Identity {
        Identity { words: words.into(), ..Identity::default() }
    }
}

impl std::fmt::Display for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.words)
    }
}

/// The identity of a disk with these facts. `size_bytes`: the size of the whole. `start`: the start
/// of the used part.
pub(super) fn of(facts: &Facts, size_bytes: u64, start: u64) -> Identity {
    let (words, doubt) = words_of(facts);
    let (older, older_doubt) = words_of(&facts.on_older_kernel());
    let older = Former { words: older, is_exact: older_doubt.is_none() };
    let former = [older, former_of(facts, size_bytes)].into_iter();
    let former = former.filter(|former| former.words != words);
    // An earlier spelling is not more certain than the present one.
    let is_exact = |former: &Former| former.is_exact && doubt.is_none();
    let former = former.map(|former| Former { is_exact: is_exact(&former), ..former }).collect();
    Identity { words, former, doubt }.from(start)
}

/// Whether a file is known by its place only. Then its times may be the mount's.
pub(super) fn is_by_place(facts: &Facts) -> bool {
    matches!(facts, Facts::File(file) if !is_known(file))
}

/// The words, and the doubt about them if there is one.
fn words_of(facts: &Facts) -> (String, Option<String>) {
    match facts {
        Facts::File(file) => words_of_file(file),
        Facts::Disk(disk) => words_of_disk(disk),
        Facts::Partition(disk, _, start, len) => {
            let (words, doubt) = words_of_disk(disk);
            (format!("{words} partition from byte {start} of {len} bytes"), doubt)
        }
    }
}

/// The UUID of a file's file system, spelled for the identity.
fn file_system_of(file: &FileFacts) -> Option<String> {
    match file {
        _ if is_of_uuid(file.fsid) => Some(format!("{:016x}", file.fsid)),
        _ if is_there(file.uuid) => Some(uuid_text(file.uuid)),
        _ if is_there(file.late_uuid) && !is_born(file) => Some(uuid_text(file.late_uuid)),
        _ => None,
    }
}

fn has_inode(file: &FileFacts) -> bool {
    file.inodes_last && file.inode != 0
}

/// Whether its inode tells a file from others. Two files of one inode and one moment of birth, to
/// the nanosecond, are copies of a whole file system, and these have the same UUID.
fn is_known(file: &FileFacts) -> bool {
    let has_age = file.generation != 0 && file_system_of(file).is_some();
    has_inode(file) && (is_born(file) || has_age)
}

fn words_of_file(file: &FileFacts) -> (String, Option<String>) {
    let subvolume = match file.subvolume {
        0 => String::new(),
        number => format!(" subvolume {number:016x}"),
    };
    let on = file_system_of(file).map(|words| format!(" on {words}{subvolume}"));
    let inode = if has_inode(file) { format!(" inode {}", file.inode) } else { String::new() };
    let age = match (is_born(file), file.generation) {
        (true, _) => format!(" born {}.{:09}", file.born.0, file.born.1),
        (false, 0) => String::new(),
        (false, generation) => format!(" generation {generation}"),
    };
    let FileFacts { mount, path, .. } = file;
    if is_known(file) {
        let doubt = format!(
            "udm knows this file ({path} on {mount}) only by its inode number and its age: a file \
             in a clone or snapshot of the same file system would count as the same file"
        );
        let doubt = file.has_twins.then_some(doubt);
        return (format!("file{}{inode}{age}", on.unwrap_or_default()), doubt);
    }
    let on = on.unwrap_or_else(|| format!(" on {mount}"));
    let doubt = format!(
        "udm knows this file only by its place ({path} on {mount}), because its file system \
         reports no lasting inode number or time of birth: another file of this size at that \
         place would count as the same file"
    );
    (format!("file {path}{on}{inode}{age}"), Some(doubt))
}

fn words_of_disk(disk: &DiskFacts) -> (String, Option<String>) {
    if let Some(backing) = &disk.backing {
        return words_of_loop(backing, disk.bytes);
    }
    // These are drawn for one array, mapping or region, which may grow.
    for (name, word) in [("dm/uuid", "dm"), ("md/uuid", "md"), ("device/uuid", "region")] {
        let found = attribute(disk, name).filter(|text| is_telling(text) && is_drawn(text));
        if let Some(text) = found {
            return (format!("{word} {text}"), None);
        }
    }
    let bytes = disk.bytes;
    let doubt_of = |name: &str| {
        format!(
            "udm knows this device only by its name ({name}) and its size, because it reports no \
             UUID and no serial number: another device of this name and size would count as the \
             same device"
        )
    };
    if let Some(text) = attribute(disk, "dm/name") {
        return (format!("dm name {text} of {bytes} bytes"), Some(doubt_of(text)));
    }
    // For some USB disks, this is the bridge's number, so size and model are needed as well.
    let model = attribute(disk, "device/model").map(|model| format!(" model {model}"));
    let model = model.unwrap_or_default();
    let numbers = [
        ("wwid", "wwid"),
        ("device/wwid", "wwid"),
        ("serial", "serial"),
        ("device/serial", "serial"),
        ("backend", "nbd"),
    ];
    for (name, word) in numbers {
        if let Some(text) = attribute(disk, name).filter(|text| is_telling(text)) {
            // A backend is a name that the client of the server was given.
            let doubt = (name == "backend").then(|| doubt_of(text));
            return (format!("{word} {text}{model} of {bytes} bytes"), doubt);
        }
    }
    let name = &disk.name;
    let doubt = format!(
        "udm knows this device only by the kernel's name or number ({name}) and its size, because \
         it reports no serial number or /sys is not mounted: another device of this name and size \
         would count as the same device"
    );
    (format!("block device {name} of {bytes} bytes"), Some(doubt))
}

fn words_of_loop(backing: &Backing, bytes: u64) -> (String, Option<String>) {
    let (file, doubt) = match &backing.found {
        Some(found) => words_of(found),
        None => {
            let doubt = format!(
                "udm knows this loop device only by the name of its file ({}) and its size, \
                 because the file is not at that path: another device of this name and size would \
                 count as the same device",
                backing.place
            );
            (format!("file {}", backing.place), Some(doubt))
        }
    };
    // A limit to the size shows in the size.
    (format!("loop on {file} from byte {} of {bytes} bytes", backing.start), doubt)
}

/// The identity as udm spelled it first.
fn former_of(facts: &Facts, size_bytes: u64) -> Former {
    let (disk, partition) = match facts {
        Facts::File(file) => {
            let age = match is_born(file) {
                true => format!(" born {}.{:09}", file.born.0, file.born.1),
                false => String::new(),
            };
            let words = format!("file on {:016x} inode {}{age}", file.fsid, file.inode);
            let is_exact = is_born(file) && file.inodes_last && !file.has_twins;
            return Former { words, is_exact: is_exact && file.subvolume == 0 };
        }
        Facts::Disk(disk) => (disk, None),
        Facts::Partition(disk, nth, ..) => (disk, Some(nth)),
    };
    let words = [
        ("dm/uuid", "dm", false),
        ("dm/name", "dm name", false),
        ("loop/backing_file", "loop on", true),
        ("md/uuid", "md", false),
        ("wwid", "wwid", false),
        ("device/wwid", "wwid", false),
        ("serial", "serial", false),
        ("device/serial", "serial", false),
        ("backend", "nbd", true),
    ];
    let found = words.iter().find_map(|(name, word, has_size)| {
        Some((*word, format!("{word} {}", attribute(disk, name)?), *has_size))
    });
    let name = || {
        let gap = if disk.name.ends_with(|last: char| last.is_ascii_digit()) { "p" } else { "" };
        partition.map_or_else(|| disk.name.clone(), |nth| format!("{}{gap}{nth}", disk.name))
    };
    let found = found.unwrap_or_else(|| ("block device", format!("block device {}", name()), true));
    let (word, found, has_size) = found;
    let partition = partition.map(|nth| format!(" partition {nth}")).unwrap_or_default();
    let size = if has_size { format!(" of {size_bytes} bytes") } else { String::new() };
    let is_exact = matches!(word, "dm" | "md") && partition.is_empty();
    Former { words: format!("{found}{partition}{size}"), is_exact }
}

fn attribute<'a>(disk: &'a DiskFacts, name: &str) -> Option<&'a str> {
    let mut all = disk.attributes.iter();
    all.find(|(known, _)| *known == name).map(|(_, text)| text.as_str())
}

fn is_there(uuid: Uuid) -> bool {
    uuid != Uuid::default()
}

fn is_born(file: &FileFacts) -> bool {
    file.born != (0, 0)
}

/// Whether an `f_fsid` is made of a UUID. One that is made of a device's number has that in its
/// first half, and zeroes in the other.
fn is_of_uuid(fsid: u64) -> bool {
    fsid >> 32 != 0 && fsid & 0xFFFF_FFFF != 0
}

/// Whether a serial number tells one device from others.
fn is_telling(text: &str) -> bool {
    let number = number_in(&text.to_ascii_lowercase()).to_ascii_lowercase();
    let plain: String = number.chars().filter(|c| c.is_alphanumeric()).collect();
    let first = plain.chars().next();
    let is_one_repeated = plain.chars().all(|c| Some(c) == first);
    // The name of a maker, and zeroes.
    let front = plain.trim_end_matches('0');
    let zeroes = plain.len() - front.len();
    let has_digits = front.contains(|c: char| c.is_ascii_digit());
    let ends_in_zeroes = zeroes >= 8 || zeroes >= 4 && !has_digits;
    // QEMU numbers the disks without a serial number.
    let of_qemu = plain.strip_prefix("qm").filter(|digits| digits.len() == 5);
    let is_position = of_qemu.is_some_and(|digits| digits.chars().all(|c| c.is_ascii_digit()));
    // Google's clouds name local disks by their place, and Azure's number their disks.
    let is_position = is_position || plain.starts_with("nvmecard") || plain.starts_with("sn0000");
    !(is_one_repeated || ends_in_zeroes || is_position || SERIALS_OF_MANY.contains(&plain.as_str()))
}

/// The number in a `wwid`, without the parts that are alike for all devices of one maker or model.
fn number_in(text: &str) -> String {
    if let Some(number) =
        ["naa.", "eui.", "uuid.", "0x"].iter().find_map(|prefix| text.strip_prefix(prefix))
    {
        return number.into();
    }
    // The maker's number, then in hexadecimal the serial number and the model.
    if let Some(rest) = text.strip_prefix("nvme.") {
        let hex = rest.split('-').nth(1).unwrap_or_default();
        let byte = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
        return (0..hex.len()).step_by(2).filter_map(byte).map(char::from).collect();
    }
    let Some(rest) = text.strip_prefix("t10.") else { return text.into() };
    // Eight characters for the maker; the model of an ATA disk has 40 more. The server of iSCSI
    // that calls itself IET counts targets and disks.
    let len = match rest.get(..4) {
        Some("ata ") => 48,
        Some("iet ") => rest.len(),
        _ => 8,
    };
    rest.get(len..).unwrap_or_default().into()
}

/// Whether a UUID of the device mapper was drawn. For formats that store no UUID, cryptsetup makes
/// it of the mapping's name alone: `CRYPT-PLAIN-NAME`. Others have `CRYPT-LUKS2-UUID-NAME`.
fn is_drawn(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("CRYPT-") else { return true };
    let (format, rest) = rest.split_once('-').unwrap_or_default();
    let uuid = rest.split('-').next().unwrap_or_default();
    let is_hex = uuid.len() == 32 && uuid.chars().all(|c| c.is_ascii_hexdigit());
    is_hex && !["PLAIN", "TCRYPT", "LOOPAES", "INTEGRITY"].contains(&format)
}

fn uuid_text(uuid: Uuid) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    parts.join("-")
}

/// Long names keep their beginning, and a checksum of everything.
fn shortened(identity: String) -> String {
    if identity.len() <= IDENTITY_BYTES_MAX {
        return identity;
    }
    let checksum = crate::base::crc::crc32c_raw(0, identity.as_bytes());
    let mut kept = IDENTITY_BYTES_MAX - 10;
    while !identity.is_char_boundary(kept) {
        kept -= 1;
    }
    format!("{}~{checksum:08x}", &identity[..kept])
}

#[cfg(test)]
mod tests;
