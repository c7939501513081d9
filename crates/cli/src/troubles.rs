//! Sentences about the troubles of the devices below, from the facts of their targets.

use udm::device::{Device, LineFacts};
use udm::target::FactValue;
use udm::units::human_bytes;
use udm_export::nbd::CONNECTIONS_MAX;

use crate::loading::attach_notes;
use crate::rlimits;
use crate::served::Served;
use crate::stalls::Stall;

impl Served {
    /// Notes for the user about the new device: one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let note = "the cache is in volatile memory: a power cut loses it, with its dirty data";
        let volatile = self.has_flag("medium_is_volatile").then(|| note.to_owned());
        let of_exports = self.exports().into_iter().flat_map(|export| export.notes);
        let of_table = self.first_notes();
        let of_attach = attach_notes(self.device());
        let connections = (self.exports().len() * CONNECTIONS_MAX) as u64;
        let of_limits = rlimits::notes(&self.given_table(), connections);
        let notes = volatile.into_iter().chain(of_table).chain(of_attach);
        notes.chain(of_exports).chain(of_limits).collect()
    }

    /// Whether the cache device was deleted and holds data that no other device has: it is lost
    /// when the service ends.
    pub fn would_lose_data(&self) -> bool {
        self.dirty().bytes > 0 && self.has_flag("medium_is_deleted")
    }

    /// Whether the slow device was deleted, so that all it holds ends with the service.
    pub fn would_lose_origin(&self) -> bool {
        self.has_flag("origin_is_deleted")
    }

    /// The troubles of the devices below, other than failing I/O: one sentence each.
    pub fn troubles(&self) -> Vec<String> {
        let facts = self.device().facts();
        let facts = || facts.iter().flat_map(|line| &line.facts);
        let told = facts().filter_map(|fact| match (fact.name, &fact.value) {
            (
                "medium_failure" | "medium_refusal" | "metadata_failure" | "origin_failure"
                | "origin_missing",
                FactValue::Text(text),
            ) => Some(text.clone()),
            ("medium_is_deleted", FactValue::Flag(true)) => Some(
                "the cache device was deleted: its data is lost when this server ends".to_owned(),
            ),
            _ => None,
        });
        told.chain(self.stalls().iter().map(Stall::to_string)).collect()
    }

    /// The origins whose path leads elsewhere: one sentence each.
    pub fn missing_origins(&self) -> Vec<String> {
        let facts = self.device().facts();
        let facts = facts.iter().flat_map(|line| &line.facts);
        let told = facts.filter_map(|fact| match &fact.value {
            FactValue::Text(text) if fact.name == "origin_missing" => Some(text.clone()),
            _ => None,
        });
        told.collect()
    }

    /// The reason why a drain cannot bring dirty data to the origin that users expect, if there is
    /// one.
    pub fn why_not_drained(&self) -> Option<String> {
        let facts = self.device().facts();
        let text = |name: &str| text_of(&facts, name);
        let dirty = human_bytes(self.dirty().bytes);
        if self.dirty().bytes == 0 {
            return text("origin_missing");
        }
        if let Some(failure) = text("medium_failure") {
            return Some(format!(
                "{failure}; it held {dirty} of dirty data, and this server cannot write them back: \
                 `udm remove --force`, then `udm recover`, writes back the readable part"
            ));
        }
        // The file that is open fails, and another one is at its path.
        let missing = || text("origin_missing").filter(|_| self.dirty().is_failing);
        let failure = text("origin_failure").or_else(missing)?;
        Some(format!("{failure}; {dirty} of dirty data stay in the cache"))
    }

    /// The reason why the cache device cannot be read or trusted, if there is one.
    pub fn medium_failure(&self) -> Option<String> {
        text_of(&self.device().facts(), "medium_failure")
    }

    /// Damaged dirty data that no device has.
    pub fn quarantined_bytes(&self) -> u64 {
        let facts = self.device().facts();
        let all = facts.iter().flat_map(|line| &line.facts);
        let numbers = all.filter_map(|fact| match (fact.name, &fact.value) {
            ("quarantined_bytes", FactValue::Number(bytes)) => Some(*bytes),
            _ => None,
        });
        numbers.sum()
    }

    fn has_flag(&self, name: &str) -> bool {
        let facts = self.device().facts();
        let mut all = facts.iter().flat_map(|line| &line.facts);
        all.any(|fact| fact.name == name && fact.value == FactValue::Flag(true))
    }
}

/// The first fact of this name, if it is a text.
fn text_of(facts: &[LineFacts], name: &str) -> Option<String> {
    let mut all = facts.iter().flat_map(|line| &line.facts);
    all.find_map(|fact| match &fact.value {
        FactValue::Text(text) if fact.name == name => Some(text.clone()),
        _ => None,
    })
}

/// The reason why a device without a server cannot be drained completely, if there is one.
pub fn why_stuck(device: &Device) -> Option<String> {
    let facts = device.facts();
    text_of(&facts, "medium_failure").or_else(|| text_of(&facts, "origin_failure"))
}
