# Writecaches last written by the kernel open in udm and read right: removed dirty, after a reset
# of the machine, after a power cut in the middle of writes. What survived a crash is not only
# allowed: it is exactly what the kernel itself finds on such media.
keep() { for medium in "$cache" "$origin"; do cp --sparse=always "$medium" "$medium.kept"; done; }
put_back() { for medium in "$cache" "$origin"; do cp --sparse=always "$medium.kept" "$medium"; done; }

# both_read OPS: udm finds on these media what the kernel does, it is what OPS allow, and both
# write back the same.
both_read() {
  keep
  kernel frozen hash release drain remove origin
  content=$(said LOGICAL)
  same "the kernel's write-back" "$(said ORIGIN)" "$content"
  put_back
  create
  udm_check "$1" || exit 1
  same "udm reads what the kernel reads" "$(udm_sha)" "$content"
  remove --drain
  same "udm's write-back of it" "$(sha_of "$origin")" "$content"
}

for mode in p s; do
  (
    begin_writecache $mode 4096 $((64 * MiB)) $((64 * MiB))
    operations removed 21 600 65536 fs4
    kernel frozen run:removed release remove
    expect_after removed
    create
    same "udm reads what the kernel left dirty" "$(udm_sha)" "$(sha_of "$model")"
    "$udm" drain lab || die "udm drain"
    same "udm's write-back of it" "$(sha_of "$origin")" "$(sha_of "$model")"
    remove
  ) || exit 1
  (
    begin_writecache $mode 4096 $((64 * MiB)) $((64 * MiB))
    operations reset 22 900 65536 fsu4
    kernel -x frozen run:reset crash
    both_read reset
  ) || exit 1
  (
    begin_writecache $mode 4096 $((64 * MiB)) $((64 * MiB))
    operations flushed 23 300 65536 fs4
    operations cut 24 24000 65536 4
    sed -i '/^s$/d' "$work/cut"
    cat "$work/flushed" "$work/cut" > "$work/both"
    kernel -k 'LAB: cut now' run:flushed cut:1 run:cut
    grep -q 'LAB: power cut' "$console" || die "the machine was through before the cut"
    both_read both
  ) || exit 1
done
