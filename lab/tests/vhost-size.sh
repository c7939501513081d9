# A machine whose disk, by vhost-user-blk, grows while it runs: it hears of that, and uses what is
# new.
(
  begin 0 $((64 * MiB)) none
  socket=$work/vhost.sock
  "$udm" create lab --export "vhost-user://$socket" --table "0 32768 linear $origin 0" > /dev/null ||
    die "udm create"
  "$here/run-vm.sh" -v "$socket" -t 600 "$here/guest/vhost-size.sh" > "$work/console" 2>&1 &
  machine=$!
  until grep -q 'LAB: size 32768' "$work/console"; do
    kill -0 "$machine" 2> /dev/null || { tail -40 "$work/console"; die "the machine has ended"; }
    sleep 1
  done
  "$udm" suspend lab && "$udm" load lab --table "0 98304 linear $origin 0" && "$udm" resume lab ||
    die "the device does not grow"
  wait "$machine" || { tail -40 "$work/console"; die "the machine saw an error"; }
  grep 'LAB: size 98304' "$work/console" || die "the machine has heard of no other size"
  [ "$(dd if="$origin" bs=512 skip=98303 count=1 2> /dev/null | head -c 8)" = "the last" ] ||
    die "the last sector is another one"
  remove
) || exit 1
