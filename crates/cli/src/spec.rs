//! The specification that `create` gives to the server that it starts.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use udm::base::attaching::AttachProgress;
use udm::sync::Arc;

/// A device to serve: written by `create`, read by the server.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Spec {
    /// The device's name.
    pub name: String,
    /// The table's text.
    pub table: String,
    /// The exports for clients.
    pub exports: Vec<String>,
    /// Connections served at most, if limited.
    pub queues: Option<u16>,
    /// Whether media that may hold something may be formatted.
    pub force_format: bool,
    /// The address where the server answers requests for metrics.
    pub metrics: Option<SocketAddr>,
    /// Progress of opening the device.
    #[serde(skip)]
    pub progress: Arc<AttachProgress>,
}
