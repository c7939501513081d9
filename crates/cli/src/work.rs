//! Work of a server that may take long. Once a second the caller gets a beat, which is an answer
//! that reports that the work continues. After too long without progress, the caller gets an error.
//! Commands give up when a server is silent.
//!
//! 1. A separate thread sends the beats, so they are sent even while the working thread waits for a
//!    device, a lock or a thread. They are sent only to callers that accept several answers. It
//!    checks whether other callers are gone.
//! 2. When a beat cannot be sent, the caller is gone. The work notices that in its [`Watch`] and
//!    cancels what it can, and its answer is not sent.
//! 3. After the allowed time without progress, the caller gets an error, and the work is given up
//!    as well: its thread may hang in the kernel, and cannot be interrupted there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use serde_json::{Value, json};
use udm::base::attaching::AttachProgress;

use crate::control::Answer;

/// Time between two beats.
const BEAT_EVERY: Duration = Duration::from_secs(1);

/// Time between two checks whether the caller of an ending device is gone.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Sends an answer; fails when the caller is gone.
pub type Say<'a> = dyn FnMut(Answer) -> Result<()> + Send + 'a;

/// How long a change of a device may take without any progress.
pub const WORK_SILENCE_MAX: Duration = Duration::from_secs(60);

/// Whether the work was given up.
#[derive(Debug, Default)]
pub struct Watch {
    is_given_up: AtomicBool,
}

impl Watch {
    /// Returns an error after the work was given up.
    pub fn check(&self) -> Result<()> {
        if self.is_given_up() {
            bail!("the caller has disconnected");
        }
        Ok(())
    }

    /// Whether the work is given up: the caller is gone, or got the error about the missing
    /// progress.
    pub fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::SeqCst)
    }
}

/// A piece of work, and the condition for it to count as hanging.
pub struct Work<'a> {
    /// The method, for messages.
    pub what: &'a str,
    /// The longest time without progress.
    pub silence_max: Duration,
    /// Changes when the work makes progress.
    pub moved: &'a (dyn Fn() -> u64 + Sync),
    /// Returns the fields of a beat, in addition to the seconds without progress, as an object.
    pub tell: &'a (dyn Fn() -> Value + Sync),
    /// Whether the caller wants beats.
    pub more: bool,
    /// Whether the caller has hung up, for one without beats.
    pub is_gone: &'a (dyn Fn() -> bool + Sync),
}

/// Does `work`, and sends beats meanwhile, if there can be one more thread. The error of the outer
/// result is the reason why the caller cannot get an answer any more.
pub fn watched<T>(
    work: &Work<'_>,
    say: &mut Say<'_>,
    carry_out: impl FnOnce(&Watch) -> T,
) -> Result<T> {
    let watch = Watch::default();
    let (done, is_done) = channel::<()>();
    thread::scope(|scope| {
        let watch = &watch;
        let beats = move || beat(work, watch, say, &is_done);
        let beating = thread::Builder::new().name("beats".into()).spawn_scoped(scope, beats);
        let result = carry_out(watch);
        drop(done);
        match beating.map(ScopedJoinHandle::join) {
            Err(_) => Ok(result),
            Ok(Ok(heard)) => heard.map(|()| result),
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
        }
    })
}

/// The end of a device. The main thread carries it out, even if the caller goes away.
pub struct Ending {
    /// Receives the result of the end.
    pub result: Receiver<Result<Value>>,
    /// The progress of the wipe.
    pub wipe: Arc<AttachProgress>,
}

impl Ending {
    /// Waits for the end, and sends beats with the rest of the wipe meanwhile.
    pub fn wait(
        &self,
        more: bool,
        is_gone: &(dyn Fn() -> bool + Sync),
        silence_max: Duration,
        say: &mut Say<'_>,
    ) -> Result<Result<Value>> {
        let Ending { result, wipe } = self;
        let moved = || wipe.look().map_or(0, |step| step.done + 1);
        let tell = || json!({ "wipe_bytes": wipe.left() });
        let work = Work { what: "Remove", silence_max, moved: &moved, tell: &tell, more, is_gone };
        watched(&work, say, |watch| {
            loop {
                match result.recv_timeout(LOOK_EVERY) {
                    Err(RecvTimeoutError::Timeout) => watch.check()?,
                    ended => return ended?,
                }
            }
        })
    }
}

