# `make demo` shows what udm does, `make test` proves it; CONTRIBUTING.md explains the layers.

CARGO ?= cargo
PREFIX ?= /usr/local
# Where cargo puts programs.
BUILT = $(or $(CARGO_TARGET_DIR),target)/release
# Seconds per fuzz target for `make fuzz`, which takes SECONDS=n too.
FUZZ_SECONDS ?= $(or $(SECONDS),60)
# Seconds for `make torture`, which takes SECONDS=n too; CASES=1 replays the case of a SEED.
TORTURE_SECONDS ?= $(or $(SECONDS),120)
CASES ?= 1000000
# Seconds for `make soak`, which takes SECONDS=n too, and the seed that it begins with.
SOAK_SECONDS ?= $(or $(SECONDS),600)
SEED ?= $(shell date +%s)
# The crash-state explorer whole, with deliberate bugs to find. Its short form is a test like others,
# so `make prove` runs only the deliberate bugs, which the short form has to find.
EXPLORE = $(CARGO) test --locked -p udm --features mutants --test explore
# The same for the target cache.
CACHE_NET = $(CARGO) test --locked -p udm --features mutants --test cache
# Writes whose client changes its memory meanwhile, flushes that failed, and clients that wait, the
# same.
OTHER_NETS = $(CARGO) test --locked -p udm --features mutants --test pcache --test writecache -- \
  every_mutant a_bug_that
# Drains, and power cuts after orderly ends, the same.
ENDS = $(CARGO) test --locked -p udm --features mutants --test ends
# Flushes of disks, and requests that are parts of blocks, the same.
FLUSHES = $(CARGO) test --locked -p udm --features mutants --lib -- disk:: device::tests::telling device::tests::parts
# The simulation, with those deliberate bugs that it must find.
SIMULATE = $(CARGO) test --locked -p udm --features mutants --test simulate -- --own-mutants
# Interleavings of threads, and of memory accesses, with deliberate bugs to find. To optimize the
# code fully would take longer than the tests.
SCHEDULES = $(CARGO) test --locked -p udm --features mutants,shuttle \
  --config profile.dev.package.udm.opt-level=1 --lib schedules::
ORDERINGS = $(CARGO) test --locked -p udm --features mutants,loom --lib orderings:: \
  --config profile.dev.package.udm.opt-level=0
# Property tests try the same cases in each run; `make soak` tries others.
FIXED_SEEDS = PROPTEST_RNG_SEED=$${PROPTEST_RNG_SEED:-1}

CLIPPY = $(CARGO) clippy --workspace --all-targets --locked -- -D warnings
# The same with the features that the explorers are built with.
CLIPPY_NETS = \
  $(CARGO) clippy -p udm --features mutants --test explore --test cache --test pcache --test writecache --test ends \
    --locked -- -D warnings && \
  $(CARGO) clippy -p udm --features mutants,shuttle --lib --profile test --locked -- -D warnings && \
  $(CARGO) clippy -p udm --features mutants,loom --lib --profile test --locked -- -D warnings
# The pages of the libraries: every link leads somewhere.
DOC = RUSTDOCFLAGS="-D warnings" $(CARGO) doc -p udm -p udm-export --no-deps --locked

.PHONY: help build demo test prove lint fmt bench check-report install uninstall \
  deb service fio-engine lab fuzz explore schedules soak torture clean

help:
	@echo "make demo      a slow file becomes a fast, crash-safe block device (two minutes)"
	@echo "make test      everything that must hold: format, all tests, crash states"
	@echo "make prove     lints; the nets' own proof: every deliberate bug and race is found; torture (longer)"
	@echo "make lint      clippy, the links of the documentation, the licences and sources of dependencies"
	@echo "make fmt       formats the code"
	@echo "make bench     measures udm on this machine, beside what it is compared with; leaves report/"
	@echo "make check-report  opens that report in headless Chromium: every plot must be seen"
	@echo "make install   puts udm and libudm into PREFIX ($(PREFIX)); make uninstall removes them"
	@echo "make deb       Debian packages: udm, libudm0, libudm-dev, udm-bench"
	@echo "make service   these packages in a booted systemd container (root)"
	@echo "make fio-engine  fio's own engine for udm in process: target/fio/udm-fio.so"
	@echo "make lab       the kernel's dm-pcache opens what udm wrote, and the other way round (QEMU)"
	@echo "make explore   crash states and deliberate bugs; EXPLORE_SEED=n replays one history"
	@echo "make schedules interleavings of threads and deliberate races; CONTRIBUTING.md says how to replay"
	@echo "make torture   real servers that are killed, files that are moved, for SECONDS ($(TORTURE_SECONDS))"
	@echo "make soak      simulation, histories, crash states, threads, torture for SECONDS ($(SOAK_SECONDS)), from SEED"
	@echo "make fuzz      every fuzz target for SECONDS ($(FUZZ_SECONDS)) each"

