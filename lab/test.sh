#!/bin/bash
# The kernel as judge: runs the tests of lab/tests against the real targets.
#
#   lab/test.sh [NAME...]      all of them, or those: pcache/killed, or killed for both targets'
#
# LAB_KERNEL (default: bzImage in LAB_SCRATCH) is the kernel, UDM (default: the release build) the
# program under test, LAB_MEDIA (default /dev/shm) where media files are made, LAB_JOBS (default 1)
# how many tests run in parallel. What each test said is in lab/results/NAME.log.
set -u
here=$(cd "$(dirname "$0")" && pwd)
export LAB_SCRATCH=${LAB_SCRATCH:-$here/scratch}
export LAB_KERNEL=${LAB_KERNEL:-$LAB_SCRATCH/bzImage}
if [ ! -e "$LAB_KERNEL" ]; then
  echo "No kernel: LAB_KERNEL=/path/to/bzImage make lab, or build one with lab/build-kernel.sh" >&2
  exit 1
fi
mkdir -p "$LAB_SCRATCH"
exec 9> "$LAB_SCRATCH/lock"
flock -n 9 || { echo "The lab is in use: another lab/test.sh holds $LAB_SCRATCH/lock" >&2; exit 1; }
"$here/mktools.sh" > /dev/null || exit 1
results=$here/results
mkdir -p "$results"

# A name without a folder is that of a test in any.
names=()
[ $# -gt 0 ] || set -- '*'
for wanted in "$@"; do
  found=0
  for file in "$here"/tests/$wanted.sh "$here"/tests/*/$wanted.sh; do
    [ -e "$file" ] || continue
    name=${file#"$here"/tests/}
    names+=("${name%.sh}") found=1
    mkdir -p "$(dirname "$results/$name")"
  done
  [ $found = 1 ] || { echo "lab/tests has no $wanted" >&2; exit 1; }
done

run_one() {
  local start=$SECONDS
  if (set -u; . "$here/lib.sh"; . "$here/tests/$1.sh") > "$results/$1.log" 2>&1; then
    printf '%-26s ok      %4d s\n' "$1" $((SECONDS - start))
  else
    printf '%-26s FAILED  %4d s   %s\n' "$1" $((SECONDS - start)) \
      "$(grep FAIL "$results/$1.log" | tail -1) (lab/results/$1.log)"
    return 1
  fi
}

# Who interrupts the lab ends its machines and servers too.
trap 'trap - INT TERM; kill 0' INT TERM

failed=0
for name in "${names[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "${LAB_JOBS:-1}" ]; do
    wait -n || failed=1
  done
  run_one "$name" 9>&- &
done
while [ -n "$(jobs -rp)" ]; do wait -n || failed=1; done
exit $failed
