//! Every command on real servers and clients. One program: its tests wait for servers more than
//! they compute, so they run side by side, and there is one thing to link.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../torture/disks.rs"]
#[allow(dead_code)]
mod disks;
#[path = "../../../export/tests/common/front.rs"]
mod front;
#[path = "../../../engine/tests/golden/mod.rs"]
mod golden;
#[path = "../../../export/tests/common/mod.rs"]
mod nbd;

mod activation;
mod addresses;
mod bench;
mod boot;
mod cache;
mod calibration;
mod changed;
mod claims;
mod cleaned;
mod clients;
mod config;
mod config_apply;
mod config_stopped;
mod contract;
mod dead_ssd;
mod detach;
mod doctor;
mod drain;
mod durable;
mod exports;
mod force;
mod formats;
mod geometry;
mod hanging;
mod hostile;
mod identity;
mod idle;
mod kernel;
mod kill;
mod lifecycle;
mod logs;
mod manual;
mod medium;
mod moved;
mod numbers;
mod parts;
mod pcache;
mod readonly;
mod recovery;
mod replaced;
mod resize;
mod returned;
mod runtime_dir;
mod setup;
mod shrunk;
mod signals;
mod stalls;
mod tables;
mod targets;
mod through;
mod tls;
mod transcript;
mod ublk;
mod users;
mod vhost;
mod watch;
mod wipe;
mod writecache;
mod zeroes;

/// The program that these tests run.
const PROGRAM: &str = env!("CARGO_BIN_EXE_udm");
