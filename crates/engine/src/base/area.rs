//! A part of a device: its start and length in bytes, the options after a device's name that select
//! the part, and the check that the device contains it.
//!
//! Plain numbers are sectors, as everywhere in tables. Numbers with a unit (`4096B`, `64K`, `1M`,
//! `2GiB`) are bytes, in powers of 1024.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::units::SECTOR;

/// A part of a device; by default all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Area {
    start: u64,
    len: Option<u64>,
}

impl Area {
    /// The part of `len` bytes at byte `start`; both are whole sectors.
    pub fn new(start: u64, len: u64) -> Area {
        assert!(start.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR) && len > 0);
        Area { start, len: Some(len) }
    }

    /// From its first byte to the end of the device.
    pub(crate) fn and_beyond(self) -> Area {
        Area { len: None, ..self }
    }

    /// Its first byte on the device.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Length in bytes, if the table gives one. Otherwise the part ends with the device.
    pub fn len_bytes(&self) -> Option<u64> {
        self.len
    }

    /// Whether it is the whole device, however long that is.
    pub fn is_whole(&self) -> bool {
        *self == Area::default()
    }

    /// Takes `offset=VALUE`.
    pub(crate) fn set_offset(&mut self, value: &str) -> Result<()> {
        self.start = sectors_of("offset", value)?;
        Ok(())
    }

    /// Takes `size=VALUE`.
    pub(crate) fn set_size(&mut self, value: &str) -> Result<()> {
        let bytes = sectors_of("size", value)?;
        if bytes == 0 {
            return Err(wrong("size", value, "a part has at least one sector"));
        }
        self.len = Some(bytes);
        Ok(())
    }

    /// The options after a device's name that ask for it, in sectors.
    pub fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        if self.start > 0 {
            words.push(format!("offset={}", self.start / SECTOR));
        }
        words.extend(self.len.map(|len| format!("size={}", len / SECTOR)));
        words
    }

    /// The device's name, followed by the part.
    pub fn named(&self, device: &str) -> String {
        match self.is_whole() {
            true => device.to_owned(),
            false => format!("{device}?{}", self.words().join("&")),
        }
    }

    /// The byte range of the part on a device of this name that has `device_bytes`. The start must
    /// be a multiple of `start_unit`, and the length, if the table gives one, a multiple of
    /// `len_unit`.
    pub fn on(
        &self,
        device: &str,
        device_bytes: u64,
        (start_unit, len_unit): (u64, u64),
    ) -> Result<Range<u64>> {
        let name = self.named(device);
        let invalid = |what: String| Err(Error::new(Kind::Invalid, format!("{name}: {what}")));
        let start = self.start;
        if !start.is_multiple_of(start_unit) {
            return invalid(format!(
                "it would begin at byte {start}, but parts of this device begin at multiples of \
                 {start_unit} bytes"
            ));
        }
        let len = match self.len {
            Some(len) => len,
            None => device_bytes.saturating_sub(start) / SECTOR * SECTOR,
        };
        if self.len.is_some() && !len.is_multiple_of(len_unit) {
            return invalid(format!(
                "it would be {len} bytes long, but the device has blocks of {len_unit} bytes"
            ));
        }
        match start.checked_add(len).filter(|end| *end <= device_bytes && len > 0) {
            Some(end) => Ok(start..end),
            None if device_bytes < SECTOR => {
                let why =
                    format!("it has {device_bytes} bytes, which is not a whole sector of {SECTOR}");
                Err(Error::new(Kind::NoSpace, format!("{name}: {why}")))
            }
            None => {
                let end = start.saturating_add(len.max(SECTOR));
                let why = format!("it would end at byte {end}, but the device has {device_bytes}");
                Err(Error::new(Kind::NoSpace, format!("{name}: {why}")))
            }
        }
    }
}

