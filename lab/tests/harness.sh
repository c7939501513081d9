# The harness itself, without udm: what the kernel alone wrote is judged right, and wrong when it
# is not what the operations say.
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
