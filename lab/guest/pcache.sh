# Payload: the real dm-pcache on /dev/pmem0 (cache) and /dev/vda (backing device).
#
#   pcache.sh SECTORS CRC STEP...
#
# Steps, in order; what they print is what the host compares:
#   frozen     from the start, hold back every write to the backing device (must come first)
#   status     "STATUS: " and the device's status line
#   table      "TABLE: " and its table line
#   hash       "LOGICAL: " and the SHA-256 of the whole device
#   run:FILE   executes an ops file of the host's work folder
#   check:FILE every sector holds what it may hold after a crash at the end of that ops file
#   gc:N       message gc_percent N
#   release    let the writes through again
#   drain      wait until everything is written back
#   remove     remove the device; dirty data stays in the cache (with writes held back it may never
#              end: the target waits for the write-back that it began)
#   attach     create it again
#   origin     "ORIGIN: " and the SHA-256 of the bare backing device
#   cut:SEC    from now, in SEC seconds, say that the host may cut the power
#   crash      reset the machine; what the kernel had not stored is lost
sectors=$1 crc=$2
shift 2

die() { echo "FAIL: $*"; exit 1; }
hash() { labio cat "$1" | sha256sum | cut -d' ' -f1; }
origin_sectors=$(blockdev --getsz /dev/vda)
pass="0 $origin_sectors linear /dev/vda 0"
# dm-delay lets reads and flushes through and holds writes for hours.
hold="0 $origin_sectors delay /dev/vda 0 0 /dev/vda 0 30000000 /dev/vda 0 0"

attach() {
  dmsetup create cached --table \
    "0 $sectors pcache /dev/pmem0 /dev/mapper/origin 4 cache_mode writeback data_crc $crc" ||
    { dmesg | grep -i pcache | tail -5; die "the kernel does not attach this cache"; }
}

# Fields of the status line: head is the 10th word, dirty_tail the 11th.
drain() {
  echo s > /tmp/flush
  labio run /dev/mapper/cached /tmp/flush 2> /dev/null || die flush
  tries=0
  while [ $tries -lt 600 ]; do
    set -- $(dmsetup status cached)
    [ "${10}" = "${11}" ] && return 0
    tries=$((tries + 1))
    sleep 1
  done
  die "write-back does not end: $*"
}

if [ "$1" = frozen ]; then
  dmsetup create origin --table "$hold" || die origin
  shift
else
  dmsetup create origin --table "$pass" || die origin
fi
attach
for step in "$@"; do
  case "$step" in
    status) echo "STATUS: $(dmsetup status cached)" ;;
    table) echo "TABLE: $(dmsetup table cached)" ;;
    hash) echo "LOGICAL: $(hash /dev/mapper/cached)" ;;
    run:*) labio run /dev/mapper/cached "/mnt/host/${step#*:}" || die "$step" ;;
    check:*) labio check /dev/mapper/cached "/mnt/host/${step#*:}" || die "$step" ;;
    gc:*) dmsetup message cached 0 gc_percent "${step#*:}" || die "$step" ;;
    release)
      dmsetup load origin --table "$pass" && dmsetup suspend --nolockfs origin &&
        dmsetup resume origin || die release ;;
    drain) drain ;;
    remove) dmsetup remove cached || die remove ;;
    attach) attach ;;
    cut:*) (sleep "${step#*:}"; echo "LAB: cut now") & ;;
    origin) echo "ORIGIN: $(hash /dev/vda)" ;;
    crash) echo LAB-CRASH; sleep 0.2; echo b > /proc/sysrq-trigger; sleep 30 ;;
    *) die "unknown step $step" ;;
  esac
done
exit 0
