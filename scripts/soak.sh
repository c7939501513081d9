#!/bin/bash
# The long forms of the tests that take a seed, on all cores: half of the time for the simulation
# of the whole system, half for crash states.
#
#   scripts/soak.sh [SECONDS [SEED]]
#
# Each prints what it went through, and on failure one line that replays it, made as short as it
# gets. Put the seed into the list of regressions together with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-600}
seed=${2:-1}
half=$(((seconds + 1) / 2))

# Optimised, but with every assertion; in a folder of its own, so that nothing else is rebuilt.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/soak
export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true
export CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true
export CARGO_PROFILE_RELEASE_LTO=off

echo "== simulation: $half seconds from seed $seed"
cargo test -q --release --locked -p udm --test simulate -- --seconds "$half" --seed "$seed"

echo "== crash states: $half seconds from seed $seed"
EXPLORE_SECONDS=$half EXPLORE_SEED=$seed \
  cargo test -q --release --locked -p udm --features mutants --test explore soak -- \
  --ignored --nocapture
