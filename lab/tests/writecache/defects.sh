# Defects B, C, C2 and E of dm-writecache, in mode s, each by the steps that show it in the kernel,
# tried on udm in the machine. What udm leaves, after a power cut too, the kernel opens without an
# error, and it reads the newest.
. "$here/power.sh"

# machine PAYLOAD-AND-OPTIONS...: over disks that lose all that was not flushed, and end with it.
machine() {
  local code disks=()
  console=$work/console
  disk vda "$origin" nothing
  disk vdb "$cache" nothing
  echo "--- $*"
  "$here/run-vm.sh" -t 400 -d "nbd:$work/vda.sock" -d "nbd:$work/vdb.sock" -s "$work:host" "$@" \
    > "$console" 2>&1
  code=$?
  grep -q 'LAB: start' "$console" || kill "${disks[@]}" 2> /dev/null
  wait "${disks[@]}"
  sed 's/^/    /' "$console"
  [ $code = 0 ] || die "the virtual machine's payload ended with code $code"
}
# tried WHO STEP...; and the same with a power cut in the end.
tried() { machine "$here/guest/defects.sh" "$@"; }
cut_off() { machine -k 'LAB: cut now' "$here/guest/defects.sh" "$@" cut; }
# opened STEP...: by the kernel, which holds back what it would write to the origin.
opened() { machine "$here/guest/writecache.sh" "$sectors" s 4096 frozen "$@"; }
# newest DEFECT OPS: the kernel opens what was left, reads the newest of OPS and writes that back.
newest() {
  opened "check:$2" hash release drain remove origin
  same "$1: the kernel reads the newest" "$(said LOGICAL)" "$(sha_of "$model")"
  same "$1: and writes it back" "$(said ORIGIN)" "$(sha_of "$model")"
}
media() { begin_writecache s 4096 $((8 * MiB)) $((8 * MiB)); }

# B: blocks are committed, written over, and all under write-back to an origin that is stuck. Then
# a flush is acknowledged.
overwritten() {
  media
  echo "q 0 4096 64 262144 4096 p 100 0
s" > "$work/first"
  echo "q 0 4096 64 262144 4096 p 200 0" > "$work/second"
  echo s > "$work/flush"
  cat "$work/first" "$work/second" "$work/flush" > "$work/all"
  cut_off "$1" attach:max_age,10000,autocommit_time,3600000,pause_writeback,0 hold run:first \
    run:second "$2" run:flush
}
(
  overwritten udm busy
  opened check:all hash release drain status remove origin
  same "B: the kernel's write-back" "$(said ORIGIN)" "$(said LOGICAL)"
) || exit 1
# The steps do show it, where it is.
(
  overwritten kernel stuck
  if (opened check:all); then die "B: dm-writecache lost nothing: these steps show nothing"; fi
  grep -q 'may hold Version' "$console" || die "B: the steps end otherwise"
  echo "ok: B: dm-writecache loses what it has flushed"
) || exit 1

# C: a write of several blocks, of which the second, and later some in between, are cached and not
# committed. C2: write-back begins while the oldest block is not committed.
(
  media
  for at in $(seq 0 65536 4194304); do
    echo "w $((at + 4096)) 4096 p $at
w $at 16384 p $((at + 1))
w $((at + 8192)) 4096 p $((at + 2))
w $at 32768 p $((at + 3))"
    [ $((at / 65536 % 8)) = 0 ] && echo s
  done > "$work/pairs"
  echo s >> "$work/pairs"
  expect_after pairs
  cut_off udm attach:autocommit_time,3600000,high_watermark,100,low_watermark,100 run:pairs
  newest C pairs
) || exit 1
(
  media
  operations young 41 1500 65536 fs4
  expect_after young
  cut_off udm attach:max_age,1,autocommit_time,3600000,pause_writeback,0 run:young
  newest C2 young
) || exit 1

# E: the origin fails during write-back, and is well again later. Nothing waits for ever.
(
  media
  operations failed 42 200 65536 fs4
  expect_after failed
  tried udm attach: run:failed fail flush:1 error:1 suspend heal error:0 flush:0 clean remove origin
  same "E: the origin has everything" "$(said ORIGIN)" "$(sha_of "$model")"
  kernel status hash remove
  same "E: the kernel reads it" "$(said LOGICAL)" "$(sha_of "$model")"
) || exit 1
