# Power cuts of the machine while udm runs in it, a writecache in mode s with blocks as large as the
# disk's sectors, which it overwrites where they are; ext4 on the device.
(. "$here/power.sh"; power_test disk ext4 writecache:512) || exit 1
