# A cache without checksums: reads that hit go by one copy from the cache to the pages of the request,
# the rest as before. The data is right in all cases, also while servers are killed.
. "$here/ublk.sh"
ublk plain hits kills:xfs:3