build:
	$(CARGO) build --release

demo: build
	@scripts/install-tools.sh
	@scripts/demo.sh

test:
	@scripts/install-tools.sh
	$(CARGO) fmt --all --check
	rustfmt --check --edition 2024 lab/*.rs fuzz/fuzz_targets/*.rs
	@CARGO=$(CARGO) scripts/run-tests.sh

# Longer: lints, deliberate bugs and races that the tests must find, a quarter of the schedules,
# fuzzing, and 20 cases of servers that are killed. Each step has a limit, about five times what
# it takes on two idle cores (scripts/steps.sh).
prove:
	@scripts/install-tools.sh
	@$(FIXED_SEEDS) scripts/steps.sh \
	  clippy 900 '$(CLIPPY)' \
	  'clippy, engine features' 600 '$(CLIPPY_NETS)' \
	  'links of the documentation' 400 '$(DOC)' \
	  'hostile input' 600 'UDM_FUZZ_TIMES=10 $(CARGO) test --workspace --locked --test replay' \
	  'deliberate bugs of the explorer' 1500 '$(EXPLORE) every_mutant' \
	  'deliberate bugs of cache' 600 '$(CACHE_NET) every_mutant' \
	  'deliberate bugs of pcache and writecache' 600 '$(OTHER_NETS)' \
	  'orderly ends' 600 '$(ENDS)' \
	  simulation 600 '$(SIMULATE)' \
	  schedules 1500 'SCHEDULES_SHARE=4 $(SCHEDULES)' \
	  'memory orderings' 600 '$(ORDERINGS)' \
	  "fio's engine" 600 'scripts/fio-engine.sh check' \
	  'newer tools' 300 'scripts/newer-tools.sh check' \
	  torture 600 '$(MAKE) --no-print-directory torture TORTURE_SECONDS=500 SEED=1 CASES=20'

lint:
	$(CARGO) fmt --all --check
	rustfmt --check --edition 2024 lab/*.rs fuzz/fuzz_targets/*.rs
	$(CLIPPY)
	$(CLIPPY_NETS)
	$(DOC)
	@if $(CARGO) deny --version > /dev/null 2>&1; then \
	  $(CARGO) deny --offline check licenses bans sources; \
	else \
	  echo "WARNING: licences, bans and sources of dependencies were NOT checked:"; \
	  echo "WARNING: cargo-deny is not installed (cargo install --locked cargo-deny)."; \
	fi

fmt:
	$(CARGO) fmt --all
	rustfmt --edition 2024 lab/*.rs fuzz/fuzz_targets/*.rs

# Traces whose hit ratios docs/benchmarks.md shows; CONTRIBUTING.md says where they are from.
TRACES ?= traces
TRACE_FILES = $(wildcard $(addprefix $(TRACES)/,OLTP.lis.zst w106.trace.xz cloudPhysicsIO.csv))

# Each study in small, under ten minutes; `udm-bench all` takes its time.
bench: build
	@scripts/install-tools.sh
	@rm -rf report && mkdir report
	$(BUILT)/udm-bench all --small $(addprefix --trace ,$(TRACE_FILES)) \
	  --report report/index.html --json=report/bench.json --markdown report/summary.md \
	  --numbers report/numbers.json
	@if command -v chromium > /dev/null; then scripts/check-report.sh report/index.html; fi

check-report:
	@scripts/install-tools.sh report
	@[ -f report/index.html ] || $(MAKE) --no-print-directory bench
	@scripts/check-report.sh report/index.html

install: build
	@DESTDIR=$(DESTDIR) LIBDIR=$(LIBDIR) scripts/install.sh install $(PREFIX)

uninstall:
	@DESTDIR=$(DESTDIR) LIBDIR=$(LIBDIR) scripts/install.sh uninstall $(PREFIX)

deb:
	@CARGO=$(CARGO) scripts/deb.sh

# Not a part of `make test` or `make prove`: it boots a container.
service: deb
	@scripts/service.sh

fio-engine:
	@scripts/install-tools.sh
	@scripts/fio-engine.sh

lab: build
	@scripts/install-tools.sh lab
	@lab/test.sh

fuzz:
	@scripts/fuzz.sh $(FUZZ_SECONDS)

explore:
	$(EXPLORE) -- --nocapture
	$(FLUSHES)
	$(SIMULATE)

schedules:
	$(SCHEDULES) -- --nocapture
	$(ORDERINGS) -- --nocapture

torture:
	$(CARGO) test --workspace --locked --test torture -- \
	  --seconds $(TORTURE_SECONDS) --seed $(SEED) --cases $(CASES)

soak:
	@scripts/soak.sh $(SOAK_SECONDS) $(SEED)

clean:
	$(CARGO) clean
	rm -rf lab/scratch lab/results
