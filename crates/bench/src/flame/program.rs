//! This program's code: the files that are mapped, by which stacks are unwound and functions named.
//!
//! The program is built without frame pointers, so a sample brings registers and the top of the
//! stack, and the files say, in `.eh_frame`, how a frame leads to the one that called it.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;

use framehop::{ExplicitModuleSectionInfo, Module, Unwinder};
use object::{Object, ObjectSection};

use super::record::Sample;
use super::symbols::{Mapping, Names, bias, mappings};

#[cfg(target_arch = "aarch64")]
use framehop::aarch64::{
    CacheAarch64 as Cache, UnwindRegsAarch64 as Regs, UnwinderAarch64 as NativeUnwinder,
};
#[cfg(target_arch = "x86_64")]
use framehop::x86_64::{
    CacheX86_64 as Cache, UnwindRegsX86_64 as Regs, UnwinderX86_64 as NativeUnwinder,
};

/// Frames of a stack, at most.
const FRAMES_MAX: usize = 64;

/// A file's functions, and where they are.
struct Code {
    range: Range<u64>,
    bias: u64,
    names: Names,
    name: String,
}

/// All code that is mapped.
pub struct Program {
    unwinder: NativeUnwinder<Vec<u8>>,
    cache: Cache,
    codes: Vec<Code>,
}

impl Program {
    /// As it is mapped now.
    pub fn now() -> Program {
        let mut program =
            Program { unwinder: NativeUnwinder::new(), cache: Cache::new(), codes: Vec::new() };
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let mut files: BTreeMap<String, Vec<Mapping>> = BTreeMap::new();
        for mapping in mappings(&maps) {
            files.entry(mapping.path.clone()).or_default().push(mapping);
        }
        for (path, mappings) in files {
            program.add(&path, &mappings);
        }
        program
    }

    /// A file that cannot be read, or that contains no code, gives no names and ends stacks.
    fn add(&mut self, path: &str, mappings: &[Mapping]) {
        // The file of the program itself may have been replaced meanwhile.
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(_) => return,
        };
        let Ok(file) = object::File::parse(&*bytes) else { return };
        let start = mappings.iter().map(|one| one.start).min().unwrap_or(0);
        let end = mappings.iter().map(|one| one.end).max().unwrap_or(0);
        let Some(bias) = mappings.first().and_then(|first| bias(&file, first)) else { return };
        let section = |name: &str| {
            let section = file.section_by_name(name)?;
            let end = section.address().checked_add(section.size())?;
            Some((section.address()..end, section.data().ok()?.to_vec()))
        };
        let split = |name: &str| match section(name) {
            Some((range, data)) => (Some(range), Some(data)),
            None => (None, None),
        };
        let (text_svma, text) = split(".text");
        let (eh_frame_svma, eh_frame) = split(".eh_frame");
        let (eh_frame_hdr_svma, eh_frame_hdr) = split(".eh_frame_hdr");
        let info = ExplicitModuleSectionInfo {
            base_svma: 0,
            text_svma,
            text,
            got_svma: split(".got").0,
            eh_frame_svma,
            eh_frame,
            eh_frame_hdr_svma,
            eh_frame_hdr,
            ..ExplicitModuleSectionInfo::default()
        };
        let name = path.rsplit('/').next().unwrap_or(path).to_owned();
        self.unwinder.add_module(Module::new(name.clone(), start..end, bias, info));
        let names = Names::of_elf(&file);
        self.codes.push(Code { range: start..end, bias, names, name });
    }

    /// The program's own frames of a sample, the innermost first.
    pub fn unwind(&mut self, sample: &Sample<'_>) -> Vec<u64> {
        let Some(regs) = sample.regs else { return Vec::new() };
        // In the kernel's order.
        #[cfg(target_arch = "x86_64")]
        let (ip, sp, regs) = {
            let [bp, sp, ip, _] = regs;
            (ip, sp, Regs::new(ip, sp, bp))
        };
        #[cfg(target_arch = "aarch64")]
        let (ip, sp, regs) = {
            let [fp, lr, sp, ip] = regs;
            (ip, sp, Regs::new(lr, sp, fp))
        };
        let mut read = |address: u64| -> Result<u64, ()> {
            let offset = usize::try_from(address.checked_sub(sp).ok_or(())?).map_err(|_| ())?;
            let word = sample.stack.get(offset..).and_then(|rest| rest.first_chunk::<8>());
            word.map(|word| u64::from_le_bytes(*word)).ok_or(())
        };
        let mut frames = Vec::new();
        let mut walk = self.unwinder.iter_frames(ip, regs, &mut self.cache, &mut read);
        while let Ok(Some(frame)) = walk.next() {
            // Within the call, not after it: the next instruction may be another function's.
            frames.push(frame.address_for_lookup());
            if frames.len() == FRAMES_MAX {
                break;
            }
        }
        frames
    }

    /// The name of the function at `address`, or of its file.
    pub fn name(&self, address: u64) -> String {
        let code = self.codes.iter().find(|code| code.range.contains(&address));
        let Some(code) = code else { return "[unknown]".into() };
        let found = address.checked_sub(code.bias).and_then(|address| code.names.find(address));
        found.map_or_else(|| format!("[{}]", code.name), str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_and_stacks_that_make_no_sense_end_a_walk() {
        let mut program = Program::now();
        let own = Program::now as fn() -> Program as usize as u64;
        let bytes = [0xff; 64];
        for (ip, sp) in [(0, 0), (u64::MAX, u64::MAX), (own, 0), (own + 3, u64::MAX - 8)] {
            for stack in [&[][..], &bytes[..]] {
                let mut regs = [u64::MAX; 4];
                (regs[1], regs[2]) = (sp, ip);
                let sample = Sample { thread: 1, kernel: Vec::new(), regs: Some(regs), stack };
                assert!(program.unwind(&sample).len() <= FRAMES_MAX);
            }
        }
        assert!(program.name(own).contains("now"), "{}", program.name(own));
        assert_eq!(program.name(1), "[unknown]");
    }
}
