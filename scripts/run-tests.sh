#!/bin/bash
# Builds the tests of the workspace, then runs their programs, three at a time: most tests wait for
# servers that they started, which cargo's own order, one program after the other, leaves idle.
# The examples in the documentation are one more program, which cargo builds while others run.
# The output of a program is shown when the program ends. All programs run, even if one fails. A
# program that hangs is ended after its limit, with the stacks of its threads in its output.
# A table at the end has the time and the limit of each program; a list has what was skipped, and
# why.
set -euo pipefail
cd "$(dirname "$0")/.."
export cargo=${CARGO:-cargo}
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-4}
# Property tests try the same cases in each run; `make soak` tries others.
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-1}
# Incremental builds continue where they exist. Otherwise nothing is kept for them: a first build
# then takes a fifth less time.
[ -n "$(ls "${CARGO_TARGET_DIR:-target}/debug/incremental" 2> /dev/null)" ] || export CARGO_INCREMENTAL=0
# Limits are about five times what a program takes on two idle cores. On a busy machine, multiply.
export LIMIT_FACTOR=${LIMIT_FACTOR:-1}
logs=$(mktemp -d)
export logs
trap 'rm -rf "$logs"' EXIT

# The limit of a program, in seconds.
limit_of() {
  case $1 in
    commands) echo 1500 ;;
    explore | hotpath) echo 600 ;;
    bench | pcache | simulate) echo 500 ;;
    cache | cache_memory | examples | udm | writecache) echo 250 ;;
    *) echo 120 ;;
  esac
}
export -f limit_of

# A line for each program: its package's folder, where it expects to run, a tab, and its path.
scripts/limited.sh $((1500 * LIMIT_FACTOR)) "$cargo" test --workspace --locked --no-run \
  --message-format=json-render-diagnostics > "$logs/messages" || {
  cat "$logs/messages"
  exit 1
}
jq -r 'select(.profile.test? and .executable) | "\(.manifest_path | rtrimstr("/Cargo.toml"))\t\(.executable)"' \
  "$logs/messages" | sort > "$logs/programs"
[ -s "$logs/programs" ]

run() {
  local folder=${1%%$'\t'*} program=${1##*$'\t'} name limit log status=0 outcome=ok words=()
  name=${program##*/}
  name=${name%-*}
  limit=$(($(limit_of "$name") * LIMIT_FACTOR))
  log=$logs/${program##*/}
  SECONDS=0
  if [ "$program" = examples ]; then
    scripts/limited.sh "$limit" "$cargo" test --workspace --locked --doc > "$log" 2>&1 < /dev/null || status=$?
  else
    # Tests that pass show their output, too, because it may say what they skipped.
    case $name in
      simulate | torture) ;;
      *) words=(--show-output) ;;
    esac
    CARGO_MANIFEST_DIR=$folder scripts/limited.sh "$limit" env --chdir="$folder" "$program" \
      "${words[@]}" > "$log" 2>&1 < /dev/null || status=$?
  fi
  case $status in
    0) ;;
    124) outcome="LIMIT REACHED" ;;
    *) outcome="FAILED ($status)" ;;
  esac
  printf '%s\t%s\t%s\t%s\n' "  $name" "$SECONDS" "$limit" "$outcome" >> "$logs/table"
  [ $status -eq 0 ] || echo "${program##*/} (status $status)" >> "$logs/failed"
  grep -a '^SKIPPED' "$log" | sort -u | sed "s/^/  $name: /" >> "$logs/skipped" || true
  # One write, so that the lines of two programs do not mix. Of tests that pass, only their names.
  {
    echo "== ${program##*/}: $SECONDS s"
    awk '/^successes:$/ { off = 1 } /^(failures:|test result: .*)$/ { off = 0 } !off' "$log"
  } > "$log.shown"
  cat "$log.shown"
}
export -f run

# The longest first, so that it is not alone in the end.
{ grep /commands- "$logs/programs"; echo examples; grep -v /commands- "$logs/programs"; } |
  xargs -P 3 -n 1 -d '\n' bash -c 'run "$0"'
if [ -s "$logs/skipped" ]; then
  echo "SKIPPED on this machine:"
  cat "$logs/skipped"
fi
if [ -n "${UDM_STEPS:-}" ]; then
  cat "$logs/table" >> "$UDM_STEPS"
else
  scripts/step-table.sh "$logs/table"
fi
if [ -e "$logs/failed" ]; then
  echo "FAILED:" >&2
  cat "$logs/failed" >&2
  exit 1
fi
