#!/bin/bash
# Puts the main numbers of the last `make bench` into docs/bench-numbers.json, and from there into
# README.md (one table) and docs/benchmarks.md (one table for each question, and every missed target),
# between their marks. The test that compares the documents with the numbers
# (crates/bench/tests/readme.rs) writes them.
#
#   make bench TRACES=/path/to/traces && scripts/readme-numbers.sh
#   scripts/readme-numbers.sh docs/bench-numbers.json     shows the same numbers again
#   scripts/readme-numbers.sh some.json                   if it has some studies only, these are renewed
set -euo pipefail
cd "$(dirname "$0")/.."
numbers=${1:-report/numbers.json}
kept=docs/bench-numbers.json
[ -s "$numbers" ] || { echo "$numbers is not there; run: make bench TRACES=/path/to/traces" >&2; exit 1; }
some=$(mktemp)
trap 'rm -f "$some"' EXIT
jq --slurpfile kept "$kept" '. as $new | $kept[0] | map(.study.name as $name |
  (first($new[] | select(.study.name == $name)) // .))' "$numbers" > "$some"
[ "$(jq length "$numbers")" -ge "$(jq length "$kept")" ] || numbers=$some
for trace in OLTP w106 cloudPhysicsIO; do
  grep -qF "\"$trace: " "$numbers" || {
    echo "$numbers has no hit ratios of the trace $trace; run: make bench TRACES=/path/to/traces" >&2
    exit 1
  }
done
[ "$numbers" -ef "$kept" ] || cp "$numbers" "$kept"
UDM_RENEW_NUMBERS=1 ${CARGO:-cargo} test -q --locked -p udm-bench --test readme
