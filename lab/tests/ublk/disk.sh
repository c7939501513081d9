# udm's disk by ublk as the kernel sees it: its limits and operations, a new size under a mount, users
# that keep it, and ends while requests wait or the server is dead.
. "$here/ublk.sh"
ublk odd resize
