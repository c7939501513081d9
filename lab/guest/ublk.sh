# Payload: udm's devices as disks of the machine itself, by ublk, beside the kernel's dm-pcache.
# udm has /dev/vda and the DAX device made of /dev/pmem0; dm-pcache has /dev/vdb and /dev/pmem1.
#
#   ublk.sh STEP...
#
# Steps, in order:
#   session:WHO:FS  WHO (udm or kernel) makes a cached disk; FS (ext4 or xfs) is made, mounted, written
#                   to and unmounted there; the cache is written back while the disk is idle and the
#                   disk removed; then the backing device alone mounts, and has everything
#   kills:FS:N      files are written, made durable and read back while udm's server is killed N times
#                   and started again: no error, and the files are right
#   resize:FS       a device is doubled under a mounted file system, which grows
#   removed         a disk in use is not removed; by force it is
#   rate:WHO        "RATE WHO: " and random writes of 4 KiB in a second
mkdir -p -m 700 /run/udm
mkdir -p /tmp/disk

die() {
  echo "FAIL: $*"
  tail -5 /run/udm/lab.log 2> /dev/null
  dmesg | tail -15
  exit 1
}

# A DAX device over the whole of /dev/pmem0.
dax_device() {
  [ -e /dev/dax0.0 ] && return
  bus=/sys/bus/nd
  seed_device=$(cat $bus/devices/region0/dax_seed)
  echo namespace0.0 > $bus/drivers/nd_pmem/unbind &&
    echo pmem > $bus/devices/$seed_device/mode &&
    cat /proc/sys/kernel/random/uuid > $bus/devices/$seed_device/uuid &&
    echo namespace0.0 > $bus/devices/$seed_device/namespace &&
    echo $seed_device > $bus/drivers/dax_pmem/bind || die "no DAX device"
  [ -e /dev/dax0.0 ] || die "no /dev/dax0.0"
}

udm_table() {
  echo "0 ${1:-$(blockdev --getsz /dev/vda)} pcache /dev/dax0.0 /dev/vda 4 cache_mode writeback data_crc true"
}
# attach WHO: sets $disk, and $backing.
attach() {
  case $1 in
    udm)
      dax_device
      udm create lab --export ublk:0 --table "$(udm_table $size)" || die "udm create"
      disk=/dev/ublkb0 backing=/dev/vda ;;
    kernel)
      dmsetup create lab --table "0 $(blockdev --getsz /dev/vdb) pcache /dev/pmem1 /dev/vdb 4 \
        cache_mode writeback data_crc true" || die "dmsetup create"
      disk=/dev/mapper/lab backing=/dev/vdb ;;
  esac
  [ -b $disk ] || die "no $disk"
}
clean() {
  case $1 in
    udm) udm wait lab --until clean --timeout 300 || die "udm wait" ;;
    # The head of the log is the 10th word, and the tail of what is dirty the 11th.
    kernel)
      for _ in $(seq 300); do
        set -- $(dmsetup status lab)
        [ "${10}" = "${11}" ] && return
        sleep 1
      done
      die "not clean: $*" ;;
  esac
}
detach() {
  case $1 in
    udm) udm remove lab || die "udm remove"; [ ! -e /dev/ublkb0 ] || die "/dev/ublkb0 is left" ;;
    kernel) dmsetup remove lab || die "dmsetup remove" ;;
  esac
}
make_fs() {
  case $1 in
    ext4) mkfs.ext4 -q -F $2 || die mkfs ;;
    xfs) mkfs.xfs -q -f $2 || die mkfs ;;
  esac
}
fsck() {
  case $1 in
    ext4) e2fsck -fn $2 ;;
    xfs) xfs_repair -n $2 ;;
  esac > /tmp/fsck 2>&1 || { cat /tmp/fsck; die "the file system on $2 has faults"; }
}

session() {
  attach $1
  make_fs $2 $disk
  mount -t $2 $disk /tmp/disk || die mount
  dd if=/dev/urandom of=/tmp/disk/large bs=1M count=48 2> /dev/null || die large
  for name in $(seq 200); do echo "file $name" > /tmp/disk/$name || die small; done
  # Odd places in a file, written over.
  for at in 1 3 77 1000 4095; do
    dd if=/dev/urandom of=/tmp/disk/large bs=512 seek=$at count=3 conv=notrunc 2> /dev/null || die odd
  done
  rm /tmp/disk/7
  (cd /tmp/disk && find . -type f | sort | xargs sha256sum) > /tmp/sums || die sums
  umount /tmp/disk || die umount
  clean $1
  detach $1
  mount -t $2 $backing /tmp/disk || die "the backing device alone does not mount"
  (cd /tmp/disk && sha256sum -c /tmp/sums > /tmp/check) || { grep -v OK /tmp/check; die "other data"; }
  [ "$(wc -l < /tmp/sums)" = 200 ] || die "$(wc -l < /tmp/sums) files"
  umount /tmp/disk || die umount
  fsck $2 $backing
  echo "LAB: session of $1 with $2"
}

server_pid() { udm info lab --json | tr -d ' "' | tr ',{}' '\n' | sed -n 's/^pid://p' | head -1; }

# kills FS N
kills() {
  attach udm
  make_fs $1 $disk
  mount -t $1 $disk /tmp/disk || die mount
  rm -f /tmp/stop /tmp/killed
  (
    count=0
    while [ $count -lt $2 ] && [ ! -e /tmp/stop ]; do
      sleep 1
      kill -9 "$(server_pid)" || break
      udm create lab --export ublk:0 --table "$(udm_table)" > /tmp/again 2>&1 || { cat /tmp/again; break; }
      count=$((count + 1))
      echo $count > /tmp/killed
    done
  ) &
  killer=$!
  round=0
  while [ "$(cat /tmp/killed 2> /dev/null)" != $2 ]; do
    kill -0 $killer 2> /dev/null || [ "$(cat /tmp/killed)" = $2 ] || die "no server any more"
    round=$((round + 1))
    for name in a b c; do
      dd if=/dev/urandom of=/tmp/$name bs=64k count=32 2> /dev/null
      dd if=/tmp/$name of=/tmp/disk/$name.$round bs=16k conv=fsync 2> /dev/null || die "writing" &
    done
    wait_for_writers
    echo 3 > /proc/sys/vm/drop_caches
    for name in a b c; do
      cmp /tmp/$name /tmp/disk/$name.$round || die "round $round: $name is other data"
      rm -f /tmp/disk/$name.$((round - 2))
    done
  done
  touch /tmp/stop
  wait $killer
  umount /tmp/disk || die umount
  fsck $1 $disk
  ! dmesg | grep -i "i/o error" || die "the kernel has seen errors"
  clean udm
  detach udm
  fsck $1 $backing
  echo "LAB: $1, $2 servers killed in $round rounds"
}
# All of this shell's jobs but the killer.
wait_for_writers() {
  for job in $(jobs -p); do
    [ "$job" = "$killer" ] || wait "$job" || die "writing"
  done
}

for step in "$@"; do
  set -- $(echo "$step" | tr : ' ')
  case "$1" in
    session) session $2 $3 ;;
    kills) kills $2 $3 ;;
    *) die "unknown step $step" ;;
  esac
done
exit 0
