# Payload: a file system on a cache over a slow disk, udm's by ublk and the kernel's, in one machine,
# beside one on the fast disk alone: random reads and writes of 4 KiB in one file.
#
#   study.sh FS FILE-MIB SECONDS WHO...
#
# udm has /dev/vda (origin), /dev/vdb (cache) and /dev/vdc (metadata), the kernel's target /dev/vdd,
# /dev/vde and /dev/vdf, and `fast` is /dev/vdg alone; `export` is the same disk as udm's `linear`, by
# ublk: what the way to udm and back costs without a cache. The origins answer after 10 ms. FS is made
# and the file written when WHO comes first; each time it is read and written then, by one and by 16
# threads: "STUDY WHO JOB THREADS RATE HITS", hits in percent. In the end both caches are drained, and
# the origins alone have the file as it was written last.
fs=$1 mib=$2 seconds=$3
shift 3
mkdir -p -m 700 /run/udm
mkdir -p /tmp/disk

die() {
  echo "FAIL: $*"
  tail -5 /run/udm/lab.log 2> /dev/null
  dmesg | tail -15
  exit 1
}

slow() { dmsetup create "$1" --table "0 $(blockdev --getsz "$2") delay $2 0 10" || die "delay"; }
slow slow-udm /dev/vda
slow slow-kernel /dev/vdd

# Where it has its file: two WHO share one.
place() { [ "$1" = export ] && echo fast || echo "$1"; }
has_cache() { [ "$(place "$1")" != fast ]; }
origin() { has_cache "$1" && echo "/dev/mapper/slow-$1" || echo /dev/vdg; }
table() {
  case $1 in
    udm) devices="/dev/vdc /dev/vdb" ;;
    kernel) devices="/dev/vdf /dev/vde" ;;
  esac
  echo "0 $(blockdev --getsz "$(origin "$1")") cache $devices $(origin "$1") 128 2 metadata2 writeback $2 0"
}
# attach WHO: sets $disk.
attach() {
  case $1 in
    fast) disk=/dev/vdg ;;
    export)
      udm create lab --export ublk:0 --table "0 $(blockdev --getsz /dev/vdg) linear /dev/vdg 0" ||
        die "udm create"
      disk=/dev/ublkb0 ;;
    udm)
      udm create lab --export ublk:0 --table "$(table udm smq)" || die "udm create"
      disk=/dev/ublkb0 ;;
    kernel)
      dmsetup create lab --table "$(table kernel smq)" || die "dmsetup create"
      disk=/dev/mapper/lab ;;
  esac
  [ -b "$disk" ] || die "no $disk"
}
status() {
  case $1 in
    udm) udm status lab ;;
    kernel) dmsetup status lab ;;
  esac
}
# Reads and writes that hit, and all of them.
hits() {
  has_cache "$1" || { echo "0 0"; return; }
  status "$1" | awk '{ print $8 + $10, $8 + $9 + $10 + $11 }'
}
detach() {
  case $1 in
    fast) ;;
    udm | export) udm remove lab || die "udm remove" ;;
    kernel) dmsetup remove lab || die "dmsetup remove" ;;
  esac
}
is_clean() { [ "$(status "$1" | cut -d' ' -f14)" = 0 ]; }
drain() {
  case $1 in
    udm) udm drain lab || die "udm drain" ;;
    kernel)
      dmsetup load lab --table "$(table kernel cleaner)" && dmsetup suspend lab &&
        dmsetup resume lab || die "no cleaner"
      for _ in $(seq 300); do is_clean kernel && return; sleep 1; done
      die "not clean: $(status kernel)" ;;
  esac
}
fsck() {
  case $fs in
    ext4) e2fsck -fn "$1" ;;
    xfs) xfs_repair -n "$1" ;;
  esac > /tmp/fsck 2>&1 || { cat /tmp/fsck; die "the file system on $1 has faults"; }
}
mounted() { mount -t $fs "$1" /tmp/disk || die "mount $1"; }

# The first time: large writes bring what they write as a whole into both caches, and reads the rest.
first() {
  case $fs in
    ext4) mkfs.ext4 -q -F "$disk" ;;
    xfs) mkfs.xfs -q -f "$disk" ;;
  esac || die mkfs
  mounted "$disk"
  labjob fill /tmp/disk/file $((mib << 20)) "/tmp/versions-$(place "$1")" || die fill
  for _ in 1 2 3 4; do dd if=/tmp/disk/file of=/dev/null bs=64k iflag=direct 2> /dev/null; done
  umount /tmp/disk || die umount
}

# measure WHO JOB THREADS
measure() {
  before=$(hits "$1")
  rate=$(labjob "$2" /tmp/disk/file "/tmp/versions-$(place "$1")" "$seconds" "$3") || die "$1: $2"
  # Without a cache nothing is counted.
  percent=$(echo $before $(hits "$1") |
    awk '{ all = $4 - $2; print all ? int(($3 - $1) * 100 / all) : 100 }')
  echo "STUDY $1 $2 $3 $rate $percent"
}

study() {
  attach "$1"
  [ -e "/tmp/versions-$(place "$1")" ] || first "$1"
  mounted "$disk"
  # What is read while it warms up is not counted.
  labjob read /tmp/disk/file "/tmp/versions-$(place "$1")" 5 4 > /dev/null || die "$1: warming up"
  for threads in 1 16; do
    measure "$1" read $threads
    measure "$1" write $threads
  done
  umount /tmp/disk || die umount
  detach "$1"
}

for who in "$@"; do study "$who"; done
for who in udm kernel; do
  attach $who
  drain $who
  detach $who
  fsck "$(origin $who)"
  mounted "$(origin $who)"
  labjob check /tmp/disk/file /tmp/versions-$who || die "$who: the origin has other data"
  umount /tmp/disk || die umount
  echo "LAB: $who is right"
done
exit 0
