# The server of a cache dies by SIGKILL in the middle of writes, in every mode and both versions of the
# metadata. The kernel gets the media as they are; udm goes on with what the kernel left; and what a
# server that was killed at rest had acknowledged is there to the last byte.
one() { # VERSION MODE
  begin_cache "$1" writethrough $((4 * MiB)) $((16 * MiB))
  operations flushed 51 700 65536 fsz
  operations cut 52 40000 65536 z
  sed -i '/^s$/d' "$work/cut"
  cat "$work/flushed" "$work/cut" > "$work/both"
  operations theirs 53 300 65536 fs
  operations last 54 300 65536 fsz
  if [ "$2" = passthrough ]; then
    # There is something for writes to invalidate.
    create
    udm_run flushed
    udm_run flushed
    remove
    [ "$(cache_dump "$meta" | grep -c '<mapping ')" -gt 8 ] || die "nothing is cached"
  fi
  mode=$2 kernel_mode=$2
  create
  udm_run flushed
  "$labio" run "$nbd" "$work/cut" > "$work/cut.log" 2>&1 &
  client=$!
  sleep 2
  kill_server
  wait $client && die "the operations were through before the kill"
  cache_is_whole "what a killed server left"

  kernel status check:both run:theirs hash status remove
  read_by_kernel=$(said LOGICAL)
  cache_is_whole "what the kernel left"
  create
  same "$1, $2: udm reads what the kernel left" "$(udm_sha)" "$read_by_kernel"
  udm_run last
  content=$(udm_sha)
  kill_server
  cache_is_whole "what a server that was killed at rest left"
  kernel hash drain remove origin
  same "$1, $2: nothing acknowledged is missing" "$(said LOGICAL)" "$content"
  same "$1, $2: nor after write-back" "$(said ORIGIN)" "$content"
}
for version in 1 2; do
  for mode in writeback writethrough passthrough; do
    (one $version $mode) || exit 1
  done
done
