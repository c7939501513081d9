# udm writes to a writecache (FUA, flushes, zeroes), is removed with dirty data, and the kernel
# reads and drains it, in the same mode and in the other one; then udm goes on with what the kernel
# left, and drains itself.
one() { # MODE KERNEL-MODE BLOCK
  flags=fsz4 size=64
  # The kernel reads single blocks in mode p, which takes its time.
  [ "$3" = 512 ] && flags=fsz size=24
  begin_writecache "$1" "$3" $((64 * MiB)) $((size * MiB))
  kernel_mode=$2
  "$labio" gen 1 "$origin_bytes" 100 262144 "$flags" > "$work/base"
  "$labio" apply "$origin" "$work/base" 2> /dev/null
  expect_after base

  operations first 2 600 65536 $flags
  create
  udm_run first
  expect_after first
  same "udm reads its own" "$(udm_sha)" "$(sha_of "$model")"
  remove
  "$udm" inspect "$cache" --json > "$work/inspected" || die inspect
  grep -q '"dirty_bytes": *[1-9]' "$work/inspected" || die "nothing is dirty"
  kernel_agrees

  operations second 3 600 65536 $flags
  create
  same "udm reads what the kernel left" "$(udm_sha)" "$(sha_of "$model")"
  udm_run second
  expect_after second
  remove --drain
  same "udm's write-back" "$(sha_of "$origin")" "$(sha_of "$model")"
  kernel_agrees
}
for modes in "p p" "s s" "p s" "s p"; do
  (one ${modes% *} ${modes#* } 4096) || exit 1
done
for mode in p s; do
  (one $mode $mode 512) || exit 1
done
