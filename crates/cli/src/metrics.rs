//! Prometheus' text format, from the facts of servers about their devices.
//!
//! Each fact of a target is one metric, `udm_` and the fact's name. Equal facts have equal names in
//! all targets, so one metric covers all devices. Texts become labels of `udm_device_info`.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::runtime::DeviceName;

/// The metric that every device has, and its meaning.
const UP: (&str, &str) = ("device_up", "1 if the server of the device answers.");

/// One metric: its meaning and its samples, `{labels} value`.
#[derive(Debug, Default)]
struct Metric {
    about: String,
    samples: Vec<String>,
}

/// The metrics of these devices, each as its server's `Info` answered; `lost`: devices whose server
/// did not answer.
pub fn text(devices: &[Value], lost: &[DeviceName]) -> String {
    let mut metrics = BTreeMap::new();
    for name in lost {
        let labels = format!("{{device=\"{}\"}}", escape(name.as_str()));
        add(&mut metrics, UP.0, UP.1, format!("{labels} 0"));
    }
    for device in devices {
        let name = device["name"].as_str().unwrap_or_default();
        let labels = format!("{{device=\"{}\"}}", escape(name));
        device_metrics(&mut metrics, device, &labels);
        for line in device["lines"].as_array().into_iter().flatten() {
            let labels = format!(
                "{{device=\"{}\",start=\"{}\",target=\"{}\"}}",
                escape(name),
                line["start"],
                escape(line["target"].as_str().unwrap_or_default())
            );
            fact_metrics(&mut metrics, line, &labels);
        }
    }
    let mut text = String::new();
    for (name, metric) in metrics {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        text += &format!("# HELP udm_{name} {}\n# TYPE udm_{name} {kind}\n", metric.about);
        for sample in metric.samples {
            text += &format!("udm_{name}{sample}\n");
        }
    }
    text
}

fn device_metrics(metrics: &mut BTreeMap<String, Metric>, device: &Value, labels: &str) {
    let suspended = device["state"] == "suspended";
    let failing = device["is_writeback_failing"] == true;
    let slow = device["slow_requests"].as_array().map(|slow| slow.len() as u64);
    let all = [
        (UP.0, UP.1, Some(1)),
        ("device_bytes", "Size of the device.", device["size_bytes"].as_u64()),
        ("device_dirty_bytes", "Bytes that only the cache has.", device["dirty_bytes"].as_u64()),
        ("device_clients", "Connected clients.", device["clients"].as_u64()),
        ("device_slow_requests", "Requests not answered for 10 seconds.", slow),
        (
            "device_slow_requests_total",
            "Requests that were not answered for 10 seconds, since the start.",
            device["slow_requests_total"].as_u64(),
        ),
        (
            "device_stalled_lines",
            "Table lines whose write-back a device below has not answered for 10 seconds.",
            device["stalls"].as_array().map(|stalls| stalls.len() as u64),
        ),
        ("device_suspended", "1 while requests wait for resume.", Some(suspended.into())),
        ("device_writeback_failing", "1 while the origin refuses data.", Some(failing.into())),
    ];
    for (name, about, value) in all {
        if let Some(value) = value {
            add(metrics, name, about, format!("{labels} {value}"));
        }
    }
}

fn fact_metrics(metrics: &mut BTreeMap<String, Metric>, line: &Value, labels: &str) {
    for fact in line["facts"].as_array().into_iter().flatten() {
        let about = fact["about"].as_str().unwrap_or_default();
        let Some(name) = fact["name"].as_str().filter(|name| is_metric_name(name)) else {
            continue;
        };
        match &fact["value"] {
            Value::Number(value) => add(metrics, name, about, format!("{labels} {value}")),
            Value::Bool(value) => {
                add(metrics, name, about, format!("{labels} {}", u8::from(*value)));
            }
            Value::String(value) => {
                let labels = labels.trim_end_matches('}');
                let sample = format!("{labels},value=\"{}\"}} 1", escape(value));
                add(metrics, &format!("{name}_info"), about, sample);
            }
            _ => {}
        }
    }
}

fn add(metrics: &mut BTreeMap<String, Metric>, name: &str, about: &str, sample: String) {
    let metric = metrics.entry(name.to_owned()).or_default();
    if metric.about.is_empty() {
        metric.about = about.replace('\\', "\\\\").replace('\n', "\\n");
    }
    metric.samples.push(sample);
}

fn is_metric_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// A label's value, as the format wants it quoted.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_metric_is_described_once_for_all_devices() {
        let device = |name: &str, dirty: u64| {
            json!({
                "name": name, "state": "active", "size_bytes": 1024, "dirty_bytes": dirty,
                "clients": 0, "is_writeback_failing": false,
                "lines": [{ "start": 0, "target": "pcache", "facts": [
                    { "name": "cached_bytes", "value": 7, "about": "Bytes in the cache." },
                    { "name": "is_ordered", "value": true, "about": "Order." },
                    { "name": "medium", "value": "a \"b\"", "about": "Medium." },
                ]}],
            })
        };
        let text = text(&[device("a", 1), device("b", 2)], &["c".parse().unwrap()]);
        assert_eq!(text.matches("# HELP udm_cached_bytes Bytes in the cache.\n").count(), 1);
        for line in [
            "udm_cached_bytes{device=\"a\",start=\"0\",target=\"pcache\"} 7\n",
            "udm_is_ordered{device=\"b\",start=\"0\",target=\"pcache\"} 1\n",
            "udm_device_dirty_bytes{device=\"b\"} 2\n",
            "value=\"a \\\"b\\\"\"} 1\n",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
