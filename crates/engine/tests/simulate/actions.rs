//! Steps that are not requests: changes of state, deaths, faults, checks of the whole.

use udm::bio::Op;
use udm::device::DeviceState;
use udm::disk::{Effect, Fault};
use udm::error::{Kind, Status};
use udm::pcache::layout::Geometry;
use udm::prng::Prng;
use udm::table::Table;

use crate::cached;
use crate::oracle::SECTOR;
use crate::plan::{Action, Engine, OriginFault, Rot};
use crate::run::{Outcome, Run, Stop, wrong};

impl Run {
    pub fn rare(&mut self, action: &Action, prng: &mut Prng) -> Outcome {
        match *action {
            Action::Suspend => {
                self.suspend(prng)?;
            }
            Action::Resume => self.resume()?,
            Action::Message(number) => self.message(number)?,
            Action::Look => self.look()?,
            Action::Load => self.load(prng)?,
            Action::Drain => self.drain(prng)?,
            Action::Remove { forgets } => self.remove(forgets, prng)?,
            Action::Kill { keeps, again } => self.kill(keeps, again, prng)?,
            Action::PowerCut { fences, again } if fences == 0 || self.setup.is_on_disk() => {
                // A disk lacks fences, so any moment will do.
                for _ in 0..fences * 4 {
                    self.step_fixture(false, prng)?;
                }
                let pmem = self.machine.pmem.clone();
                self.power_cut(&pmem, again, prng)?;
            }
            Action::PowerCut { fences, again } => {
                self.machine.pmem.arm_cut(fences);
                (self.is_cut_armed, self.cut_again) = (true, again);
            }
            Action::OriginAlone => self.origin_alone(prng)?,
            Action::Scan => self.scan(prng)?,
            Action::Fault(fault) => self.inject(fault),
            Action::Heal => self.heal(),
            Action::Rot(rot) => self.rot(rot, prng),
            Action::Poison { is_data, bytes } => self.poison(is_data, bytes, prng),
            Action::MediumFails { after } => {
                self.fail_medium(after, prng);
            }
            Action::Io { .. } | Action::Pump { .. } | Action::Pass { .. } | Action::Settle => {}
        }
        Ok(())
    }

    /// Suspends; whether that came to its end.
    fn suspend(&mut self, prng: &mut Prng) -> Outcome<bool> {
        if let Err(error) = self.server().device.begin_suspend() {
            return wrong(format!("suspend: {error}"));
        }
        let (deaths, is_due) = (self.tally.deaths, self.is_healthy());
        let is_done = self.run_until(prng, |run| {
            if run.tally.deaths > deaths {
                return Ok(true);
            }
            match run.server().device.finish_suspend() {
                Ok(is_done) => Ok(is_done),
                // Full: the background goes on and makes room.
                Err(error) if error.kind() == Kind::NoSpace => Ok(false),
                Err(_) if run.has_medium_failed => Ok(false),
                Err(error) => wrong(format!("suspend: {error}")),
            }
        })?;
        if self.tally.deaths > deaths {
            return Ok(false);
        }
        if !is_done && is_due && !self.is_damaged {
            return wrong(format!("suspend does not end: {}", self.tell()));
        }
        Ok(is_done)
    }

    fn resume(&mut self) -> Outcome {
        let result = self.server().device.resume();
        result.or_else(|error| wrong(format!("resume: {error}")))
    }

    /// Requests that wait go on with another table.
    fn load(&mut self, prng: &mut Prng) -> Outcome {
        let deaths = self.tally.deaths;
        if !self.suspend(prng)? {
            return if self.tally.deaths > deaths { Ok(()) } else { self.resume() };
        }
        let text = self.setup.table(prng);
        let table = self.machine.build(&self.setup, &text, true);
        let loaded = table.and_then(|table| self.server().device.load(table));
        match loaded {
            Err(_) if self.has_medium_failed => return self.resume(),
            loaded => loaded.or_else(|error| wrong(format!("load {text}: {error}")))?,
        }
        match self.server().device.resume() {
            Ok(()) => Ok(()),
            // After a refusal the earlier table stays active.
            Err(error) if cached::is_refusal(&error.to_string()) => self.resume(),
            // Only a new server goes on after some failures.
            Err(_) if self.has_medium_failed => {
                let pmem = self.machine.pmem.clone();
                self.power_cut(&pmem, 0, prng)
            }
            Err(error) => wrong(format!("resume with {text}: {error}")),
        }
    }

