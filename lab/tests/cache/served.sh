# A cache that udm served is the kernel's, after an orderly end and after SIGKILL, in both versions of
# the metadata: the kernel opens it and writes back, and udm finds all of it again, with the mark of
# the devices that belong together.
mark_of() { od -An -tx1 -j16 -N16 "$1"; }
for version in 1 2; do
  for end in remove kill_server; do
    (
      begin $((4 * MiB)) $((16 * MiB)) none
      meta=$work/meta.img
      truncate -s $((4 * MiB)) "$meta"
      feature="1 writeback"
      [ $version = 1 ] || feature="2 writeback metadata2"
      table() { echo "0 $sectors cache $meta $cache $origin 64 $feature smq 0"; }
      operations ops $version 1500 65536 fsuz
      create
      udm_run ops
      "$udm" status lab
      $end
      expect_after ops
      "$udm" cache check "$meta" || die "what udm left"
      mark=$(mark_of "$meta")
      [[ $mark =~ [1-9a-f] ]] || die "udm left no mark"
      "$here/run-vm.sh" -d "$origin" -d "$cache" -d "$meta" "$here/guest/cache.sh" "$sectors" 64 \
        > "$work/console" 2>&1 || { cat "$work/console"; die "version $version: the payload"; }
      console=$work/console
      echo "the kernel: $(said STATUS)"
      "$udm" cache check "$meta" || die "what the kernel left"
      same "version $version, $end: the kernel keeps the mark" "$(mark_of "$meta")" "$mark"
      create
      same "version $version, $end: nothing is missing" "$(udm_sha)" "$(sha_of "$model")"
      remove --drain
      same "version $version, $end: the origin alone" "$(sha_of "$origin")" "$(sha_of "$model")"
    ) || exit 1
  done
done
