//! A cache's metadata as text, in the format of `cache_dump` and `cache_restore` of
//! thin-provisioning-tools: the block of each slot, whether it is dirty, and the policy's hint.
//!
//! Discards and statistics are not in it. Text is as untrusted as media: a mistake is an error with
//! its line and column.

mod scan;
#[cfg(test)]
mod tests;

use super::binding::DIGITS;
use super::metadata::contents::mapping;
use super::metadata::format::write_whole;
use super::metadata::superblock::CLEAN_SHUTDOWN;
use super::metadata::{Contents, Superblock};
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use scan::{Attribute, Scan, Token};

/// Bytes of a superblock's uuid.
const UUID_BYTES: usize = 16;
/// Bytes of a hint.
const HINT_BYTES: u32 = 4;
/// Blocks of the origin have numbers below this.
const BLOCKS_END: u64 = 1 << 48;
/// The kernel's policies, whose version is 2.0.0; their hints count with that version only.
const POLICIES: [&str; 4] = ["smq", "mq", "cleaner", "default"];

/// Metadata as text has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The superblock's uuid, with zeroes after its text.
    pub uuid: [u8; UUID_BYTES],
    /// Sectors of a block.
    pub data_sectors: u32,
    /// The policy's name.
    pub policy: String,
    /// The state of the blocks.
    pub contents: Contents,
}

/// Prints the state that a kernel that opens the cache would see in `contents`. `out` gets a few
/// lines at a time.
pub fn print(
    superblock: &Superblock,
    contents: &Contents,
    mut out: impl FnMut(&str) -> std::io::Result<()>,
) -> std::io::Result<()> {
    out(&format!(
        "<superblock uuid=\"{}\" block_size=\"{}\" nr_cache_blocks=\"{}\" policy=\"{}\" \
         hint_width=\"{HINT_BYTES}\">\n  <mappings>\n",
        uuid_text(&superblock.fields.uuid),
        superblock.fields.data_sectors.get(),
        contents.slots(),
        escaped(&superblock.policy())
    ))?;
    for (slot, block) in contents.in_use() {
        let dirty = contents.dirty.is_set(slot);
        out(&format!(
            "    <mapping cache_block=\"{slot}\" origin_block=\"{block}\" dirty=\"{dirty}\"/>\n"
        ))?;
    }
    out("  </mappings>\n  <hints>\n")?;
    if let Some(hints) = &contents.hints {
        for (slot, _) in contents.in_use() {
            let data = base64(hints[slot as usize].to_le_bytes());
            out(&format!("    <hint cache_block=\"{slot}\" data=\"{data}\"/>\n"))?;
        }
    }
    out("  </hints>\n</superblock>\n")
}

/// A uuid as an attribute: up to its first zero, if it is text of visible letters. Other bytes
/// cannot be part of XML.
fn uuid_text(uuid: &[u8; UUID_BYTES]) -> String {
    let end = uuid.iter().position(|byte| *byte == 0).unwrap_or(UUID_BYTES);
    let (text, rest) = uuid.split_at(end);
    let is_text = text.iter().all(u8::is_ascii_graphic) && rest.iter().all(|byte| *byte == 0);
    if is_text { escaped(&String::from_utf8_lossy(text)) } else { String::new() }
}

fn escaped(text: &str) -> String {
    let visible = text.chars().filter(|letter| !letter.is_control());
    let words = visible.map(|letter| match letter {
        '&' => "&amp;".into(),
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        '"' => "&quot;".into(),
        letter => letter.to_string(),
    });
    words.collect()
}

/// Four bytes in base64: six digits, of which the last one has two bits, and two signs.
fn base64(bytes: [u8; 4]) -> String {
    let bits = u64::from(u32::from_be_bytes(bytes)) << 4;
    let digit = |nth: u32| DIGITS[(bits >> (30 - 6 * nth) & 63) as usize] as char;
    (0..6).map(digit).chain(['=', '=']).collect()
}

fn from_base64(text: &str) -> Option<[u8; 4]> {
    let digits = text.strip_suffix("==").filter(|digits| digits.len() == 6)?;
    let mut bits = 0_u64;
    for digit in digits.bytes() {
        bits = bits << 6 | DIGITS.iter().position(|known| *known == digit)? as u64;
    }
    (bits & 15 == 0).then_some(((bits >> 4) as u32).to_be_bytes())
}

/// Understands a text. No memory is taken for more than `slots_max` slots.
pub fn parse(text: &str, slots_max: u64) -> Result<Description> {
    let mut parser = Parser { scan: Scan::new(text), slots_max };
    let description = parser.superblock()?;
    match parser.scan.next_token()? {
        None => Ok(description),
        Some(Token::Open { at, .. } | Token::Close { at, .. }) => {
            Err(parser.scan.error(at, "more than one superblock"))
        }
    }
}

struct Parser<'a> {
    scan: Scan<'a>,
    slots_max: u64,
}

/// An element.
struct Element<'a> {
    name: &'a str,
    attributes: Vec<Attribute<'a>>,
    is_closed: bool,
    at: usize,
}

