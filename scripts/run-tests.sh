#!/bin/bash
# Builds the tests of the workspace, then runs their programs, three at a time: most tests wait for
# servers that they started, which cargo's own order, one program after the other, leaves idle.
# The examples in the documentation are one more program, which cargo builds while others run.
# What a program prints is shown when it ends. All of them run, whatever fails. A program that hangs
# is ended after PROGRAM_SECONDS, and what it printed names the test.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-4}
# Who builds again and again has what cargo keeps for that, and goes on with it. Else nothing is
# kept: a first build takes a fifth less time then.
[ -n "$(ls "${CARGO_TARGET_DIR:-target}/debug/incremental" 2> /dev/null)" ] || export CARGO_INCREMENTAL=0
export PROGRAM_SECONDS=${PROGRAM_SECONDS:-1200}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# A line for each program: its package's folder, where it expects to run, a tab, and its path.
"$cargo" test --workspace --locked --no-run --message-format=json-render-diagnostics |
  jq -r 'select(.profile.test? and .executable) | "\(.manifest_path | rtrimstr("/Cargo.toml"))\t\(.executable)"' |
  sort > "$logs/programs"
[ -s "$logs/programs" ]

run() {
  local folder=${1%%$'\t'*} program=${1##*$'\t'} logs=$2 log status=0
  log=$logs/${program##*/}
  SECONDS=0
  if [ "$program" = examples ]; then
    "$cargo" test --workspace --locked --doc > "$log" 2>&1 < /dev/null || status=$?
  else
    cd "$folder"
    CARGO_MANIFEST_DIR=$folder timeout -k 10 "$PROGRAM_SECONDS" "$program" > "$log" 2>&1 < /dev/null || status=$?
  fi
  [ $status -ne 124 ] || echo "ended after $PROGRAM_SECONDS s: a test hangs" >> "$log"
  # One write, so that two programs' lines do not mix.
  { echo "== ${program##*/}: $SECONDS s"; cat "$log"; } > "$log.shown"
  cat "$log.shown"
  [ $status -eq 0 ] || echo "${program##*/} (status $status)" >> "$logs/failed"
}
export -f run
export cargo

# The longest first, so that it is not alone in the end.
{ grep /commands- "$logs/programs"; echo examples; grep -v /commands- "$logs/programs"; } |
  xargs -P 3 -n 1 -d '\n' bash -c 'run "$1" "$0"' "$logs"
if [ -e "$logs/failed" ]; then
  echo "FAILED:" >&2
  cat "$logs/failed" >&2
  exit 1
fi
