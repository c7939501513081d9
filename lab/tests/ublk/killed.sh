# A server that is killed ten times under load, on each file system: its disk waits for the next
# server, nobody sees an error, and nothing that was durable is lost.
. "$here/ublk.sh"
ublk kills:xfs:10 kills:ext4:10
