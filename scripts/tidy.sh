#!/bin/bash
# The test `tidy` without the rest of the build: seconds instead of minutes, before each commit.
set -euo pipefail
cd "$(dirname "$0")/../crates/engine"
program=$(mktemp)
trap 'rm -f "$program"' EXIT
rustc --edition 2024 -O --test tests/tidy.rs -o "$program"
CARGO_MANIFEST_DIR=$PWD "$program" --quiet
