//! Every command on real servers and clients. One program: its tests wait for servers more than
//! they compute, so they run side by side, and there is one thing to link.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../export/tests/common/front.rs"]
mod front;
#[path = "../../../engine/tests/golden/mod.rs"]
mod golden;
#[path = "../../../export/tests/common/mod.rs"]
mod nbd;

mod activation;
mod boot;
mod cache;
mod clients;
mod contract;
mod detach;
mod doctor;
mod exports;
mod formats;
mod hanging;
mod hostile;
mod kill;
mod lifecycle;
mod logs;
mod medium;
mod moved;
mod parts;
mod pcache;
mod readonly;
mod resize;
mod runtime_dir;
mod setup;
mod shrunk;
mod tables;
mod targets;
mod tls;
mod transcript;
mod ublk;
mod vhost;
mod wipe;
mod writecache;
mod zeroes;
