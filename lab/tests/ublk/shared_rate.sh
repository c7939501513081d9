# Random requests of 4 KiB from memory that udm has mapped too, and from a client's own, in turns. What
# is saved is a call and a copy, which in an emulated machine is a tenth of a request: shared memory
# must not cost more than own memory does, apart from how far such rates differ from turn to turn.
. "$here/ublk.sh"
ublk plain memory
median_of() { sed -n "s/.*RATE $1 $2 $3: //p" "$console" | tr -d '\r' | sort -n | sed -n 4p; }
for threads in 1 16; do
  for kind in write read; do
    own=$(median_of own $threads $kind) shared=$(median_of shared $threads $kind)
    echo "$kind, $threads in flight: $shared in a second from shared memory, $own from own memory"
    [ $threads = 1 ] || [ $((5 * shared)) -ge $((4 * own)) ] || die "shared memory is slower"
  done
done
