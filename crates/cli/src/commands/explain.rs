//! `status --all` in words: the fields of the kernel's line, and every fact of the targets.

use serde_json::Value;
use udm::targets;
use udm::units::human_bytes;

use crate::columns::Columns;
use crate::runtime::DeviceName;

/// A device with its lines, each followed by its meaning.
pub fn device(name: &DeviceName, info: &Value) -> String {
    let mut text = format!("{name}: {}\n", info["state"].as_str().unwrap_or_default());
    for line in info["lines"].as_array().into_iter().flatten() {
        let status = line["status"].as_str().unwrap_or_default();
        text += &format!("  {}\n", status.trim_end());
        let mut list = Columns::new(&["  FIELD", "VALUE", "MEANING"]);
        for (field, value, about) in fields(status) {
            list.row(vec![format!("  {field}"), value.to_owned(), about.to_owned()]);
        }
        for fact in line["facts"].as_array().into_iter().flatten() {
            let name = fact["name"].as_str().unwrap_or_default();
            let about = fact["about"].as_str().unwrap_or_default();
            list.row(vec![format!("  {name}"), plain(name, &fact["value"]), about.to_owned()]);
        }
        if !list.is_empty() {
            text += &list.text();
        }
    }
    text
}

/// The words after the target's name, with their names; none for lines of unknown form.
fn fields(status: &str) -> Vec<(&'static str, &str, &'static str)> {
    let words: Vec<&str> = status.split_whitespace().collect();
    let [_, _, target, ref values @ ..] = words[..] else { return Vec::new() };
    let fields = targets::find(target).map_or(&[][..], |known| known.status_fields);
    if fields.len() != values.len() {
        return Vec::new();
    }
    let fields = fields.iter().zip(values);
    fields.map(|(&(field, about), &value)| (field, value, about)).collect()
}

/// A fact's value for people: bytes are followed by a readable size.
fn plain(name: &str, value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::Number(number) => match number.as_u64() {
            Some(bytes) if name.contains("_bytes") && bytes >= 1024 => {
                format!("{bytes} ({})", human_bytes(bytes))
            }
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_fields_have_names() {
        let fields = fields("0 131072 pcache 0 35 35 1 70 1182 0:4096 0:0 0:0");
        assert_eq!(fields.len(), 9);
        assert_eq!((fields[4].0, fields[4].1), ("gc_percent", "70"));
        assert_eq!((fields[6].0, fields[6].1), ("key_head", "0:4096"));
        assert!(super::fields("0 8 zero ").is_empty());
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!(plain("dirty_bytes", &Value::from(1 << 20)), "1048576 (1.0 MiB)");
        assert_eq!(plain("parked_total", &Value::from(5000)), "5000");
        assert_eq!(plain("is_draining", &Value::from(true)), "yes");
    }
}
