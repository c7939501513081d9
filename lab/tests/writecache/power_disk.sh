# Power cuts of the machine while udm runs in it, a writecache in mode s on a disk whose volatile
# cache is lost, ext4 on the device: what fsync acknowledged (with FUA writes of the journal's
# commit records, the kernel's defect A) is there.
(. "$here/power.sh"; power_test disk ext4 writecache:4096) || exit 1
