# Power cuts of the machine while udm runs in it, a writecache in mode p on persistent memory (a DAX
# device), XFS on the device.
(. "$here/power.sh"; power_test dax xfs writecache:512) || exit 1
