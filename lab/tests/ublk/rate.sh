# Random writes of 4 KiB to a cached disk, udm's by ublk beside the kernel's dm-pcache, in one machine:
# at least half as many. Both wait for one write at a time, or four threads do.
. "$here/ublk.sh"
ublk rate:kernel rate:udm
for threads in 1 4; do
  kernel=$(said "RATE kernel $threads") udm_rate=$(said "RATE udm $threads")
  echo "$threads threads: $udm_rate writes a second, the kernel's target $kernel"
  [ $((2 * udm_rate)) -ge "$kernel" ] || die "less than half of dm-pcache's rate"
done