    fn message(&mut self, number: u32) -> Outcome {
        if self.setup.is_plain() {
            return Ok(());
        }
        let is_pcache = self.setup.is_pcache();
        let (words, is_valid) = match is_pcache {
            _ if self.setup.is_cache() => {
                let words = [["migration_threshold", "512"], ["sequential_threshold", "x"]];
                let nth = number as usize % 2;
                (words[nth].map(String::from).to_vec(), nth == 0)
            }
            true => (vec!["gc_percent".to_string(), number.to_string()], number <= 90),
            false => {
                let words = ["flush", "clear_stats", "flush_on_suspend", "nonsense"];
                let word = words[number as usize % words.len()];
                (vec![word.to_string()], word != "nonsense")
            }
        };
        let is_suspended = self.state() != DeviceState::Active;
        let sector = self.setup.cuts.0;
        let result = self.server().device.message(sector, &words);
        let is_excused = self.has_medium_failed || !is_pcache && is_suspended;
        if result.is_ok() == is_valid || is_excused {
            return Ok(());
        }
        wrong(format!("message {words:?}: {result:?}"))
    }

    fn look(&mut self) -> Outcome {
        let device = self.server().device.clone();
        let (status, table) = (device.status(), device.table());
        let (facts, info) = (device.facts(), device.info());
        let words = match self.setup.engine {
            Engine::Pcache { .. } => 12..13,
            Engine::Cache { .. } => 22..40,
            Engine::Writecache { .. } | Engine::Plain => 17..18,
        };
        let nth = usize::from(self.setup.is_cut());
        let is_told = |line: &String| words.contains(&line.split(' ').count());
        let is_whole = status.len() == 1 + 2 * nth && table.len() == status.len();
        if self.setup.is_plain() {
            return Ok(());
        }
        if !is_whole || !is_told(&status[nth]) || facts[nth].facts.is_empty() {
            return wrong(format!("status {status:?}, table {table:?}, info {info:?}"));
        }
        let other = Table::parse("0 8 zero").expect("a table");
        if !self.setup.is_pcache() {
            return Ok(());
        }
        match device.check_load(&other) {
            Err(error) if error.kind() == Kind::Unsupported => Ok(()),
            other => wrong(format!("a pcache may be replaced: {other:?}")),
        }
    }

    fn drain(&mut self, prng: &mut Prng) -> Outcome {
        if self.state() != DeviceState::Active {
            self.resume()?;
        }
        self.settle(prng)?;
        self.server().device.set_draining(true);
        let is_due = self.is_healthy();
        let mut deaths = self.tally.deaths;
        let is_done = self.run_until(prng, |run| {
            // The next server does not know the order that the last one got.
            if run.tally.deaths > deaths {
                deaths = run.tally.deaths;
                run.server().device.set_draining(true);
            }
            Ok(run.server().device.dirty().bytes == 0 && !run.has_requests())
        })?;
        self.server().device.set_draining(false);
        if self.is_damaged {
            let image = self.machine.image(&self.machine.disk);
            return self.oracle.check_known(&image).map_err(|what| told("origin: ", &what));
        }
        if !is_due || !self.is_healthy() {
            return Ok(());
        }
        if !is_done {
            return wrong(format!("drain does not end: {}", self.tell()));
        }
        // Even if the power failed meanwhile: drained data is durable.
        self.faulty_since = None;
        let mut images = vec![self.machine.image(&self.machine.disk)];
        // Writes that bypassed a cache wait for a client's flush.
        if self.setup.is_pcache() {
            images.push(self.machine.image(&self.machine.disk.crash(prng)));
        }
        for image in images {
            self.oracle.check_current(&image).map_err(|what| told("drained origin: ", &what))?;
        }
        Ok(())
    }

