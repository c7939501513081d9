# The whole session of the article on dm-pcache, on udm's disk by ublk and on the kernel's own
# target, in one machine: make a file system, mount, write, unmount, wait until clean, remove, and
# the backing device alone has everything.
. "$here/ublk.sh"
ublk session:udm:xfs session:kernel:xfs session:udm:ext4 session:kernel:ext4
