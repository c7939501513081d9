# Payload: the real dm-writecache over /dev/vda (origin) and /dev/pmem0 (mode p) or /dev/vdb (mode s).
#
#   writecache.sh SECTORS MODE BLOCK-BYTES STEP...
#
# Steps, in order; what they print is what the host compares:
#   frozen     from the start, hold back every write to the origin (must come first)
#   status     "STATUS: " and the device's status line
#   table      "TABLE: " and its table line
#   hash       "LOGICAL: " and the SHA-256 of the whole device, read block by block
#   run:FILE   executes an ops file of the host's work folder
#   check:FILE every sector holds what it may hold after a crash at the end of that ops file
#   release    let the writes through again
#   drain      message flush: everything is written back
#   remove     remove the device; dirty data stays in the cache
#   attach     create it again
#   origin     "ORIGIN: " and the SHA-256 of the bare origin
#   cut:SEC    from now, in SEC seconds, say that the host may cut the power
#   crash      reset the machine; what the kernel had not stored is lost
sectors=$1 mode=$2 block=$3
shift 3
# Mode p answers reads of more than a block wrongly where only some of it is cached.
export LABIO_PIECE=1048576
[ "$mode" = p ] && LABIO_PIECE=$block

die() { echo "FAIL: $*"; exit 1; }
hash() { labio cat "$1" | sha256sum | cut -d' ' -f1; }
origin_sectors=$(blockdev --getsz /dev/vda)
pass="0 $origin_sectors linear /dev/vda 0"
# dm-delay lets reads and flushes through and holds writes for hours.
hold="0 $origin_sectors delay /dev/vda 0 0 /dev/vda 0 30000000 /dev/vda 0 0"
case $mode in
  p) cache=/dev/pmem0 ;;
  s) cache=/dev/vdb ;;
esac

attach() {
  dmsetup create cached --table \
    "0 $sectors writecache $mode /dev/mapper/origin $cache $block 0" ||
    { dmesg | grep -i writecache | tail -5; die "the kernel does not attach this cache"; }
  # An error state is not an error of dmsetup.
  set -- $(dmsetup status cached)
  [ "$4" = 0 ] || { dmesg | tail -5; die "the kernel is in its error state: $*"; }
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
    release)
      dmsetup load origin --table "$pass" && dmsetup suspend --nolockfs origin &&
        dmsetup resume origin || die release ;;
    drain) dmsetup message cached 0 flush || die drain ;;
    remove) dmsetup remove cached || die remove ;;
    attach) attach ;;
    cut:*) (sleep "${step#*:}"; echo "LAB: cut now") & ;;
    origin) echo "ORIGIN: $(LABIO_PIECE=1048576 hash /dev/vda)" ;;
    crash) echo LAB-CRASH; sleep 0.2; echo b > /proc/sysrq-trigger; sleep 30 ;;
    *) die "unknown step $step" ;;
  esac
done
exit 0
