# Payload: the real dm-cache over /dev/vda (origin), /dev/vdb (cache) and /dev/vdc (metadata), with
# blocks of 32 KiB; or udm's.
#
#   cache.sh SECTORS METADATA-VERSION MODE [udm|refused] STEP...
#
# udm: it is tried instead of the kernel. refused: the kernel does not make the device.
# Steps, in order; what they print is what the host compares:
#   status     "STATUS: " and the device's status line
#   table      "TABLE: " and its table line
#   hash       "LOGICAL: " and the SHA-256 of the whole device
#   run:FILE   executes an ops file of the host's work folder
#   fails:FILE the same; it must end with an error
#   check:FILE every sector holds what it may hold after a crash at the end of that ops file
#   keep       nothing is written back while the device is idle
#   drain      the policy cleaner writes everything back
#   fail       from now on the metadata device fails writes, but for those of the superblock
#   fail-all   it fails all of them
#   heal       it is well again
#   remove     remove the device; dirty blocks stay in the cache
#   attach     create it again
#   rw         wait until the device may write to its metadata
#   origin     "ORIGIN: " and the SHA-256 of the bare origin
#   crash      reset the machine; what the kernel had not stored is lost
sectors=$1 mode=$3
features="1 $mode"
[ "$2" = 1 ] || features="2 metadata2 $mode"
shift 3

die() { echo "FAIL: $*"; dmesg | grep -i cache | tail -5; exit 1; }
hash() { labio cat "$1" | sha256sum | cut -d' ' -f1; }
table() { echo "0 $sectors cache /dev/mapper/meta /dev/vdb /dev/vda 64 $features $1 0"; }

# The metadata device: its first block, and the others.
rest=$(($(blockdev --getsz /dev/vdc) - 8))
good_at() { echo "$1 $2 linear /dev/vdc $1"; }
bad_at() { echo "$1 $2 flakey /dev/vdc $1 0 10000 1 error_writes"; }
meta_is() {
  dmsetup load meta --table "$1" && dmsetup suspend --nolockfs --noflush meta &&
    dmsetup resume meta || die "no new metadata device"
}
whole() { good_at 0 8; good_at 8 $rest; }

# What is tried.
attach() {
  case $who in
    kernel) dmsetup create cached --table "$(table smq)" ;;
    udm) udm create cached --export "$device" --table "$(table smq)" ;;
  esac || die "$who does not attach this cache"
}
control() {
  case $who in
    kernel) dmsetup "$@" ;;
    udm) udm "$@" ;;
  esac || die "$*"
}
status() { control status cached; }
is_clean() { [ "$(status | cut -d' ' -f14)" = 0 ]; }
is_writable() { status | grep -q ' rw '; }
# wait_for WHAT: for two minutes at most.
wait_for() {
  for _ in $(seq 240); do
    "$1" && return
    sleep 0.5
  done
  die "not $1: $(status)"
}
drain() {
  dmsetup load cached --table "$(table cleaner)" && dmsetup suspend cached &&
    dmsetup resume cached || die "no cleaner"
  wait_for is_clean
}

dmsetup create meta --table "$(whole)" || die meta
who=kernel device=/dev/mapper/cached
case "$1" in
  udm)
    who=udm device=nbd+unix:///run/cached.sock
    mkdir -p -m 700 /run/udm
    shift ;;
  refused)
    dmsetup create cached --table "$(table smq)" && die "the kernel attaches this cache"
    echo "REFUSED: $(dmesg | grep -i 'cache:' | tail -1)"
    exit 0 ;;
esac
attach
for step in "$@"; do
  case "$step" in
    status) echo "STATUS: $(status)" ;;
    table) echo "TABLE: $(control table cached)" ;;
    hash) echo "LOGICAL: $(hash "$device")" ;;
    run:*) labio run "$device" "/mnt/host/${step#*:}" || die "$step" ;;
    fails:*) labio run "$device" "/mnt/host/${step#*:}" && die "$step: it does not" ;;
    check:*) labio check "$device" "/mnt/host/${step#*:}" || die "$step" ;;
    keep) control message cached 0 migration_threshold 0 ;;
    drain) drain ;;
    fail) meta_is "$(good_at 0 8; bad_at 8 $rest)" ;;
    fail-all) meta_is "$(bad_at 0 8; bad_at 8 $rest)" ;;
    heal) meta_is "$(whole)" ;;
    rw) wait_for is_writable ;;
    remove) control remove cached ;;
    attach) attach ;;
    origin) echo "ORIGIN: $(hash /dev/vda)" ;;
    crash) echo LAB-CRASH; sleep 0.2; echo b > /proc/sysrq-trigger; sleep 30 ;;
    *) die "unknown step $step" ;;
  esac
done
exit 0
