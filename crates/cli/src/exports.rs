//! The exports of a served device, and the facts that commands print about them.

use serde_json::{Value, json};
use udm::target::{Fact, FactValue};
use udm_export::Export;

/// The exports.
#[derive(Debug, Default)]
pub struct Exports {
    /// The open exports.
    pub open: Vec<Box<dyn Export>>,
    /// The service is about to end: no more exports are opened.
    pub are_shut: bool,
}

/// The state of an export at one moment.
#[derive(Clone, Debug)]
pub struct OpenExport {
    /// Its address, as `udm unexport` takes it.
    pub uri: String,
    /// The same as clients write it.
    pub client_uri: String,
    /// How many clients use it.
    pub clients: u64,
    /// Its other facts.
    pub facts: Vec<Fact>,
    /// Notes for the user who opens the export.
    pub notes: Vec<String>,
}

impl OpenExport {
    /// The state of `export`.
    pub fn of(export: &dyn Export) -> OpenExport {
        let uri = export.uri();
        OpenExport {
            client_uri: uri.for_clients(),
            uri: uri.to_string(),
            clients: export.clients(),
            facts: export.facts(),
            notes: export.notes(),
        }
    }

    /// In the form of the control protocol.
    pub fn json(&self) -> Value {
        json!({
            "uri": self.uri,
            "client_uri": self.client_uri,
            "clients": self.clients,
            "facts": self.facts.iter().map(fact_json).collect::<Vec<_>>(),
            "notes": self.notes,
        })
    }

    fn value(&self, name: &str) -> Option<&FactValue> {
        self.facts.iter().find(|fact| fact.name == name).map(|fact| &fact.value)
    }

    fn number(&self, name: &str) -> u64 {
        match self.value(name) {
            Some(FactValue::Number(number)) => *number,
            _ => 0,
        }
    }

    /// The number of clients that broke the protocol, and the last one's violation.
    pub fn violations(&self) -> (u64, Option<&str>) {
        (self.number("violations"), self.text("last_violation"))
    }

    /// The error in newer certificates, which are not used.
    pub fn certificates_problem(&self) -> Option<&str> {
        self.text("certificates_problem")
    }

    /// The number of clients that have sent requests that are not whole blocks.
    pub fn unaligned_clients(&self) -> u64 {
        self.number("unaligned_clients")
    }

    fn text(&self, name: &str) -> Option<&str> {
        match self.value(name) {
            Some(FactValue::Text(text)) => Some(text),
            _ => None,
        }
    }
}

/// A fact in the form of the control protocol.
pub fn fact_json(fact: &Fact) -> Value {
    let value = match &fact.value {
        FactValue::Number(number) => json!(number),
        FactValue::Flag(flag) => json!(flag),
        FactValue::Text(text) => json!(text),
        FactValue::Nothing => Value::Null,
    };
    json!({ "name": fact.name, "value": value, "about": fact.about })
}
