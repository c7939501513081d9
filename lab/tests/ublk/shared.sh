# Clients whose memory is a file that udm has mapped too (Linux 7.1): their data goes to the cache and
# comes from it without a call, and is right, also beside clients that share nothing, while servers are
# killed, and when the file is cut short.
. "$here/ublk.sh"
ublk plain shared
grep -q "LAB: .* requests in shared memory" "$console" || die "it did not come to its end"
