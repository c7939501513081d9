# Media last written by the kernel open in udm and read right: removed with dirty data, after a
# reset of the machine, after a power cut in the middle of writes.
for crc in false true; do
  (
    begin $((512 * MiB)) $((64 * MiB)) $crc
    operations formatted 20 300 131072 fs
    create
    udm_run formatted
    expect_after formatted
    remove

    operations removed 21 1000 131072 fs
    kernel frozen run:removed release remove
    expect_after removed
    "$udm" inspect "$cache" --json > "$work/inspected" || die inspect
    grep -q '"dirty_bytes": *[1-9]' "$work/inspected" || die "the kernel left nothing dirty"
    create
    same "udm reads what the kernel left dirty" "$(udm_sha)" "$(sha_of "$model")"
    "$udm" drain lab || die "udm drain"
    same "udm's write-back of it" "$(sha_of "$origin")" "$(sha_of "$model")"
    remove
  ) || exit 1
  (
    begin $((512 * MiB)) $((64 * MiB)) $crc
    create
    remove
    operations reset 22 1500 131072 fsu
    kernel -x frozen run:reset crash
    create
    udm_check reset
    content=$(udm_sha)
    remove --drain
    same "udm's write-back of it" "$(sha_of "$origin")" "$content"
  ) || exit 1
  (
    begin $((512 * MiB)) $((64 * MiB)) $crc
    create
    remove
    # What is cut has no flush: of its sectors, any version may be there.
    operations flushed 23 1000 131072 fs
    operations cut 24 8000 131072 ""
    sed -i '/^s$/d' "$work/cut"
    cat "$work/flushed" "$work/cut" > "$work/both"
    kernel -k 'LAB: cut now' run:flushed cut:3 run:cut
    grep -q 'LAB: power cut' "$console" || die "the machine was through before the cut"
    create
    udm_check both
    content=$(udm_sha)
    remove --drain
    same "udm's write-back of it" "$(sha_of "$origin")" "$content"
  ) || exit 1
done
