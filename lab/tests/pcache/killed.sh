# The server dies by SIGKILL with unflushed writes.
for crc in false true; do
  # The kernel gets the media as they are, in the middle of the second lap with collection: per
  # sector, the last flushed value or a later one.
  (
    begin $((512 * MiB)) $((64 * MiB)) $crc
    operations ops 4 9000 131072 fsuzd
    create
    "$udm" message lab 0 gc_percent 20 || die gc_percent
    udm_run ops
    kill_server
    kernel frozen check:ops hash release drain remove origin
    same "what was read and what was written back" "$(said ORIGIN)" "$(said LOGICAL)"
    read_by_kernel=$(said LOGICAL)

    # The dead server's runtime folder still has its open key sets. The kernel has moved on since:
    # they must not come back.
    create
    same "udm believes the media, not the dead server's memory" "$(udm_sha)" "$read_by_kernel"
    remove
  ) || exit 1
  # udm takes it up first: everything acknowledged is there, and the kernel sees it too.
  (
    begin $((512 * MiB)) $((64 * MiB)) $crc
    operations ops 5 2000 131072 fsuzd
    create
    udm_run ops
    kill_server
    expect_after ops
    create
    same "nothing acknowledged is missing" "$(udm_sha)" "$(sha_of "$model")"
    remove
    kernel_agrees
  ) || exit 1
done
