# Power cuts of the machine while udm runs in it, a cache with all three devices on disks whose volatile
# caches are lost: metadata of version 2 and ext4, of version 1 and XFS. After each cut the kernel's own
# target opens the media, too.
(. "$here/power.sh"; power_test disk ext4 cache:2) || exit 1
(. "$here/power.sh"; power_test disk xfs cache:1) || exit 1