/// Sends beats until the work is done.
fn beat(work: &Work<'_>, watch: &Watch, say: &mut Say<'_>, is_done: &Receiver<()>) -> Result<()> {
    let (mut seen, mut since) = ((work.moved)(), Instant::now());
    while is_done.recv_timeout(BEAT_EVERY) == Err(RecvTimeoutError::Timeout) {
        let now = (work.moved)();
        let mut silence = since.elapsed();
        if now != seen {
            (seen, since, silence) = (now, Instant::now(), Duration::ZERO);
        }
        let said = if silence >= work.silence_max {
            let seconds = work.silence_max.as_secs();
            let hanging = anyhow!(
                "{}: no progress for {seconds} s: a device does not answer; the server continues, \
                 see its log and the kernel log",
                work.what
            );
            say(Answer::failed(&hanging)).and(Err(hanging))
        } else if work.more {
            let mut beat = (work.tell)();
            beat["seconds"] = json!(silence.as_secs());
            say(Answer::so_far(beat))
        } else if (work.is_gone)() {
            Err(anyhow!("the caller has disconnected"))
        } else {
            continue;
        };
        if said.is_err() {
            watch.is_given_up.store(true, Ordering::SeqCst);
            return said;
        }
    }
    Ok(())
}

/// Sends the answers before the last one.
pub struct Progress<'a, 'b> {
    pub(crate) more: bool,
    pub(crate) send: &'a mut Say<'b>,
    /// Whether the caller has hung up.
    pub(crate) is_gone: &'a (dyn Fn() -> bool + Sync),
    pub(crate) lost: Option<anyhow::Error>,
}

impl Progress<'_, '_> {
    /// Does `work` with beats in between.
    pub fn watched<T>(
        &mut self,
        what: &str,
        silence_max: Duration,
        moved: &(dyn Fn() -> u64 + Sync),
        carry_out: impl FnOnce(&Watch) -> Result<T>,
    ) -> Result<T> {
        let (more, is_gone) = (self.more, self.is_gone);
        let work = Work { what, silence_max, moved, tell: &|| json!({}), more, is_gone };
        match watched(&work, self.send, carry_out) {
            Ok(result) => result,
            Err(lost) => {
                self.lost = Some(lost);
                bail!("the caller has disconnected")
            }
        }
    }

