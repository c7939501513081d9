# Power cuts of the machine while udm runs in it, the cache on persistent memory (a DAX device),
# ext4 on the device.
(. "$here/power.sh"; power_test dax ext4 pcache:true) || exit 1
