# Media last written by the kernel open in udm and read right: removed with dirty data, after a
# reset of the machine, after a power cut in the middle of writes, with a torn end of the log. What
# survived a crash is not only allowed: it is exactly what the kernel itself finds on such media.

# keep, put_back: the media as they are now, and again. The files stay the same ones: a cache
# knows its backing file.
keep() { for medium in "$cache" "$origin"; do cp --sparse=always "$medium" "$medium.kept"; done; }
put_back() { for medium in "$cache" "$origin"; do cp --sparse=always "$medium.kept" "$medium"; done; }

# both_read OPS: udm finds on these media what the kernel does (in $content), it is what OPS
# allow, and both write back the same.
both_read() {
  keep
  kernel frozen hash release drain remove origin
  content=$(said LOGICAL)
  same "the kernel's write-back" "$(said ORIGIN)" "$content"
  put_back
  create
  udm_check "$1" | tee "$work/checked"
  [ "${PIPESTATUS[0]}" = 0 ] || exit 1
  same "udm reads what the kernel reads" "$(udm_sha)" "$content"
  remove --drain
  same "udm's write-back of it" "$(sha_of "$origin")" "$content"
  put_back
}
newer() { sed -n 's/.* \([0-9]*\) newer than flushed.*/\1/p' "$work/checked"; }

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
    operations reset 22 2500 131072 fsu
    kernel -x frozen run:reset crash
    both_read reset
    whole=$content

    # The last append of the log was torn: in its header, in its keys, near its end. It is as if it
    # had not been begun, and nothing before it is missing.
    "$udm" inspect "$cache" --json > "$work/inspected" || die inspect
    head=$(sed -n 's/.*"head": *"\(.*\)".*/\1/p' "$work/inspected")
    cp --sparse=always "$cache" "$work/whole.img"
    before=
    for words in 1 5 1000; do
      cp --sparse=always "$work/whole.img" "$cache"
      "$labio" tear "$cache" "$head" $words || die tear
      both_read reset
      [ "$content" != "$whole" ] || die "the tear took nothing"
      [ "$content" = "${before:=$content}" ] || die "torn after $words words: other content"
    done
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
    both_read both
    [ "$(newer)" -gt 0 ] || die "the cut came before anything was written"
  ) || exit 1
done
