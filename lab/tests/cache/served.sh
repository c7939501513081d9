# A cache that udm served is the kernel's, after an orderly end and after SIGKILL, in both versions of
# the metadata: the kernel opens it and writes back, and udm finds all of it again, with the mark of
# the devices that belong together.
mark_of() { od -An -tx1 -j16 -N16 "$1"; }
for version in 1 2; do
  for end in remove kill_server; do
    (
      begin_cache $version writeback $((4 * MiB)) $((16 * MiB))
      operations ops $version 1500 65536 fsuz
      create
      udm_run ops
      "$udm" status lab
      $end
      expect_after ops
      cache_is_whole "what udm left"
      mark=$(mark_of "$meta")
      [[ $mark =~ [1-9a-f] ]] || die "udm left no mark"
      kernel hash drain status remove
      same "version $version, $end: the kernel reads it" "$(said LOGICAL)" "$(sha_of "$model")"
      cache_is_whole "what the kernel left"
      same "version $version, $end: the kernel keeps the mark" "$(mark_of "$meta")" "$mark"
      create
      same "version $version, $end: nothing is missing" "$(udm_sha)" "$(sha_of "$model")"
      remove --drain
      same "version $version, $end: the origin alone" "$(sha_of "$origin")" "$(sha_of "$model")"
    ) || exit 1
  done
done