    fn remove(&mut self, forgets: bool, prng: &mut Prng) -> Outcome {
        if self.has_medium_failed {
            let pmem = self.machine.pmem.clone();
            return self.power_cut(&pmem, 0, prng);
        }
        // A power cut that comes in the middle is another history.
        self.is_cut_armed = false;
        if !self.suspend(prng)? {
            return self.resume();
        }
        if let Err(error) = self.server().device.remove() {
            return wrong(format!("remove: {error}"));
        }
        self.set_removing(true);
        let is_done = self.run_until(prng, |run| Ok(!run.has_requests()))?;
        if !is_done {
            return wrong(format!("requests survive their device: {}", self.tell()));
        }
        self.set_removing(false);
        drop(self.take_server());
        self.forget_requests();
        // Data that is not cached is as safe as on any disk: a suspend does not flush it. The
        // target `cache` flushes no more than its metadata needs.
        if !self.setup.is_bare() && !self.setup.is_cache() {
            self.oracle.removed();
        }
        if forgets {
            self.machine.forget_shared();
        }
        self.attach(0, prng)
    }

    fn kill(&mut self, keeps: bool, again: u64, prng: &mut Prng) -> Outcome {
        if self.has_medium_failed {
            let pmem = self.machine.pmem.clone();
            return self.power_cut(&pmem, again, prng);
        }
        self.tally.deaths += 1;
        let mut server = self.take_server();
        self.machine.end_io(&mut server, prng);
        server.die();
        self.forget_requests();
        if !keeps {
            self.machine.forget_shared();
        }
        if !keeps || self.is_orphaned {
            self.oracle.lose_unflushed(false);
        }
        self.attach(again, prng)
    }

    fn origin_alone(&mut self, prng: &mut Prng) -> Outcome {
        let image = self.machine.image(&self.machine.disk.crash(prng));
        if self.is_alone_checked() {
            return self.oracle.check_alone(&image).map_err(Stop::Wrong);
        }
        self.oracle.check_known(&image).map_err(|what| told("origin: ", &what))
    }

    fn scan(&mut self, prng: &mut Prng) -> Outcome {
        let (sectors, clients) = (self.setup.sectors(), self.setup.clients as u64);
        for first in (0..sectors).step_by(2048) {
            let client = prng.below(clients) as usize;
            self.submit(client, Op::Read, first, (sectors - first).min(2048), false, prng)?;
        }
        self.settle(prng)
    }

    fn inject(&mut self, fault: OriginFault) {
        let of = |fault: Fault, op: Option<Op>| op.map_or(fault.clone(), |op| fault.of(op));
        let fault = match fault {
            OriginFault::Fails { op, first, count, times } => {
                let start = first * SECTOR as u64;
                let end = start.saturating_add(count * SECTOR as u64);
                of(Fault::new(Effect::Fail(Status::Io)), op).within(start..end).times(times)
            }
            OriginFault::Tears { times } => Fault::new(Effect::Tear(Status::Io)).times(times),
            OriginFault::Sticks { op, times } => of(Fault::new(Effect::Stick), op).times(times),
        };
        if self.setup.is_cut() {
            self.machine.aside.inject(fault.clone());
        }
        self.machine.disk.inject(fault);
        self.faulty_until = u64::MAX;
        self.faulty_since.get_or_insert(self.now);
    }

    pub fn heal(&mut self) {
        if self.faulty_until == u64::MAX {
            self.machine.disk.heal();
            self.machine.aside.heal();
            self.faulty_until = self.tally.moves;
        }
        self.machine.pmem.heal();
    }

