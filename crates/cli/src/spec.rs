//! What `create` hands to the server that it starts.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use udm::attaching::AttachProgress;
use udm::sync::Arc;

/// What to serve: written by `create`, read by the server.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Spec {
    /// The device's name.
    pub name: String,
    /// The table's text.
    pub table: String,
    /// Ways in for clients.
    pub exports: Vec<String>,
    /// Connections served at most, if limited.
    pub queues: Option<u16>,
    /// Whether media that may hold something may be formatted.
    pub force_format: bool,
    /// Where metrics are answered.
    pub metrics: Option<SocketAddr>,
    /// Progress of opening the device.
    #[serde(skip)]
    pub progress: Arc<AttachProgress>,
}