impl<'a> Parser<'a> {
    /// The next element within the element `outer`, or `None` at its end.
    fn within(&mut self, outer: &str) -> Result<Option<Element<'a>>> {
        match self.scan.next_token()? {
            Some(Token::Open { name, attributes, is_closed, at }) => {
                Ok(Some(Element { name, attributes, is_closed, at }))
            }
            Some(Token::Close { name, .. }) if name == outer => Ok(None),
            Some(Token::Close { name, at }) => {
                Err(self.scan.error(at, format!("</{name}> where {outer} is open")))
            }
            None => {
                let end = self.scan.end();
                Err(self.scan.error(end, format!("{outer} is not closed")))
            }
        }
    }

    fn superblock(&mut self) -> Result<Description> {
        let Some(Token::Open { name: "superblock", attributes, is_closed, at }) =
            self.scan.next_token()?
        else {
            return Err(self.scan.error(0, "expected <superblock ...>"));
        };
        let element = Element { name: "superblock", attributes, is_closed, at };
        let known = ["uuid", "block_size", "nr_cache_blocks", "policy", "hint_width"];
        self.check_names(&element, &known)?;
        let uuid = self.uuid(&element)?;
        let data_sectors = self.number(&element, "block_size", u32::MAX.into())? as u32;
        let slots = self.number(&element, "nr_cache_blocks", u32::MAX.into())?;
        if slots > self.slots_max {
            let most = self.slots_max;
            let what = format!("{slots} blocks; the metadata device has room for {most} at most");
            return Err(self.scan.error(self.place(&element, "nr_cache_blocks"), what));
        }
        let width = self.number(&element, "hint_width", u64::MAX)?;
        if ![0, u64::from(HINT_BYTES)].contains(&width) {
            let what = format!("hints of {width} bytes; only {HINT_BYTES} are supported");
            return Err(self.scan.error(self.place(&element, "hint_width"), what));
        }
        let policy = self.value(&element, "policy")?;
        if policy.len() > 15 {
            let what = "a policy's name has 15 bytes at most";
            return Err(self.scan.error(self.place(&element, "policy"), what));
        }
        let mut contents = Contents::empty(slots);
        if !element.is_closed {
            self.parts(&mut contents)?;
        }
        Ok(Description { uuid, data_sectors, policy, contents })
    }

    /// The uuid of a superblock, if it has one.
    fn uuid(&self, element: &Element<'a>) -> Result<[u8; UUID_BYTES]> {
        let mut uuid = [0; UUID_BYTES];
        let Some(attribute) = self.find(element, "uuid") else { return Ok(uuid) };
        let text = attribute.value.as_bytes();
        if text.len() > UUID_BYTES {
            let what = format!(
                "the uuid has {} bytes, and a superblock has room for {UUID_BYTES}: shorten it, or \
                 leave it empty",
                text.len()
            );
            return Err(self.scan.error(attribute.at, what));
        }
        uuid[..text.len()].copy_from_slice(text);
        Ok(uuid)
    }

    /// The content of a superblock element.
    fn parts(&mut self, contents: &mut Contents) -> Result<()> {
        while let Some(part) = self.within("superblock")? {
            self.check_names(&part, &[])?;
            match part.name {
                _ if part.is_closed => {}
                "mappings" => self.mappings(contents)?,
                "hints" => self.hints(contents)?,
                name => {
                    let what = format!("{name} within superblock; expected mappings or hints");
                    return Err(self.scan.error(part.at, what));
                }
            }
        }
        Ok(())
    }

    fn mappings(&mut self, contents: &mut Contents) -> Result<()> {
        let mut blocks: Vec<(u64, u64, usize)> = Vec::new();
        while let Some(element) = self.leaf("mappings", "mapping")? {
            self.check_names(&element, &["cache_block", "origin_block", "dirty"])?;
            let slot = self.slot(&element, contents)?;
            let block = self.number(&element, "origin_block", BLOCKS_END - 1)?;
            let is_dirty = match self.value(&element, "dirty")?.as_str() {
                "true" => true,
                "false" => false,
                word => {
                    let what = format!("{}: expected true or false", shown(word));
                    return Err(self.scan.error(self.place(&element, "dirty"), what));
                }
            };
            if contents.block(slot).is_some() {
                let what = format!("cache block {slot} is mapped twice");
                return Err(self.scan.error(self.place(&element, "cache_block"), what));
            }
            contents.mappings[slot as usize] = mapping(Some(block));
            contents.dirty.put(slot, is_dirty);
            blocks.push((block, slot, element.at));
        }
        blocks.sort_unstable();
        match blocks.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            None => Ok(()),
            Some(pair) => {
                let (block, one, other) = (pair[0].0, pair[0].1, pair[1].1);
                let what = format!("cache blocks {one} and {other} both hold origin block {block}");
                Err(self.scan.error(pair[1].2.max(pair[0].2), what))
            }
        }
    }

    fn hints(&mut self, contents: &mut Contents) -> Result<()> {
        let mut hints = vec![0; contents.mappings.len()];
        while let Some(element) = self.leaf("hints", "hint")? {
            self.check_names(&element, &["cache_block", "data"])?;
            let slot = self.slot(&element, contents)?;
            let data = self.value(&element, "data")?;
            let Some(bytes) = from_base64(&data) else {
                let what = format!("{}: expected {HINT_BYTES} bytes in base64", shown(&data));
                return Err(self.scan.error(self.place(&element, "data"), what));
            };
            hints[slot as usize] = u32::from_le_bytes(bytes);
        }
        contents.hints = Some(hints);
        Ok(())
    }

    /// The next element `name` within `outer`, which must be empty.
    fn leaf(&mut self, outer: &str, name: &str) -> Result<Option<Element<'a>>> {
        let Some(element) = self.within(outer)? else { return Ok(None) };
        if element.name != name {
            let what = format!("{} within {outer}; expected {name}", element.name);
            return Err(self.scan.error(element.at, what));
        }
        if !element.is_closed && self.within(name)?.is_some() {
            return Err(self.scan.error(element.at, format!("something within {name}")));
        }
        Ok(Some(element))
    }

    fn slot(&self, element: &Element<'_>, contents: &Contents) -> Result<u64> {
        let slot = self.number(element, "cache_block", u64::MAX)?;
        if slot >= contents.slots() {
            let what = format!("cache block {slot}, but there are {}", contents.slots());
            return Err(self.scan.error(self.place(element, "cache_block"), what));
        }
        Ok(slot)
    }

    fn check_names(&self, element: &Element<'_>, known: &[&str]) -> Result<()> {
        match element.attributes.iter().find(|attribute| !known.contains(&attribute.name)) {
            None => Ok(()),
            Some(other) => {
                let what = format!("unknown attribute {1} of {0}", element.name, other.name);
                Err(self.scan.error(other.at, what))
            }
        }
    }

    fn find<'e>(&self, element: &'e Element<'a>, name: &str) -> Option<&'e Attribute<'a>> {
        element.attributes.iter().find(|attribute| attribute.name == name)
    }

    fn place(&self, element: &Element<'a>, name: &str) -> usize {
        self.find(element, name).map_or(element.at, |attribute| attribute.at)
    }

    fn value(&self, element: &Element<'a>, name: &str) -> Result<String> {
        let attribute = self.find(element, name).ok_or_else(|| {
            self.scan.error(element.at, format!("{} without {name}", element.name))
        })?;
        Ok(attribute.value.clone().into_owned())
    }

    fn number(&self, element: &Element<'a>, name: &str, most: u64) -> Result<u64> {
        let value = self.value(element, name)?;
        let is_number = !value.is_empty() && value.bytes().all(|digit| digit.is_ascii_digit());
        match value.parse::<u64>().ok().filter(|number| is_number && *number <= most) {
            Some(number) => Ok(number),
            None => {
                let what = format!("{name} {}: expected a number of 0 to {most}", shown(&value));
                Err(self.scan.error(self.place(element, name), what))
            }
        }
    }
}