    /// Sends an answer before the last one, if the caller accepts several. Returns an error if the
    /// caller is gone.
    pub fn report(&mut self, value: Value) -> Result<()> {
        let reported = match self.more {
            true => (self.send)(Answer::so_far(value)),
            false if (self.is_gone)() => Err(anyhow!("the caller has disconnected")),
            false => Ok(()),
        };
        reported.map_err(|error| {
            self.lost = Some(error);
            anyhow!("the caller has disconnected")
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn work(silence_max: Duration, more: bool) -> Work<'static> {
        let is_gone = &|| false;
        Work { what: "load", silence_max, moved: &|| 0, tell: &|| json!({}), more, is_gone }
    }

    /// Waits until the work is given up.
    fn endless(watch: &Watch) {
        while !watch.is_given_up() {
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_is_done_at_once_beats_never() {
        let mut said = 0;
        let mut say = |_| {
            said += 1;
            Ok(())
        };
        let begun = Instant::now();
        assert_eq!(watched(&work(BEAT_EVERY * 100, true), &mut say, |_| 7).unwrap(), 7);
        // One for each whole second that the machine took for that: none.
        assert!(said <= begun.elapsed().as_secs(), "{said} in {:?}", begun.elapsed());
    }

    #[test]
    fn a_caller_who_is_gone_ends_the_work() {
        let mut say = |_| bail!("gone");
        let result = watched(&work(BEAT_EVERY * 100, true), &mut say, endless);
        assert_eq!(result.unwrap_err().to_string(), "gone");
    }

    #[test]
    fn a_caller_without_beats_is_missed_too() {
        let mut send = |_| bail!("nothing is sent");
        for is_gone in [false, true] {
            let is_gone = || is_gone;
            let mut progress =
                Progress { more: false, send: &mut send, is_gone: &is_gone, lost: None };
            assert_eq!(progress.report(json!({})).is_err(), is_gone());
            assert_eq!(progress.lost.is_some(), is_gone());
        }
    }

    #[test]
    fn a_caller_without_beats_who_is_gone_ends_the_work() {
        let mut say = |_| bail!("nothing is sent");
        let work = Work { is_gone: &|| true, ..work(BEAT_EVERY * 100, false) };
        let error = watched(&work, &mut say, endless).unwrap_err();
        assert_eq!(error.to_string(), "the caller has disconnected");
    }

    #[test]
    fn hanging_work_is_said_and_given_up() {
        let mut said = Vec::new();
        let mut say = |answer: Answer| {
            said.push(answer);
            Ok(())
        };
        let error = watched(&work(BEAT_EVERY, false), &mut say, endless).unwrap_err();
        assert!(error.to_string().contains("load: no progress"), "{error}");
        assert!(said.len() == 1 && !said[0].continues && said[0].error.is_some(), "{said:?}");
    }

    #[test]
    fn work_that_moves_is_waited_for() {
        let moved = std::sync::atomic::AtomicU64::new(0);
        let look = || moved.fetch_add(1, Ordering::SeqCst);
        let tell = || json!({ "wipe_bytes": 7 });
        let silence_max = Duration::from_millis(1);
        let is_gone = &|| false;
        let (moved, tell) = (&look, &tell);
        let work = Work { what: "load", silence_max, moved, tell, more: true, is_gone };
        let (beat, beats) = channel();
        let mut say = |answer: Answer| {
            assert!(answer.continues && answer.parameters["wipe_bytes"] == 7, "{answer:?}");
            let _ = beat.send(());
            Ok(())
        };
        let begun = Instant::now();
        watched(&work, &mut say, |_| wait_for_two(&beats)).unwrap();
        let count = 2 + beats.try_iter().count() as u64;
        assert!(count <= begun.elapsed().as_secs(), "{count} in {:?}", begun.elapsed());
    }

    fn wait_for_two(beats: &Receiver<()>) {
        (0..2).for_each(|_| beats.recv_timeout(Duration::from_secs(60)).unwrap());
    }

    /// An end whose wipe has begun.
    fn ending() -> (std::sync::mpsc::SyncSender<Result<Value>>, Ending) {
        let (sender, result) = std::sync::mpsc::sync_channel(0);
        let wipe = Arc::<AttachProgress>::default();
        wipe.begin("bytes", 100);
        wipe.advance(30);
        (sender, Ending { result, wipe })
    }

    #[test]
    fn a_wipe_tells_what_is_left() {
        let (sender, ending) = ending();
        let mut left = Vec::new();
        let (beat, beats) = channel();
        let mut say = |answer: Answer| {
            assert!(answer.continues);
            left.push(answer.parameters["wipe_bytes"].as_u64().unwrap());
            if left.len() < 2 {
                ending.wipe.advance(50);
            }
            let _ = beat.send(());
            Ok(())
        };
        thread::scope(|scope| {
            scope.spawn(move || {
                wait_for_two(&beats);
                sender.send(Ok(json!(7))).unwrap();
            });
            let ended = ending.wait(true, &|| false, BEAT_EVERY * 100, &mut say).unwrap();
            assert_eq!(ended.unwrap(), 7);
        });
        assert_eq!(left[..2], [70, 20]);
        assert!(left[2..].iter().all(|left| *left == 20), "{left:?}");
    }

    #[test]
    fn an_end_goes_on_without_its_caller_and_a_dead_one_is_no_answer() {
        let (_sender, ending) = ending();
        let mut say = |_| bail!("gone");
        let error = ending.wait(true, &|| false, BEAT_EVERY * 100, &mut say).unwrap_err();
        assert_eq!(error.to_string(), "gone");
        // The thread that carries out the end is gone.
        let (sender, ending) = self::ending();
        drop(sender);
        let mut say = |_| Ok(());
        assert!(ending.wait(true, &|| false, BEAT_EVERY * 100, &mut say).unwrap().is_err());
    }
}
