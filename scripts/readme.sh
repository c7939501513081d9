#!/bin/bash
# Types the README's first five minutes, command by command, into a shell, and fails where one of
# them does. UDM=/path/to/udm is the program to try (default: the release build).
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
root=$(cd "$(dirname "$0")/.." && pwd)
udm=$(realpath "${UDM:-$root/target/release/udm}")

# The folders that the README names become ours, so that nothing of the user's is touched.
work=$(mktemp -d "/tmp/udm-readme.XXXXXX")
memory=$(mktemp -d "/dev/shm/udm-readme.XXXXXX")
export UDM_RUNTIME_DIR=$work/run UDM_STATE_DIR=$work/state
mkdir -m 700 "$UDM_RUNTIME_DIR"
cleanup() {
  local code=$? pid
  trap - EXIT
  pid=$("$udm" info vol --json 2> /dev/null | grep -o '"pid": *[0-9]*' | grep -o '[0-9]*') || true
  [ -z "$pid" ] || kill -9 "$pid" 2> /dev/null || true
  rm -rf "$work" "$memory"
  exit $code
}
trap cleanup EXIT

mkdir "$work/bin"
ln -s "$udm" "$work/bin/udm"
{
  echo "set -euo pipefail"
  # Code is what is indented by four blanks. Building and PATH are done already.
  sed -n '/^## The first five minutes/,/^## How fast/p' "$root/README.md" | sed -n 's/^    //p' |
    grep -v -e '^make build$' -e '^PATH=' |
    sed -e "s#/tmp/first#$work/first#g" -e "s#/dev/shm/fast.img#$memory/fast.img#g"
} > "$work/typed"
[ "$(wc -l < "$work/typed")" -gt 10 ] || { echo "the README has no first five minutes" >&2; exit 1; }
PATH=$work/bin:$PATH bash -v "$work/typed" 2>&1 | tee "$work/output"
grep -q '^hello$' "$work/output" || { echo "the greeting did not come back" >&2; exit 1; }
