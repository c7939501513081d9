# Payload: the real dm-cache over /dev/vda (origin), /dev/vdb (cache) and /dev/vdc (metadata). It is
# left alone until it has written back what is dirty, and removed.
#
#   cache.sh SECTORS BLOCK-SECTORS
dmsetup create cached --table "0 $1 cache /dev/vdc /dev/vdb /dev/vda $2 1 writeback smq 0" || {
  dmesg | grep -i cache | tail -5
  exit 1
}
sleep 3
echo "STATUS: $(dmsetup status cached)"
dmsetup remove cached
