# The harness itself: what the kernel alone wrote is judged right, and wrong when it is not what
# the operations say; so are files after a power cut; and a udm that takes the page cache for
# persistent is found out.
(
  begin $((512 * MiB)) $((64 * MiB)) true
  operations clean 30 600 131072 fs
  operations torn 31 600 131072 fsu
  kernel frozen run:clean release remove
  expect_after clean
  kernel frozen hash release drain remove origin
  same "content" "$(said LOGICAL)" "$(sha_of "$model")"
  same "drained" "$(said ORIGIN)" "$(sha_of "$model")"
) || exit 1
(
  begin $((512 * MiB)) $((64 * MiB)) false
  operations torn 31 600 131072 fsu
  operations other 32 600 131072 fsu
  kernel -x frozen run:torn crash
  kernel check:torn remove
  (kernel check:other remove) && die "a wrong content was not found"

  operations more 33 8000 131072 ""
  sed -i '/^s$/d' "$work/more"
  cat "$work/torn" "$work/more" > "$work/both"
  kernel -k 'LAB: cut now' cut:2 run:more
  grep -q 'LAB: power cut' "$console" || die "the machine was through before the cut"
  kernel check:both remove
) || exit 1

# Files, judged on the host: what a killed worker acknowledged is there; it is not if anything
# acknowledged is missing, or a byte is foreign.
(
  begin 0 0 true
  mkdir "$work/files" "$work/acks"
  judge() { "$scratch/labfs" check "$1" "$2" 1 "$3"; }
  "$scratch/labfs" setup "$work/files" || die setup
  for round in 1 2; do
    timeout -s KILL 1 "$scratch/labfs" work "$work/files" "$work/acks" 1 $round
    judge "$work/files" "$work/acks" all || die "a right content was not accepted"
    judge "$work/files" "$work/acks" order || die "a right order was not accepted"
  done

  # A thread claims to have gone further than it did. As an order that is right still.
  cp -r "$work/acks" "$work/claims"
  next=$(tail -1 "$work/claims/2.1" | cut -d' ' -f1)
  for step in $(seq 20); do
    echo "$((next + step)) $((900000 + step)) $((900000 + step))" >> "$work/claims/2.1"
  done
  judge "$work/files" "$work/claims" all && die "missing operations were not found"
  judge "$work/files" "$work/claims" order || die "operations after the last were demanded"

  # One thread's files are older than another's: no moment explains that.
  cp -r "$work/files" "$work/mixed"
  timeout -s KILL 1 "$scratch/labfs" work "$work/files" "$work/acks" 1 3
  rm -r "$work/mixed/t0"
  cp -r "$work/files/t0" "$work/mixed/t0"
  judge "$work/mixed" "$work/acks" order && die "a mixture of moments was not found"

  dd if=/dev/urandom of="$work/files/t1/fixed1" bs=512 seek=3 count=1 conv=notrunc status=none
  judge "$work/files" "$work/acks" order && die "a foreign sector was not found"
  echo "ok: files are judged"
) || exit 1

# The disk with a volatile cache loses what was not flushed, and nothing else.
(
  begin 0 $((16 * MiB)) true
  operations ops 34 400 65536 fsu
  expect_after ops
  . "$here/power.sh"
  for seed in 1 2 3 4 5 6; do
    rm "$origin"
    truncate -s $((16 * MiB)) "$origin"
    disks=()
    disk vda "$origin"
    "$labio" run "nbd+unix://$work/vda.sock" "$work/ops" || die "operations on the disk"
    wait "${disks[@]}" || die labdisk
    "$labio" check "$origin" "$work/ops" || die "the disk lost what was flushed"
    [ "$(sha_of "$origin")" = "$(sha_of "$model")" ] || touch "$work/has_lost"
  done
  cat "$work/lost"
  [ -e "$work/has_lost" ] || die "the disk never lost anything"
  echo "ok: a disk that loses power"
) || exit 1

# A file system right on that disk, without udm, survives as a file system must.
(
  . "$here/power.sh"
  power_begin dax ext4 pcache:true
  must_boot "$cache" "$origin" alone format
  must_boot -k 'LAB: working' -w 4 "$cache" "$origin" alone work:1
  [ "$is_cut" = 1 ] || die "the machine was through before the cut"
  must_boot "$cache" "$origin" alone check:all check:order
) || exit 1

# udm is told that stores to the page cache of a disk are durable. A power cut then takes what was
# acknowledged, and this must be seen.
(
  . "$here/power.sh"
  power_begin 'disk?persist=cpu' ext4 pcache:true
  must_boot "$cache" "$origin" attach format drain
  must_boot -k 'LAB: working' -w 6 "$cache" "$origin" attach work:1
  [ "$is_cut" = 1 ] || die "the machine was through before the cut"
  boot "$cache" "$origin" attach check:all && die "lost operations were not found"
  grep -q '^FAIL: ' "$console" || die "the machine did not get as far as the check"
  echo "ok: a cache that is not durable is found out"
) || exit 1
