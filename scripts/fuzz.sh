#!/bin/bash
# Runs every fuzz target for the given number of seconds (default 60) each.
#
#   scripts/fuzz.sh [SECONDS [TARGET...]]
#
# It starts from fuzz/seeds and keeps what it finds in fuzz/corpus (not committed). A crash is
# saved in fuzz/artifacts: put the file into fuzz/seeds/TARGET, where `make test` replays it for
# ever, together with the fix.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true

if ! cargo fuzz --version > /dev/null 2>&1; then
  echo "cargo-fuzz is missing: cargo install --locked cargo-fuzz" >&2
  exit 1
fi
if ! rustup toolchain list 2> /dev/null | grep -q nightly; then
  echo "libFuzzer's instrumentation needs a nightly compiler: rustup toolchain install nightly" >&2
  exit 1
fi

targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(ls fuzz/seeds)
for target in "${targets[@]}"; do
  echo "== $target: $seconds seconds"
  mkdir -p "fuzz/corpus/$target"
  cargo +nightly fuzz run --sanitizer none "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
    -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=4096 -malloc_limit_mb=300 \
    -print_final_stats=1
done
