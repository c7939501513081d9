# The server of a writecache dies by SIGKILL with unflushed writes.
for mode in p s; do
  # The kernel gets the media as they are, more than full: per sector, the last flushed value or a
  # later one.
  (
    begin_writecache $mode 4096 $((32 * MiB)) $((64 * MiB))
    operations ops 4 2500 65536 fsuz4
    create
    udm_run ops
    kill_server
    operations theirs 6 20 65536 fs4
    kernel frozen check:ops release run:theirs hash drain remove origin
    same "what was read and what was written back" "$(said ORIGIN)" "$(said LOGICAL)"
    read_by_kernel=$(said LOGICAL)

    # The dead server's runtime folder still has its uncommitted entries. The kernel has moved
    # on since, by a commit at least: they must not come back.
    create
    same "udm believes the media, not the dead server's memory" "$(udm_sha)" "$read_by_kernel"
    remove
  ) || exit 1
  # udm takes it up first: everything acknowledged is there, and the kernel sees it too.
  (
    begin_writecache $mode 512 $((16 * MiB)) $((24 * MiB))
    operations ops 5 1000 65536 fsuz
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
