//! Commands about udm itself: `targets`, `bench`.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;
use udm::targets::{TARGETS, TargetType};

use crate::args::media::TargetsArgs;
use crate::args::{BenchArgs, JsonArgs};
use crate::output::{print, print_json};

/// `udm targets`, in the format of `dmsetup targets`, or the grammar of one.
pub fn targets(args: &TargetsArgs) -> Result<()> {
    if let Some(kind) = args.target.as_deref().and_then(udm::targets::find) {
        return grammar(kind, args.json);
    }
    if args.json.json {
        let all: Vec<_> = TARGETS
            .iter()
            .map(|known| json!({ "name": known.name, "version": known.version }))
            .collect();
        return print_json(&all.into());
    }
    let line = |known: &&TargetType| format!("{:<16} v{}\n", known.name, known.version);
    let lines: Vec<String> = TARGETS.iter().map(line).collect();
    print(&lines.concat())
}

/// The words of a target's table lines, and the fields of its status line.
fn grammar(kind: &TargetType, json: JsonArgs) -> Result<()> {
    if json.json {
        let field = |(name, meaning): &(&str, &str)| json!({ "name": name, "meaning": meaning });
        return print_json(&json!({
            "name": kind.name,
            "version": kind.version,
            "words": kind.words,
            "status_fields": kind.status_fields.iter().map(field).collect::<Vec<_>>(),
        }));
    }
    let words = kind.words.trim();
    let mut text = format!("START LENGTH {}", kind.name);
    if !words.is_empty() {
        text += &format!(" {words}");
    }
    text += "\n";
    if !kind.status_fields.is_empty() {
        text += "\nThe fields of its status line:\n";
        for (name, meaning) in kind.status_fields {
            text += &format!("  {name:<24} {meaning}\n");
        }
    }
    print(&text)
}

/// `udm bench`: becomes the program of benchmarks, from the folder of this program or from `$PATH`.
pub fn bench(args: &BenchArgs) -> Result<()> {
    const NAME: &str = "udm-bench";
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(NAME));
    let program = beside.filter(|path| path.is_file()).unwrap_or_else(|| NAME.into());
    let error = Command::new(&program).args(&args.args).exec();
    if error.kind() == ErrorKind::NotFound {
        bail!("{NAME} is not installed beside udm or in $PATH; `make install` installs both");
    }
    Err(error).with_context(|| program.display().to_string())
}
