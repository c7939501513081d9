# udm writes (whole blocks and odd sectors, FUA, flushes, discards, zeroes), is removed with dirty
# data, and the kernel reads and drains it; the same after udm itself drained.
for crc in false true; do
  (
    begin $((512 * MiB)) $((128 * MiB)) $crc
    "$labio" gen 1 "$origin_bytes" 200 1048576 "" > "$work/base"
    "$labio" apply "$origin" "$work/base" 2> /dev/null
    expect_after base

    operations first 2 1500 262144 fsdz
    create
    udm_run first
    expect_after first
    same "udm reads its own" "$(udm_sha)" "$(sha_of "$model")"
    remove
    kernel_agrees

    # The kernel drained it; udm takes the same media on, and drains itself.
    operations second 3 1500 262144 fsdz
    create
    same "udm reads what the kernel left" "$(udm_sha)" "$(sha_of "$model")"
    udm_run second
    expect_after second
    remove --drain
    same "udm's write-back" "$(sha_of "$origin")" "$(sha_of "$model")"
    kernel_agrees
  ) || exit 1
done