    /// The cache does not take what it is given any more.
    fn fail_medium(&mut self, after: u64, prng: &mut Prng) {
        self.has_medium_failed = true;
        if !self.setup.is_on_disk() {
            return self.machine.pmem.fail_drains_from(after);
        }
        let op = if prng.one_in(4) { Op::Read } else { Op::Write };
        let fault = Fault::new(Effect::Fail(Status::Io)).times(1 + after);
        let is_meta = self.setup.is_cache() && prng.one_in(2);
        let medium = if is_meta { &self.machine.meta } else { &self.machine.ssd };
        let op = if self.setup.is_cache() && prng.one_in(2) { Op::Flush } else { op };
        medium.inject(fault.of(op));
    }

    fn geometry(&self) -> Geometry {
        let Engine::Pcache { segment_bytes, .. } = self.setup.engine else {
            unreachable!("only a pcache is damaged")
        };
        Geometry { segment_bytes, device_bytes_min: 0 }
    }

    fn any_segment(&self, prng: &mut Prng) -> u32 {
        let Engine::Pcache { segments, .. } = self.setup.engine else {
            unreachable!("only a pcache is damaged")
        };
        prng.below(segments) as u32
    }

    /// A place of 512 bytes that holds data or zeroes: rot there must be noticed. Rot of the
    /// newest key set looks like a torn append, so records are left alone.
    fn place_of_data(&self, prng: &mut Prng) -> Option<u64> {
        let geometry = self.geometry();
        (0..64).find_map(|_| {
            let segment = self.any_segment(prng);
            let places = u64::from(geometry.data_bytes()) / SECTOR as u64;
            let at = geometry.data_at(segment) + prng.below(places) * SECTOR as u64;
            let bytes = self.machine.pmem.peek(at, SECTOR);
            let is_uniform = bytes[16..] == bytes[..SECTOR - 16];
            let is_zero_wanted = prng.one_in(8);
            let is_zero = bytes[..16] == [0; 16];
            (is_uniform && is_zero == is_zero_wanted).then_some(at)
        })
    }

    fn rot(&mut self, rot: Rot, prng: &mut Prng) {
        let at = match rot {
            Rot::Data => self.place_of_data(prng).map(|at| at + prng.below(SECTOR as u64)),
            Rot::Record => {
                let segment = self.any_segment(prng);
                let geometry = self.geometry();
                let nth = prng.below(2);
                let (at, stride, len) = match prng.below(5) {
                    0 => (8192, 4096, 24),
                    1 => (16384, 16, 16),
                    2 => (16416, 16, 16),
                    3 => (geometry.segment_info_at(segment), 4096, 16),
                    _ => (geometry.generation_at(segment), 16, 16),
                };
                Some(at + nth * stride + prng.below(len))
            }
        };
        if let Some(at) = at {
            let bit = prng.below(8);
            self.machine.pmem.corrupt(at, |byte| byte ^ 1 << bit);
            self.is_orphaned |= (8192..16384).contains(&at);
            self.is_damaged = true;
        }
    }

    fn poison(&mut self, is_data: bool, bytes: u64, prng: &mut Prng) {
        let room = self.setup.cache_bytes() - bytes;
        let at = match is_data {
            true => self.place_of_data(prng),
            // Not the label: without it the ranges that were damaged before are unknown.
            false => Some(4096 + prng.below(room - 4096)),
        };
        if let Some(at) = at {
            self.machine.pmem.poison(at, bytes);
            self.is_damaged = true;
        }
    }

    /// The end of every history: all is well again, and everything is where it belongs.
    pub fn finish(&mut self, prng: &mut Prng) -> Outcome {
        self.heal();
        if self.has_medium_failed {
            let pmem = self.machine.pmem.clone();
            self.power_cut(&pmem, 0, prng)?;
        }
        if self.state() != DeviceState::Active {
            self.resume()?;
        }
        self.settle(prng)?;
        self.drain(prng)?;
        self.remove(true, prng)?;
        self.scan(prng)
    }
}

fn told(where_to: &str, what: &str) -> Stop {
    Stop::Wrong(format!("{where_to}{what}"))
}