impl Description {
    /// Writes metadata of this to `disk`, over anything that is there.
    pub fn write(&self, disk: &Arc<dyn Disk>, version: u32, is_clean: bool) -> Result<()> {
        let mut superblock = Superblock::fresh(version, self.data_sectors);
        superblock.set_policy(&self.policy)?;
        superblock.fields.uuid = self.uuid;
        superblock.put_flag(CLEAN_SHUTDOWN, is_clean);
        superblock.fields.hint_bytes.set(HINT_BYTES);
        if POLICIES.contains(&self.policy.as_str()) {
            superblock.fields.policy_version[0].set(2);
        }
        let mut contents = self.contents.clone();
        let slots = contents.mappings.len();
        // `cache_dump` 1.1.0 fails where there are none.
        contents.hints.get_or_insert_with(|| vec![0; slots]);
        write_whole(disk, superblock, &contents)
    }
}

/// A value as a message shows it: in one line, and not too long.
fn shown(value: &str) -> String {
    const LETTERS_MAX: usize = 40;
    let start: String = value.chars().take(LETTERS_MAX).collect();
    format!("{start:?}")
}

/// How many slots can have a mapping on a device of `device_blocks` blocks, at the very most.
pub fn slots_max(device_blocks: u64) -> u64 {
    device_blocks.saturating_mul(509)
}

/// The text of a file, without the byte order mark that some editors put in front of it. An error
/// if the file is not UTF-8.
pub fn text_of(bytes: &[u8]) -> Result<&str> {
    let invalid = |what: String| Error::new(Kind::Invalid, what);
    if [&b"\xFE\xFF"[..], b"\xFF\xFE"].iter().any(|mark| bytes.starts_with(mark)) {
        return Err(invalid("it is UTF-16 (by its byte order mark): convert it to UTF-8".into()));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        invalid(format!("byte {at}: it is not UTF-8"))
    })?;
    Ok(text.strip_prefix('\u{FEFF}').unwrap_or(text))
}
