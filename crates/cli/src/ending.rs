//! `Drain` and `Remove`: write-back of dirty data, and the orderly end.
//!
//! 1. A drain waits for the data that was dirty when it began. It ends even if clients never stop
//!    writing.
//! 2. A drain succeeds when this data is durable on the origin, with the writes that bypassed the
//!    cache.
//! 3. A removal with `drain` drains twice: first while clients are connected, if they may be
//!    (`force`), and again after the exports are closed. The second pass is short, and leaves no
//!    dirty data.
//! 4. A removal that fails does not change the device: its exports are open again.
//! 5. There is one removal at a time. It gives way to a signal, and while it still writes back also
//!    to a removal by force.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use serde::Deserialize;
use serde_json::json;
use udm::units::human_bytes;

use crate::log;
use crate::server::{Server, Stop};
use crate::work::{Ending, Progress, WORK_SILENCE_MAX, Watch};

/// Time between two progress answers.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// How long a client that has hung up may still count as connected: its program has ended, and the
/// next command may well be `remove`.
const GOODBYE_MAX: Duration = Duration::from_secs(1);
/// Time between two checks whether it is gone.
const GOODBYE_EVERY: Duration = Duration::from_millis(10);

/// The parameters of `Remove`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Removal {
    #[serde(default)]
    drain: bool,
    #[serde(default)]
    force: bool,
    #[serde(default)]
    wipe: bool,
}

/// Writes the data that is dirty now to the origin, durably, with progress answers.
pub fn drain(server: &Server, progress: &mut Progress<'_, '_>) -> Result<()> {
    write_back(server, false, progress)?;
    let served = &server.served;
    if served.is_suspended() && served.is_durable() {
        return Ok(());
    }
    let flush = |watch: &Watch| {
        while is_in_renewal(server)? {
            watch.check()?;
            thread::sleep(PROGRESS_EVERY);
        }
        served.flush()
    };
    progress.watched("Drain", WORK_SILENCE_MAX, &|| 0, flush)
}

/// Whether the device is suspended for the moment in which its memory is renewed. An error if it is
/// suspended for another reason.
fn is_in_renewal(server: &Server) -> Result<bool> {
    let was_renewing = server.is_renewing.load(Ordering::SeqCst);
    let suspended = server.served.refuse_suspended();
    let is_renewing = was_renewing || server.is_renewing.load(Ordering::SeqCst);
    match suspended {
        Err(error) if !is_renewing || server.served.is_stopping() => Err(error),
        suspended => Ok(suspended.is_err()),
    }
}

/// Writes back the data that is dirty now, for a removal or not.
fn write_back(server: &Server, is_removal: bool, progress: &mut Progress<'_, '_>) -> Result<()> {
    let served = &server.served;
    let _draining = served.start_draining();
    loop {
        let (left, dirty) = (served.left_to_drain(), served.dirty());
        progress.report(json!({
            "left_bytes": left,
            "dirty_bytes": dirty.bytes,
            "is_failing": dirty.is_failing,
            "waits_for": served.waits_for(),
        }))?;
        if let Some(why) = served.why_not_drained() {
            bail!(why);
        }
        if left == 0 {
            return Ok(());
        }
        if served.is_stopping() {
            bail!("the device is being removed");
        }
        if is_removal {
            served.refuse_overtaken()?;
        }
        // A suspended device does not write back.
        is_in_renewal(server)?;
        thread::sleep(PROGRESS_EVERY);
    }
}

/// Begins the end, unless clients are connected or another removal is under way.
pub fn remove(
    server: &Server,
    removal: &Removal,
    progress: &mut Progress<'_, '_>,
) -> Result<Ending> {
    let overtakes = removal.force && !removal.drain;
    let _ends = server.served.begin_end(overtakes, progress.is_gone)?;
    let ending = begin(server, removal, progress).inspect_err(|error| {
        let why = format!("{error:#}");
        let why = why.strip_prefix("not removed: ").unwrap_or(&why);
        log::line(&format!("{}: not removed: {why}", server.name()));
    })?;
    server.served.end_for_good();
    Ok(ending)
}

fn begin(server: &Server, remove: &Removal, progress: &mut Progress<'_, '_>) -> Result<Ending> {
    if remove.wipe {
        refuse_wipe(server, remove)?;
    }
    refuse_clients(server, remove)?;
    if remove.drain {
        write_back(server, true, progress)?;
        refuse_clients(server, remove)?;
        server.served.close_exports();
    }
    let trouble = come_to_rest(server, remove, progress).inspect_err(|_| {
        if let Err(error) = server.served.reopen_exports() {
            log::line(&format!("{}: {error:#}", server.name()));
        }
    })?;
    let (asked, result) = sync_channel(0);
    let ending = Ending { result, wipe: Arc::default() };
    let wipe = remove.wipe.then(|| Arc::clone(&ending.wipe));
    let stop = Stop::Removed { asked, trouble, wipe };
    server.stop.send(stop).map_err(|_| anyhow!("the server is ending"))?;
    Ok(ending)
}

