#!/bin/bash
# Builds the tests of the workspace, then runs their programs, two at a time: most tests wait for
# servers that they started, which cargo's own order, one program after the other, leaves idle.
# What a program prints is shown when it ends. All of them run, whatever fails.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-4}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# A line for each program: its package's folder, where it expects to run, and its path.
"$cargo" test --workspace --locked --no-run --message-format=json-render-diagnostics |
  jq -r 'select(.profile.test? and .executable) | "\(.manifest_path | rtrimstr("/Cargo.toml")) \(.executable)"' |
  sort > "$logs/programs"
[ -s "$logs/programs" ]

run() {
  local folder=$1 program=$2 log status=0
  log=$3/${program##*/}
  cd "$folder"
  SECONDS=0
  CARGO_MANIFEST_DIR=$folder "$program" > "$log" 2>&1 < /dev/null || status=$?
  # One write, so that two programs' lines do not mix.
  { echo "== ${program##*/}: $SECONDS s"; cat "$log"; } > "$log.shown"
  cat "$log.shown"
  [ $status -eq 0 ] || echo "${program##*/} (status $status)" >> "$3/failed"
}
export -f run

# The longest first, so that it is not alone in the end.
{ grep /commands- "$logs/programs"; grep -v /commands- "$logs/programs"; } |
  xargs -P 2 -L 1 bash -c 'run "$1" "$2" "$0"' "$logs"
"$cargo" test --workspace --locked --doc
if [ -e "$logs/failed" ]; then
  echo "FAILED:" >&2
  cat "$logs/failed" >&2
  exit 1
fi
