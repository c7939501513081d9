# Payload: /dev/vda grows while this looks at it; its new end is written and read.
die() {
  echo "FAIL: $*"
  dmesg | tail -15
  exit 1
}

size() { cat /sys/block/vda/size; }

before=$(size)
echo "LAB: size $before"
seconds=0
while [ "$(size)" = "$before" ]; do
  seconds=$((seconds + 1))
  [ $seconds -lt 240 ] || die "it does not grow"
  sleep 1
done
after=$(size)
echo "LAB: size $after"
echo "the last" | dd of=/dev/vda bs=512 seek=$((after - 1)) conv=sync,fsync 2> /dev/null || die write
echo 3 > /proc/sys/vm/drop_caches
[ "$(dd if=/dev/vda bs=512 skip=$((after - 1)) 2> /dev/null | head -c 8)" = "the last" ] || die read
! dmesg | grep -i "i/o error" || die "the kernel has seen errors"
