# Random writes of 4 KiB to a cached disk, udm's by ublk beside the kernel's dm-pcache, in one machine,
# in turns: with 16 in flight at least half as many. One at a time, each costs two switches between
# processes, which emulation makes dear: those rates are only printed.
. "$here/ublk.sh"
ublk rate:kernel rate:udm rate:kernel rate:udm rate:kernel rate:udm
sum_of() { sed -n "s/.*RATE $1 $2: //p" "$console" | awk '{sum += $1} END {print sum}'; }
for threads in 1 16; do
  kernel=$(sum_of kernel $threads) udm_rate=$(sum_of udm $threads)
  echo "$threads in flight: $((udm_rate / 3)) writes a second, the kernel's target $((kernel / 3))"
done
[ $((2 * udm_rate)) -ge "$kernel" ] || die "less than half of dm-pcache's rate"
