# Payload: udm inside the machine, its device used through the kernel's NBD client, with a file
# system on it. /dev/vda is the backing device; the cache is a DAX device made of /dev/pmem0, or
# the disk /dev/vdb. The metadata of a cache is on /dev/vdc.
#
#   power.sh MEDIUM FS TARGET SEED STEP...
#
# MEDIUM: dax, disk, or disk?OPTIONS (device options for udm). FS: ext4 or xfs. TARGET: pcache:CRC,
# writecache:BLOCK-BYTES or cache:METADATA-VERSION. Steps, in order; those of the first group say
# where the file system is from then on:
#   attach     create the device from the media: the file system is on it
#   recover    write the cache back without a device: it is on the backing device alone
#   kernel     the kernel's own target makes the device from the media (of a cache)
#   alone      it is on the backing device alone, which nobody brought up to date
#   format     make the file system, and what the work overwrites later
#   work:N     round N of the work; it goes on until the power is cut
#   check:WHAT mount (which replays the journal), judge the files (labfs), unmount, fsck: no fault
#   drain      remove the device, everything written back
# Before what a power cut may interrupt it says "LAB: attaching", "recovering" or "working".
medium=$1 fs=$2 target=$3 seed=$4
shift 4

die() {
  echo "FAIL: $*"
  tail -5 /run/udm/lab.log 2> /dev/null
  dmesg | tail -15
  exit 1
}

# A DAX device over the whole of /dev/pmem0. Once made, its label makes it one at every boot.
dax_device() {
  [ -e /dev/dax0.0 ] && return
  bus=/sys/bus/nd
  region=$bus/devices/region0
  seed_device=$(cat $region/dax_seed)
  echo namespace0.0 > $bus/drivers/nd_pmem/unbind &&
    echo pmem > $bus/devices/$seed_device/mode &&
    cat /proc/sys/kernel/random/uuid > $bus/devices/$seed_device/uuid &&
    echo namespace0.0 > $bus/devices/$seed_device/namespace &&
    echo $seed_device > $bus/drivers/dax_pmem/bind || die "no DAX device"
  [ -e /dev/dax0.0 ] || die "no /dev/dax0.0"
}

case "$medium" in
  dax) dax_device; cache=/dev/dax0.0 ;;
  disk) cache=/dev/vdb ;;
  disk\?*) cache="/dev/vdb?${medium#*\?}" ;;
esac
device=/dev/nbd0
mkdir -p -m 700 /run/udm
mkdir -p /tmp/fs

table() {
  mode=s
  [ "$medium" = dax ] && mode=p
  case $target in
    pcache:*) echo "pcache $cache /dev/vda 4 cache_mode writeback data_crc ${target#*:}" ;;
    writecache:*) echo "writecache $mode /dev/vda $cache ${target#*:} 0" ;;
    cache:1) echo "cache /dev/vdc $cache /dev/vda 64 1 writeback smq 0" ;;
    cache:2) echo "cache /dev/vdc $cache /dev/vda 64 2 metadata2 writeback smq 0" ;;
  esac
}
lines() { echo "0 $(blockdev --getsz /dev/vda) $(table)"; }

attach() {
  udm create lab --export nbd+unix:///run/lab.sock --table "$(lines)" || die "udm create"
  block=512
  case $target in
    # Collection and reuse of segments begin early.
    pcache:*) udm message lab 0 gc_percent 1 || die gc_percent ;;
    # nbd-client does not ask the server for its block size.
    writecache:*) block=${target#*:} ;;
  esac
  nbd-client -unix /run/lab.sock -b "$block" /dev/nbd0 || die nbd-client
}

fsck() {
  case $fs in
    ext4) e2fsck -fn $device ;;
    xfs) xfs_repair -n $device ;;
  esac > /tmp/fsck 2>&1 || { cat /tmp/fsck; die "the file system on $device has faults"; }
}

for step in "$@"; do
  case "$step" in
    attach) echo "LAB: attaching"; attach; device=/dev/nbd0 ;;
    recover)
      echo "LAB: recovering"
      case $target in
        cache:*) udm recover /dev/vdc "$cache" /dev/vda ;;
        *) udm recover "$cache" /dev/vda ;;
      esac || die "udm recover"
      device=/dev/vda ;;
    kernel)
      dmsetup create lab --table "$(lines)" || die "the kernel does not attach this cache"
      device=/dev/mapper/lab ;;
    alone) device=/dev/vda ;;
    format)
      mkfs.$fs -q $device && mount -t $fs $device /tmp/fs && labfs setup /tmp/fs &&
        umount /tmp/fs || die format ;;
    work:*)
      mount -t $fs $device /tmp/fs || die mount
      echo "LAB: working"
      labfs work /tmp/fs /mnt/host/acks "$seed" "${step#*:}"
      die "the work ended" ;;
    check:*)
      mount -t $fs $device /tmp/fs || die "$device does not mount"
      labfs check /tmp/fs /mnt/host/acks "$seed" "${step#*:}" || die "$step on $device"
      umount /tmp/fs || die umount
      fsck
      [ $device != /dev/mapper/lab ] || dmsetup remove lab || die "dmsetup remove" ;;
    drain)
      nbd-client -d /dev/nbd0 > /dev/null || die "nbd-client -d"
      echo "STATUS: $(udm status lab)"
      udm remove lab --drain || die "udm remove" ;;
    *) die "unknown step $step" ;;
  esac
done
exit 0