fn wrong(key: &str, value: &str, what: &str) -> Error {
    Error::new(Kind::Invalid, format!("{key}={value}: {what}"))
}

/// What `key=value` says, in bytes.
pub(crate) fn sectors_of(key: &str, value: &str) -> Result<u64> {
    let bytes = bytes_of(value, SECTOR).map_err(|what| wrong(key, value, what))?;
    if !bytes.is_multiple_of(SECTOR) {
        return Err(wrong(key, value, "it is not a whole number of sectors (512 bytes)"));
    }
    Ok(bytes)
}

/// A number of bytes as people write it: with a unit, or as a multiple of `plain_bytes`.
pub fn bytes_of(value: &str, plain_bytes: u64) -> std::result::Result<u64, &'static str> {
    let lower = value.to_ascii_lowercase();
    let digits_end = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let (digits, unit) = lower.split_at(digits_end);
    let unit_bytes: u64 = match unit {
        "" => plain_bytes,
        "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return Err(FORMS),
    };
    if digits.is_empty() {
        return Err(FORMS);
    }
    let number: Option<u64> = digits.parse().ok();
    let bytes = number.and_then(|number| number.checked_mul(unit_bytes));
    // As file offsets must.
    bytes.filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or("it is too large")
}

const FORMS: &str = "expected a number, or bytes with a unit: 2048, 4096B, 64K, 1M, 2G, 1T";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{GIB, MIB};

    fn area(offset: &str, size: &str) -> Result<Area> {
        let mut area = Area::default();
        area.set_offset(offset)?;
        area.set_size(size)?;
        Ok(area)
    }

    #[test]
    fn plain_numbers_are_sectors_and_units_make_bytes() {
        for (offset, size) in
            [("2048", "4096"), ("1M", "2M"), ("1MiB", "2mib"), ("1048576B", "2048k")]
        {
            assert_eq!(area(offset, size).unwrap(), Area::new(MIB, 2 * MIB), "{offset} {size}");
        }
        assert_eq!(area("0", "1G").unwrap().words(), ["size=2097152"]);
        assert_eq!(area("1", "1").unwrap().named("d"), "d?offset=1&size=1");
        assert_eq!(Area::default().named("d"), "d");
    }

    #[test]
    fn hostile_values_are_refused_by_their_name() {
        let most = u64::MAX.to_string();
        for value in ["", "-1", "1.5G", "M", "0x10", "513B", "1X", "+1", " 1", &most, "9999999T"] {
            let error = area(value, "1").unwrap_err().to_string();
            assert!(error.starts_with(&format!("offset={value}: ")), "{error}");
            let error = area("0", value).unwrap_err().to_string();
            assert!(error.starts_with(&format!("size={value}: ")), "{error}");
        }
        assert!(area("0", "0").unwrap_err().to_string().contains("at least one sector"));
    }

    #[test]
    fn a_part_lies_within_its_device_and_on_its_blocks() {
        let on = |area: Area, bytes| area.on("d", bytes, (4096, 4096));
        assert_eq!(on(Area::default(), GIB).unwrap(), 0..GIB);
        assert_eq!(on(Area::new(MIB, MIB), 2 * MIB).unwrap(), MIB..2 * MIB);
        let rest = Area { start: MIB, len: None };
        assert_eq!(on(rest, 2 * MIB + 100).unwrap(), MIB..2 * MIB);
        for (area, bytes) in [
            (Area::new(MIB, MIB + 4096), 2 * MIB),
            (Area::new(MIB, MIB), MIB),
            (rest, MIB),
            (rest, 0),
            (Area::new(i64::MAX as u64 / 4096 * 4096, i64::MAX as u64 / 4096 * 4096), GIB),
            (Area::new(512, 4096), GIB),
            (Area::new(4096, 512), GIB),
        ] {
            let error = on(area, bytes).unwrap_err().to_string();
            assert!(error.starts_with(&area.named("d")), "{error}");
        }
    }
}
