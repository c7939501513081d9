# Power cuts of the machine while udm runs in it, the cache on a disk through the page cache
# (msync), XFS on the device.
(. "$here/power.sh"; power_test disk xfs pcache:false) || exit 1
