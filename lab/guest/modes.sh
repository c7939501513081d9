# Payload: what the modes of I/O are worth in this machine, on XFS on /dev/vda and on /dev/vdb without
# a file system; direct and buffered I/O are compared on /dev/vdc, too. The studies leave their
# numbers in the host's work folder.
die() {
  echo "FAIL: $*"
  dmesg | tail -15
  exit 1
}

echo "LAB: Linux $(uname -r)"
mkdir -p /tmp/disk
mkfs.xfs -q -f /dev/vda || die mkfs
mount -t xfs /dev/vda /tmp/disk || die mount
udm-bench iomodes --small --size 64M --path /tmp/disk --json=/mnt/host/xfs.json || die "iomodes"
# Its file lies on XFS, too: pages of files in memory are not written out.
TMPDIR=/tmp/disk udm-bench pagecache --small --path /dev/vdb --overwrite --device /dev/vdc --destroy \
  --json=/mnt/host/raw.json || die "pagecache"
umount /tmp/disk || die umount
xfs_repair -n /dev/vda || die "xfs_repair"
! dmesg | grep -i "i/o error" || die "the kernel has seen errors"
