# A machine whose disk is a udm device, by vhost-user-blk with two rings: ext4 is made and used on
# it over split rings, and XFS over packed ones, while the server is killed again and again. The
# machine sees no error, and its files are right; then the backing device alone has them.
for fs in ext4 xfs; do
  (
    rings=
    [ $fs = ext4 ] || rings=:packed
    begin_writecache p 4096 $((64 * MiB)) $((512 * MiB))
    socket=$work/vhost.sock
    serve() {
      "$udm" create lab --export "vhost-user://$socket" --table "$(table)" > /dev/null ||
        die "udm create"
    }
    serve
    "$here/run-vm.sh" -v "$socket$rings" -t 900 "$here/guest/vhost.sh" "$fs" 30 > "$work/console" 2>&1 &
    machine=$!
    kills=0
    while kill -0 "$machine" 2> /dev/null; do
      sleep 3
      if grep -q 'LAB: round' "$work/console" && [ $kills -lt 10 ]; then
        kill_server
        serve
        kills=$((kills + 1))
      fi
    done
    wait "$machine" || { tail -40 "$work/console"; die "the machine with $fs saw an error"; }
    grep -q "LAB: packed $([ -z "$rings" ] && echo 0 || echo 1)" "$work/console" ||
      die "the machine has other rings"
    [ $kills -ge 5 ] || die "the machine was done before the server was killed five times"
    grep -E 'LAB: (no error|round 30)' "$work/console"
    "$udm" info lab | grep -A8 -i export || true
    remove --drain
    case $fs in
      ext4) e2fsck -fn "$origin" > "$work/fsck" 2>&1 || { cat "$work/fsck"; die "e2fsck"; } ;;
      xfs) xfs_repair -n -f "$origin" > "$work/fsck" 2>&1 || { cat "$work/fsck"; die "xfs_repair"; } ;;
    esac
    echo "ok: $fs$rings, with $kills servers killed"
  ) || exit 1
done
