# Payload: a file system on /dev/vda, a udm device that a vhost-user server outside of the machine
# serves. Files are written, made durable, read back from the disk and compared; the server dies
# meanwhile, and the guest hears of nothing.
#
#   vhost.sh FS ROUNDS        FS: ext4 or xfs
fs=$1 rounds=$2

die() {
  echo "FAIL: $*"
  dmesg | tail -15
  exit 1
}

# VIRTIO_F_RING_PACKED is bit 34, and features are printed from bit 0 on.
features=$(cat /sys/block/vda/device/features)
echo "LAB: packed ${features:34:1}"
[ "$(ls /sys/block/vda/mq | wc -l)" = 2 ] || die "/dev/vda has not two queues"
case $fs in
  ext4) mkfs.ext4 -q -F /dev/vda || die mkfs ;;
  xfs) mkfs.xfs -q -f /dev/vda || die mkfs ;;
esac
mkdir -p /tmp/disk
mount -t "$fs" /dev/vda /tmp/disk || die mount
round=0
while [ $round -lt "$rounds" ]; do
  round=$((round + 1))
  for name in a b c; do
    dd if=/dev/urandom of=/tmp/$name bs=64k count=16 2> /dev/null
    # Both queues are at work.
    dd if=/tmp/$name of=/tmp/disk/$name.$round bs=64k conv=fsync 2> /dev/null || die "writing" &
    dd if=/tmp/disk/$name.$((round - 1)) of=/dev/null bs=4k 2> /dev/null &
  done
  wait
  echo 3 > /proc/sys/vm/drop_caches
  for name in a b c; do
    cmp /tmp/$name /tmp/disk/$name.$round || die "round $round: $name is other data"
    rm -f /tmp/disk/$name.$((round - 2))
  done
  echo "LAB: round $round"
done
umount /tmp/disk || die umount
case $fs in
  ext4) e2fsck -fn /dev/vda || die "e2fsck" ;;
  xfs) xfs_repair -n /dev/vda || die "xfs_repair" ;;
esac
! dmesg | grep -i "i/o error" || die "the kernel has seen errors"
echo "LAB: no error"
