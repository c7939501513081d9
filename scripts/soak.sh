#!/bin/bash
# The long forms of the tests that take a seed: a tenth of the time each for the simulation of the
# whole system, for real threads on small caches, for histories of busy pcaches and writecaches, for
# crash states, for those of the target cache, for schedules of threads, for changed inputs of the
# fuzz targets, for property tests, and for torture.
#
#   scripts/soak.sh [SECONDS [SEED]]
#
# Each prints what it went through, and on failure one line that replays it, made as short as it
# gets. Put the seed into the list of regressions together with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-600}
seed=${2:-1}
part=$(((seconds + 9) / 10))

# Optimised, but with every assertion; in a folder of its own, so that nothing else is rebuilt.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/soak
export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true
export CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true
export CARGO_PROFILE_RELEASE_LTO=off

echo "== simulation: $part seconds from seed $seed"
cargo test -q --release --locked -p udm --test simulate -- --seconds "$part" --seed "$seed"

echo "== threads: $part seconds from seed $seed"
THREADS_SECONDS=$part THREADS_SEED=$seed \
  cargo test -q --release --locked -p udm --test threads soak -- --ignored --nocapture

echo "== busy pcaches: $part seconds from seed $seed"
PCACHE_SECONDS=$part PCACHE_FROM=$seed \
  cargo test -q --release --locked -p udm --test pcache soak -- --ignored --nocapture

echo "== busy writecaches: $part seconds from seed $seed"
WRITECACHE_SECONDS=$part WRITECACHE_FROM=$seed \
  cargo test -q --release --locked -p udm --test writecache soak -- --ignored --nocapture

echo "== crash states: $part seconds from seed $seed"
EXPLORE_SECONDS=$part EXPLORE_SEED=$seed \
  cargo test -q --release --locked -p udm --features mutants --test explore soak -- \
  --ignored --nocapture

echo "== crash states of cache: $part seconds from seed $seed"
CACHE_SECONDS=$part CACHE_FROM=$seed \
  cargo test -q --release --locked -p udm --test cache soak -- --ignored --nocapture

echo "== schedules: $part seconds from seed $seed"
SCHEDULES_SECONDS=$part SCHEDULES_SEED=$seed \
  cargo test -q --release --locked -p udm --features mutants,shuttle --lib schedules::soak -- \
  --ignored --nocapture

# Eight targets, two at a time.
echo "== changed inputs: $part seconds from seed $seed"
UDM_FUZZ_SECONDS=$(((part + 3) / 4)) UDM_FUZZ_SEED=$seed \
  cargo test -q --release --locked -p udm-fuzz-harness --test replay -- --test-threads=2 --nocapture

echo "== property tests: $part seconds from seed $seed"
end=$((SECONDS + part))
for ((at = seed; SECONDS < end; at++)); do
  echo "property tests: PROPTEST_RNG_SEED=$at"
  PROPTEST_RNG_SEED=$at cargo test -q --release --locked -p udm -p udm-export --lib
done

# Those that the normal tests leave out, once.
echo "== all studies, small"
cargo test -q --release --locked -p udm-bench -p udm --test bench --test cache_memory -- --ignored

echo "== torture: $part seconds from seed $seed"
cargo test -q --release --locked -p udm-cli --test torture -- --seconds "$part" --seed "$seed"