/// Brings the device to rest, if that does not lose data; after `drain`, with all data on the
/// origin. Returns the errors of an end by force.
fn come_to_rest(
    server: &Server,
    remove: &Removal,
    progress: &mut Progress<'_, '_>,
) -> Result<Option<String>> {
    let served = &server.served;
    if remove.drain {
        // Data that clients wrote until the exports were closed.
        write_back(server, true, progress)?;
    }
    if !remove.force {
        refuse_loss(server)?;
    }
    if (progress.is_gone)() {
        bail!("the caller has disconnected");
    }
    served.begin_rest()?;
    rest(server, remove.force && !remove.drain, progress).and_then(|trouble| {
        if remove.drain && served.dirty().bytes > 0 {
            served.go_on()?;
            if served.ends_for_good() {
                bail!("not removed: the server ends on a signal");
            }
            bail!(
                "not removed: some dirty data is not written back yet; the device still serves: \
                 run the command again"
            );
        }
        Ok(trouble)
    })
}

/// An error if a device below was deleted, and data would end with this server.
fn refuse_loss(server: &Server) -> Result<()> {
    let served = &server.served;
    if served.would_lose_data() {
        bail!(
            "the cache device was deleted, and {} of dirty data would be lost with this server: \
             use --drain to write them back first, or --force to lose them",
            human_bytes(served.dirty().bytes)
        );
    }
    if served.would_lose_origin() {
        let why = served.why_not_drained();
        bail!("{}, or use --force to lose it", why.unwrap_or_else(|| "it was deleted".into()));
    }
    Ok(())
}

/// Returns an error if the device's cache cannot be wiped, however clean it is.
fn refuse_wipe(server: &Server, remove: &Removal) -> Result<()> {
    let served = &server.served;
    if !remove.drain || remove.force {
        bail!("a cache is wiped only after it was drained, and never by force");
    }
    if served.cache().is_none() {
        bail!("the device has no cache to wipe");
    }
    if served.is_read_only() {
        bail!("its devices are read-only, so they cannot be wiped");
    }
    match served.quarantined_bytes() {
        0 => Ok(()),
        bytes => bail!(
            "{} of its dirty data were damaged in the cache, and the origin has older data there: \
             a wipe would erase the list of these ranges, which `udm inspect` prints",
            human_bytes(bytes)
        ),
    }
}

/// Brings the device to rest for its end. If that fails, or the caller is gone, the service
/// continues, so that a failed removal does not change the device. With `force` the device ends
/// anyway, and the answer lists the errors.
fn rest(server: &Server, force: bool, progress: &mut Progress<'_, '_>) -> Result<Option<String>> {
    let served = &server.served;
    let carry_out = |watch: &Watch| {
        let rested = served.rest_durably(watch);
        let is_wanted = watch.check();
        match (rested, is_wanted) {
            (Ok(()), Ok(())) => Ok(None),
            (Err(error), Ok(())) if force => Ok(Some(format!("{error:#}"))),
            (rested, is_wanted) => {
                let why = rested.and(is_wanted).map_or_else(|error| error, |()| anyhow!("?"));
                let Err(error) = served.go_on() else { return Err(why) };
                // If the caller is gone, the answer with this error is lost.
                log::line(&format!("{}: {error:#}", server.name()));
                Err(anyhow!("{why:#}; and {error:#}"))
            }
        }
    };
    let rested = progress.watched("Remove", WORK_SILENCE_MAX, &|| 0, carry_out);
    let rested = rested.and_then(|trouble| match (progress.is_gone)() {
        true => Err(anyhow!("the caller has disconnected")),
        false => Ok(trouble),
    });
    // A beat that could not be sent has hidden the result of the work, which may be a rest.
    if rested.is_err()
        && let Err(error) = served.go_on()
    {
        log::line(&format!("{}: {error:#}", server.name()));
    }
    rested.map_err(|error| {
        if served.ends_for_good() {
            return anyhow!("not removed: {error:#}; the server ends on a signal");
        }
        let name = server.name();
        anyhow!(
            "not removed: {error:#}; the device still serves, `udm remove --force {name}` ends it"
        )
    })
}

fn refuse_clients(server: &Server, remove: &Removal) -> Result<()> {
    match clients_that_stay(server, remove.force) {
        0 => Ok(()),
        1 => bail!("1 client is connected; disconnect it first, or use --force"),
        n => bail!("{n} clients are connected; disconnect them first, or use --force"),
    }
}

/// Clients that are connected and have not just hung up; with `force`, they do not count.
fn clients_that_stay(server: &Server, force: bool) -> u64 {
    if force {
        return 0;
    }
    let deadline = Instant::now() + GOODBYE_MAX;
    loop {
        let clients = server.served.clients();
        if clients == 0 || Instant::now() >= deadline {
            return clients;
        }
        thread::sleep(GOODBYE_EVERY);
    }
}
