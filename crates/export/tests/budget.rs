//! Memory that clients make a server use. All of it is accounted for the whole process, so these
//! tests have a process of their own, and run one after the other.

#![allow(clippy::unwrap_used)]

mod common;

use std::io::Read;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::Served;
use udm_export::budget::{BUDGET, BUDGET_BYTES};

const SIZE: u64 = 64 << 20;

/// Held by the test that runs. One that fails must not fail the others, so it may be poisoned.
static ALONE: Mutex<()> = Mutex::new(());

/// Bytes that the process has of memory, as the kernel counts them.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn an_announced_payload_takes_no_memory_before_it_comes() {
    let _alone = ALONE.lock();
    let served = Served::start(SIZE);
    let before = (resident(), BUDGET.used());
    let mut boasters: Vec<_> = (0..24).map(|_| served.client()).collect();
    let payload = vec![5; 32 << 20];
    for boaster in &mut boasters {
        boaster.send(&common::request(0, 1, 1, 0, 32 << 20));
        boaster.send(&payload[..4096]);
    }
    served.client().check();
    assert!(BUDGET.used() - before.1 < 1 << 20, "{} bytes are used", BUDGET.used());
    let grown = resident().saturating_sub(before.0);
    assert!(grown < 96 << 20, "{} MiB for 24 requests of which 4 KiB came", grown >> 20);
    // One of them goes on.
    boasters[0].send(&payload[4096..]);
    assert_eq!(boasters[0].reply(0).error, 0);
    boasters[0].send(&common::request(0, 0, 2, (32 << 20) - 4096, 4096));
    assert_eq!(boasters[0].reply(4096).data, payload[..4096]);
}

#[test]
fn clients_share_one_budget_and_who_finds_nothing_left_is_told() {
    let _alone = ALONE.lock();
    let served = Served::start(SIZE);
    served.device.begin_suspend().unwrap();
    // Reads of 32 MiB that wait in a suspended device: some have memory, the rest waits.
    let mut greedy: Vec<_> = (0..24).map(|_| served.client()).collect();
    for client in &mut greedy {
        client.send(&common::request(0, 0, 1, 0, 32 << 20));
    }
    served.wait_until("the budget is used", |_| BUDGET.used() > BUDGET_BYTES - (32 << 20));
    assert!(BUDGET.used() <= BUDGET_BYTES);
    let start = Instant::now();
    let is_refused = |client: &mut common::Client| {
        client.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let mut head = [0; 16];
        client.stream.read_exact(&mut head).is_ok_and(|()| head[4..8] == 12_u32.to_be_bytes())
    };
    let mut refused = 0;
    while refused == 0 && start.elapsed() < Duration::from_secs(60) {
        refused = greedy.iter_mut().filter_map(|client| is_refused(client).then_some(())).count();
    }
    assert!(refused > 0, "no client gets the error ENOMEM");
    while !served.device.finish_suspend().unwrap() {}
    served.device.resume().unwrap();
    // A small request does not use the budget.
    served.client().check();
    drop(greedy);
    served.wait_until("all is given back", |_| BUDGET.used() == 0);
}
