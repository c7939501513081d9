//! Names for addresses: the kernel's from /proc/kallsyms, the program's from the symbol tables of
//! the files that it has mapped.

use std::fs;

use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};

/// Characters of a name that are shown.
const NAME_CHARS_MAX: usize = 90;

/// A function: its start, its length (0: unknown), and its name.
type Function = (u64, u64, String);

/// Functions by where they begin, in order.
#[derive(Clone, Debug, Default)]
pub struct Names(Vec<Function>);

impl Names {
    fn new(mut found: Vec<Function>) -> Names {
        // Of several names for one place, one is enough: the first by its letters.
        found.sort_by(|one, other| one.0.cmp(&other.0).then(one.2.cmp(&other.2)));
        found.dedup_by_key(|(address, ..)| *address);
        Names(found)
    }

    /// The function that contains `address`: the last one that begins before it, unless it also
    /// ends before it. Libraries without a symbol table name only their exported functions.
    pub fn find(&self, address: u64) -> Option<&str> {
        let after = self.0.partition_point(|(start, ..)| *start <= address);
        let (start, len, name) = self.0.get(after.checked_sub(1)?)?;
        (*len == 0 || address - start < *len).then_some(name)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The kernel's functions, as /proc/kallsyms has them. Addresses of 0 are hidden ones.
    pub fn of_kernel(text: &str) -> Names {
        let functions = text.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            let kind = words.next()?;
            let name = words.next()?;
            let is_code = matches!(kind, "t" | "T" | "w" | "W");
            (is_code && address != 0).then(|| (address, 0, name.to_owned()))
        });
        Names::new(functions.collect())
    }

    /// The functions of an ELF file, by the addresses that the file says.
    pub fn of_elf(file: &object::File<'_>) -> Names {
        let functions = file.symbols().chain(file.dynamic_symbols()).filter_map(|symbol| {
            let is_function = symbol.kind() == SymbolKind::Text && !symbol.is_undefined();
            let name = symbol.name().ok().filter(|name| is_function && !name.is_empty())?;
            Some((symbol.address(), symbol.size(), readable(name)))
        });
        Names::new(functions.collect())
    }
}

/// A name as people read it, not longer than is of use.
fn readable(name: &str) -> String {
    let name = format!("{:#}", rustc_demangle::demangle(name));
    match name.char_indices().nth(NAME_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name,
    }
}

/// A part of a file that is mapped as code.
#[derive(Clone, Debug, PartialEq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// Where in the file it begins.
    pub offset: u64,
    pub path: String,
}

/// The files that are mapped as code, as /proc/self/maps has them.
pub fn mappings(text: &str) -> Vec<Mapping> {
    let mapping = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let offset = words.next()?;
        let hex = |word: &str| u64::from_str_radix(word, 16).ok();
        let (start, end, offset) = (hex(start)?, hex(end)?, hex(offset)?);
        // A path may hold blanks; before it are two more words.
        let path = &line[line.find('/')?..];
        let is_code = rights.contains('x') && start < end;
        is_code.then(|| Mapping { start, end, offset, path: path.to_owned() })
    };
    text.lines().filter_map(mapping).collect()
}

/// The offset from an address in the file to the address in memory.
pub fn bias(file: &object::File<'_>, mapping: &Mapping) -> Option<u64> {
    // Others may share the page that it begins in, but lie elsewhere in memory.
    let is_code = |segment: &object::Segment<'_, '_>| segment.permissions().executable();
    file.segments().filter(is_code).find_map(|segment| {
        let (offset, len) = segment.file_range();
        let within = mapping.offset.checked_sub(offset).filter(|within| *within < len);
        // The kernel maps whole pages: a segment may begin in the middle of one.
        let address = match within {
            Some(within) => segment.address().checked_add(within)?,
            None => {
                let before = offset.checked_sub(mapping.offset)?;
                let is_near = before < rustix::param::page_size() as u64;
                segment.address().checked_sub(before).filter(|_| is_near)?
            }
        };
        mapping.start.checked_sub(address)
    })
}

/// The kernel's functions here; none where it hides them.
pub fn of_this_kernel() -> Names {
    Names::of_kernel(&fs::read_to_string("/proc/kallsyms").unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kallsyms_are_understood_and_hidden_ones_are_none() {
        let text = "ffffffff81000000 T _text\nffffffff81000000 T _stext\n\
                    ffffffff81000040 t inner\t[module]\nffffffff81000050 D data\n\
                    ffffffff81000080 W weak\nnonsense\n12\nzz T odd\n\
                    fffffffffffffffff T too_long\n";
        let names = Names::of_kernel(text);
        let find = |address: u64| names.find(address);
        assert_eq!(find(0xffff_ffff_8100_0000), Some("_stext"), "one of two");
        assert_eq!(find(0xffff_ffff_8100_003f), Some("_stext"));
        assert_eq!(find(0xffff_ffff_8100_0051), Some("inner"));
        assert_eq!(find(u64::MAX), Some("weak"));
        assert_eq!(find(0xffff_ffff_80ff_ffff), None);
        let hidden = "0000000000000000 T _text\n0000000000000000 t inner\n";
        assert!(Names::of_kernel(hidden).is_empty() && Names::of_kernel("").is_empty());
    }

    #[test]
    fn what_lies_after_the_end_of_a_function_is_not_in_it() {
        let name = |text: &str| text.to_owned();
        let names = Names::new(vec![(100, 10, name("b")), (100, 9, name("a")), (50, 0, name("c"))]);
        assert_eq!([108, 99, 50].map(|at| names.find(at)), [Some("a"), Some("c"), Some("c")]);
        assert_eq!([109, 49].map(|at| names.find(at)), [None, None]);
    }

    #[test]
    fn mappings_are_understood() {
        let text = "559c-559d r--p 0 fe:00 12 /bin/x\n\
                    559d000-559e000 r-xp 00001000 fe:00 12          /bin/with a blank\n\
                    7ffe000-7fff000 r-xp 00000000 00:00 0           [vdso]\n\
                    9-8 r-xp 0 0 0 /bin/backwards\nnonsense\n";
        let expected = Mapping {
            start: 0x559d000,
            end: 0x559e000,
            offset: 0x1000,
            path: "/bin/with a blank".into(),
        };
        assert_eq!(mappings(text), [expected]);
    }

    #[test]
    fn this_program_finds_its_own_functions() {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let own = kallsyms_like as fn() as usize as u64;
        let mapping = mappings(&maps).into_iter().find(|one| (one.start..one.end).contains(&own));
        let mapping = mapping.unwrap();
        let bytes = fs::read(&mapping.path).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        let bias = bias(&file, &mapping).unwrap();
        let names = Names::of_elf(&file);
        let name = names.find(own - bias).unwrap();
        assert!(name.contains("kallsyms_like"), "{name}");
        assert!(object::File::parse(&bytes[..100]).is_err(), "not a whole one");
    }

    #[inline(never)]
    fn kallsyms_like() {
        std::hint::black_box("a body of its own, or two functions might be one");
    }

    #[test]
    fn names_are_readable() {
        assert_eq!(readable("_ZN4core3fmt5write17h0123456789abcdefE"), "core::fmt::write");
        assert_eq!(readable(&"x".repeat(200)).len(), NAME_CHARS_MAX + 3);
    }
}
