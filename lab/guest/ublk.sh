# Payload: udm's devices as disks of the machine itself, by ublk, beside the kernel's dm-pcache.
# udm has /dev/vda and the DAX device made of /dev/pmem0; dm-pcache has /dev/vdb and /dev/pmem1.
#
#   ublk.sh STEP...
#
# Steps, in order:
#   session:WHO:FS  WHO (udm or kernel) makes a cached disk; FS (ext4 or xfs) is made, mounted, written
#                   to and unmounted there; the cache is written back while the disk is idle and the
#                   disk removed; then the backing device alone mounts, and has everything
#   kills:FS:N      files are written, made durable and read back while udm's server is killed N times
#                   and started again: no error, and the files are right
#   plain           from here on caches have no checksums, so that reads that hit are copied once
#   hits            after plain: such reads there are; data is right whether it hits, misses, or both
#   shared          clients with their memory in a file that udm has mapped too: no call for their data;
#                   others beside them; udm killed, started again with the file and without; the file
#                   cut short while reads wait
#   resize          a device is doubled while it is mounted; a disk in use is not removed; one whose
#                   server died is forgotten
#   odd             limits, all operations, and an end while requests wait
#   rate:WHO        "RATE WHO THREADS: " and random writes of 4 KiB in a second
#   memory          "RATE MEMORY THREADS KIND: " and random requests of 4 KiB in a second, seven times
#                   each, from memory that is shared and from own memory
mkdir -p -m 700 /run/udm
mkdir -p /tmp/disk
crc=true
# What follows the number of udm's disk.
words=

die() {
  echo "FAIL: $*"
  tail -5 /run/udm/lab.log 2> /dev/null
  dmesg | tail -15
  exit 1
}

# A DAX device over the whole of /dev/pmem0.
dax_device() {
  [ -e /dev/dax0.0 ] && return
  bus=/sys/bus/nd
  seed_device=$(cat $bus/devices/region0/dax_seed)
  echo namespace0.0 > $bus/drivers/nd_pmem/unbind &&
    echo pmem > $bus/devices/$seed_device/mode &&
    echo 6d1c5d32-5ea7-4a0e-93d4-0a1b2c3d4e5f > $bus/devices/$seed_device/uuid &&
    echo namespace0.0 > $bus/devices/$seed_device/namespace &&
    echo $seed_device > $bus/drivers/dax_pmem/bind || die "no DAX device"
  [ -e /dev/dax0.0 ] || die "no /dev/dax0.0"
}

udm_table() {
  echo "0 ${1:-$(blockdev --getsz /dev/vda)} pcache /dev/dax0.0 /dev/vda 4 cache_mode writeback data_crc $crc"
}
# attach WHO: sets $disk, and $backing.
attach() {
  case $1 in
    udm)
      dax_device
      udm create lab --export "ublk:0$words" --table "$(udm_table $size)" || die "udm create"
      disk=/dev/ublkb0 backing=/dev/vda ;;
    kernel)
      dmsetup create lab --table "0 $(blockdev --getsz /dev/vdb) pcache /dev/pmem1 /dev/vdb 4 \
        cache_mode writeback data_crc true" || die "dmsetup create"
      disk=/dev/mapper/lab backing=/dev/vdb ;;
  esac
  [ -b $disk ] || die "no $disk"
}
clean() {
  case $1 in
    udm) udm wait lab --until clean --timeout 300 || die "udm wait" ;;
    # The head of the log is the 10th word, and the tail of what is dirty the 11th.
    kernel)
      for _ in $(seq 300); do
        set -- $(dmsetup status lab)
        [ "${10}" = "${11}" ] && return
        sleep 1
      done
      die "not clean: $*" ;;
  esac
}
detach() {
  case $1 in
    udm) udm remove lab || die "udm remove"; [ ! -e /dev/ublkb0 ] || die "/dev/ublkb0 is left" ;;
    kernel) dmsetup remove lab || die "dmsetup remove" ;;
  esac
}
make_fs() {
  case $1 in
    ext4) mkfs.ext4 -q -F $2 || die mkfs ;;
    xfs) mkfs.xfs -q -f $2 || die mkfs ;;
  esac
}
fsck() {
  case $1 in
    ext4) e2fsck -fn $2 ;;
    xfs) xfs_repair -n $2 ;;
  esac > /tmp/fsck 2>&1 || { cat /tmp/fsck; die "the file system on $2 has faults"; }
}

session() {
  attach $1
  make_fs $2 $disk
  mount -t $2 $disk /tmp/disk || die mount
  dd if=/dev/urandom of=/tmp/disk/large bs=1M count=48 2> /dev/null || die large
  for name in $(seq 200); do echo "file $name" > /tmp/disk/$name || die small; done
  # Odd places in a file, written over.
  for at in 1 3 77 1000 4095; do
    dd if=/dev/urandom of=/tmp/disk/large bs=512 seek=$at count=3 conv=notrunc 2> /dev/null || die odd
  done
  rm /tmp/disk/7
  (cd /tmp/disk && find . -type f | sort | xargs sha256sum) > /tmp/sums || die sums
  umount /tmp/disk || die umount
  clean $1
  detach $1
  mount -t $2 $backing /tmp/disk || die "the backing device alone does not mount"
  (cd /tmp/disk && sha256sum -c /tmp/sums > /tmp/check) || { grep -v OK /tmp/check; die "other data"; }
  [ "$(wc -l < /tmp/sums)" = 200 ] || die "$(wc -l < /tmp/sums) files"
  umount /tmp/disk || die umount
  fsck $2 $backing
  echo "LAB: session of $1 with $2"
}

server_pid() { udm info ${1:-lab} --json | tr -d ' "' | tr ',{}' '\n' | sed -n 's/^pid://p' | head -1; }

# kills FS N
kills() {
  attach udm
  make_fs $1 $disk
  mount -t $1 $disk /tmp/disk || die mount
  rm -f /tmp/stop /tmp/killed
  (
    count=0
    while [ $count -lt $2 ] && [ ! -e /tmp/stop ]; do
      sleep 1
      kill -9 "$(server_pid)" || break
      udm create lab --export ublk:0 --table "$(udm_table)" > /tmp/again 2>&1 || { cat /tmp/again; break; }
      count=$((count + 1))
      echo $count > /tmp/killed
    done
  ) &
  killer=$!
  round=0
  while [ "$(cat /tmp/killed 2> /dev/null)" != $2 ]; do
    kill -0 $killer 2> /dev/null || [ "$(cat /tmp/killed)" = $2 ] || die "no server any more"
    round=$((round + 1))
    for name in a b c; do
      dd if=/dev/urandom of=/tmp/$name bs=64k count=32 2> /dev/null
      dd if=/tmp/$name of=/tmp/disk/$name.$round bs=16k conv=fsync 2> /dev/null || die "writing" &
    done
    wait_for_writers
    for name in a b c; do
      dd if=/tmp/disk/$name.$round bs=64k iflag=direct 2> /dev/null | cmp /tmp/$name - || die "round $round: $name is other data"
      rm -f /tmp/disk/$name.$((round - 2))
    done
  done
  touch /tmp/stop
  wait $killer
  umount /tmp/disk || die umount
  fsck $1 $disk
  ! dmesg | grep -i "i/o error" || die "the kernel has seen errors"
  clean udm
  [ $crc = false ] || [ "$(said read_in_place)" = 0 ] || die "reads that are to be checked were copied once"
  detach udm
  fsck $1 $backing
  echo "LAB: $1, $2 servers killed in $round rounds"
}
# All of this shell's jobs but the killer.
wait_for_writers() {
  for job in $(jobs -p); do
    [ "$job" = "$killer" ] || wait "$job" || die "writing"
  done
}

# A number that udm says of its disk.
said() { udm info lab --json | tr -d ' "' | tr ',{}' '\n' | sed -n "s/^$1://p" | head -1; }

hits() {
  attach udm
  bytes=$((64 << 20))
  labio gen 7 $bytes 600 300000 dzfs > /tmp/ops && labio run $disk /tmp/ops || die "random operations"
  before=$(said read_in_place)
  labio check $disk /tmp/ops || die "other data"
  # In blocks, of which most lie in one place.
  LABIO_PIECE=4096 labio check $disk /tmp/ops || die "other data in blocks"
  once=$(said read_in_place)
  [ "$once" -gt "${before:-0}" ] || die "no read was copied once: ${once:-nothing said}"
  clean udm
  labio check $disk /tmp/ops || die "other data after write-back"
  [ "$(said failed)" = 0 ] || die "$(said failed) requests have failed"
  detach udm
  labio check $backing /tmp/ops || die "other data on the backing device"
  echo "LAB: $((once - before)) hits were copied once"
}

# The clients' memory, and what udm is told of it.
shared_file() {
  mkdir -p /tmp/clients
  mount -t tmpfs tmpfs /tmp/clients && truncate -s 96M /tmp/clients/memory || die "no memory to share"
  words="?shared=/tmp/clients/memory"
}
# A program that has its memory there.
sharing() { LAB_MEMORY=/tmp/clients/memory "$@"; }
# again WORDS: udm's server is killed and started again.
again() {
  kill -9 "$(server_pid)" || die "no server"
  udm create lab --export "ublk:0$1" --table "$(udm_table $size)" > /tmp/again 2>&1 ||
    { cat /tmp/again; die "udm create again"; }
}
# refused WORDS...: what udm says of a file that cannot be shared has these words.
refused() {
  udm create other --export "ublk:?shared=$1" --table "0 8 zero" 2> /tmp/refused && die "$1 was taken"
  grep -q "$1.*$2" /tmp/refused || die "of $1: $(cat /tmp/refused)"
}

shared() {
  size=$((128 << 11)) bytes=$((64 << 20))
  shared_file
  truncate -s 100 /tmp/clients/odd
  refused /tmp/clients/odd "whole pages"
  refused /tmp/clients/none "No such file"
  refused /dev/vdb "not a file"
  attach udm
  # Odd sectors, discards, zeroes; then all of them with and without the file.
  labio gen 7 $bytes 600 300000 dzfs > /tmp/ops
  sharing labio run $disk /tmp/ops && sharing labio check $disk /tmp/ops || die "random operations"
  [ "$(said shared)" -gt 600 ] || die "only $(said shared) requests were in shared memory"
  labio check $disk /tmp/ops || die "other data for others"
  # Sixteen at a time.
  sharing labjob fill $disk $bytes /tmp/versions || die fill
  before=$(said requests) once=$(said shared)
  sharing labjob write $disk /tmp/versions 2 16 > /dev/null || die "writing"
  sharing labjob read $disk /tmp/versions 2 16 > /dev/null || die "reading"
  all=$(($(said requests) - before)) once=$(($(said shared) - once))
  # Flushes have no data.
  [ $((all - once)) -lt 20 ] && [ $once -gt 1000 ] || die "$once of $all requests were in shared memory"
  labjob check $disk /tmp/versions || die "other data for others"
  once=$(said shared)
  labjob write $disk /tmp/versions 1 16 > /dev/null || die "writing from memory of its own"
  [ "$(said shared)" = "$once" ] || die "memory was shared that is not"
  sharing labjob check $disk /tmp/versions || die "other data in shared memory"
  # Servers die under load, also that of clients that share nothing. The next ones have the file,
  # or do not.
  dmsetup create half --table "0 $((bytes / 512)) linear $disk $((bytes / 512))" || die "no half"
  labjob fill /dev/mapper/half $bytes /tmp/own.versions || die fill
  for next in "$words" "$words" "" "" "$words"; do
    sharing labjob write $disk /tmp/versions 4 16 > /dev/null & writing=$!
    labjob write /dev/mapper/half /tmp/own.versions 4 4 > /dev/null & own=$!
    sleep 1
    again "$next"
    wait $writing && wait $own || die "writing while a server died"
    labjob check /dev/mapper/half /tmp/own.versions || die "other data of others"
    case "$next" in
      "") [ "$(said shared)" = 0 ] || die "shared without a file" ;;
      *) [ "$(said shared)" -gt 100 ] || die "not shared again: $(said shared)" ;;
    esac
    sharing labjob check $disk /tmp/versions || die "other data after a server died"
    labjob check $disk /tmp/versions || die "other data for others after a server died"
  done
  [ "$(said failed)$(said violations)" = 00 ] || die "requests have failed"
  after=$(said shared)
  dmsetup remove half || die "half stays"
  detach udm
  # A disk that was made without the file gets none from the next server.
  keep=$words words=
  attach udm
  kill -9 "$(server_pid)"
  udm create lab --export "ublk:0$keep" --table "$(udm_table $size)" 2> /tmp/refused && die "it shares now"
  grep -q "was created without shared=" /tmp/refused || die "$(cat /tmp/refused)"
  udm create lab --export ublk:0 --table "$(udm_table $size)" || die "udm create"
  labjob check $disk /tmp/versions || die "other data"
  detach udm
  # The file is cut short while reads wait: they get their data by calls, in the pages that the
  # kernel still has, and the client falls over its own memory. Others see nothing of it.
  words=$keep
  attach udm
  sharing labjob read $disk /tmp/versions 60 16 > /tmp/fallen 2>&1 & reading=$!
  sleep 1
  udm suspend lab || die suspend
  sleep 1
  truncate -s 0 /tmp/clients/memory
  udm resume lab || die resume
  wait $reading && die "a client has not noticed that its memory has gone"
  labjob check $disk /tmp/versions || die "other data when the file was cut short"
  labjob write $disk /tmp/versions 1 16 > /dev/null && labjob check $disk /tmp/versions || die "writing"
  [ "$(said shared_is_lost)" = true ] || die "nobody has noticed that the file was cut short"
  [ "$(said failed)$(said violations)" = 00 ] || die "requests have failed"
  detach udm
  rm /tmp/clients/*
  umount /tmp/clients || die "somebody still has the file"
  ! dmesg | grep -i "i/o error" || die "the kernel has seen errors"
  echo "LAB: $once requests in shared memory, $after after servers died"
}

# For the numbers: reads hit, and writes go to the cache.
memory() {
  size=$((64 << 11))
  shared_file
  attach udm
  labjob fill $disk $((64 << 20)) /tmp/versions || die fill
  for _ in $(seq 7); do
    for threads in 1 16; do
      for kind in write read; do
        word=$kind
        [ $kind = read ] || word=
        echo "RATE own $threads $kind: $(labio rate $disk 1 $threads $word)"
        echo "RATE shared $threads $kind: $(sharing labio rate $disk 1 $threads $word)"
      done
    done
  done
  detach udm
}

# A device of one linear line over a half of /dev/vda.
resize() {
  sectors=$(($(blockdev --getsz /dev/vda) / 2))
  udm create half --export ublk:5 --table "0 $sectors linear /dev/vda 0" || die "udm create"
  udm ls | grep -q '^half .*/dev/ublkb5$' || die "udm ls says: $(udm ls)"
  mkfs.ext4 -q -F /dev/ublkb5 && mount -t ext4 /dev/ublkb5 /tmp/disk || die mount
  udm load half --table "0 $((2 * sectors)) linear /dev/vda 0" && udm resume half || die "udm load"
  [ "$(cat /sys/block/ublkb5/size)" = $((2 * sectors)) ] || die "$(cat /sys/block/ublkb5/size)"
  dd if=/dev/urandom of=/dev/ublkb5 bs=4k seek=$((2 * sectors / 8 - 1)) count=1 oflag=direct \
    2> /dev/null || die "writing at the new end"
  echo x > /tmp/disk/x && sync || die "the file system"
  # A disk in use stays, unless it is forced.
  udm remove half 2> /tmp/refused && die "a mounted disk was removed"
  grep -q '1 client' /tmp/refused || die "$(cat /tmp/refused)"
  # Its server dies; the device is forgotten, and its disk with it, mounted or not.
  kill -9 "$(server_pid half)"
  [ -b /dev/ublkb5 ] || die "no disk waits"
  udm create other --export ublk:5 --table "0 8 zero" 2> /tmp/refused && die "another took it over"
  grep -q 'does not belong to this device' /tmp/refused || die "$(cat /tmp/refused)"
  timeout 30 udm remove half --force > /tmp/forgotten || die "forget"
  grep -q '/dev/ublkb5 is deleted' /tmp/forgotten || die "$(cat /tmp/forgotten)"
  [ ! -e /dev/ublkb5 ] && [ ! -e /dev/ublkc5 ] || die "a disk is left"
  udm create taken --export ublk:5 --table "0 8 zero" 2> /tmp/refused && die "a number in use"
  umount /tmp/disk || die "umount of a disk that is gone"
  # A program that has a disk open does not keep it from being removed.
  udm create held --export ublk:5 --table "0 2048 zero" || die "the number is not free"
  exec 7< /dev/ublkb5
  timeout 30 udm remove held --force || die "remove of an open disk"
  # Only its number stays in use, until the program closes the disk.
  udm create held --export ublk:5 --table "0 2048 zero" 2> /tmp/refused && die "an open number"
  grep -q 'deleted while a program had it open' /tmp/refused || die "$(cat /tmp/refused)"
  exec 7<&-
  split
  echo "LAB: a disk grew, and was forgotten"
}

# split_with EXPORTS...: a device with these exports, of which the last may not open.
split_with() { udm create split "$@" --table "0 8192 linear /dev/vda 0" 2> /tmp/refused; }

# If one of two exports does not open, a new disk is deleted, and the disk of a dead server waits.
split() {
  none='nbd+unix:///?socket=/none/socket'
  split_with --export ublk:6 --export "$none" && die "a socket in a directory that does not exist"
  [ ! -e /dev/ublkb6 ] && [ ! -e /dev/ublkc6 ] || die "a disk is left"
  split_with --export ublk:6 || die "$(cat /tmp/refused)"
  mkfs.ext4 -q -F /dev/ublkb6 && mount -t ext4 /dev/ublkb6 /tmp/disk || die mount
  kill -9 "$(server_pid split)"
  echo waits > /tmp/disk/x && sync & syncing=$!
  split_with --export ublk:6 --export "$none" && die "a socket in a directory that does not exist"
  [ -b /dev/ublkb6 ] || die "the disk does not wait"
  kill -0 $syncing || die "a write did not wait for the next server"
  split_with --export ublk:6 || die "$(cat /tmp/refused)"
  wait $syncing || die "a write that waited for the next server"
  [ "$(cat /tmp/disk/x)" = waits ] && umount /tmp/disk || die umount
  fsck ext4 /dev/ublkb6
  udm remove split || die "remove"
}

# same_unit FILE: a limit of the disk is that of /dev/vda; 0 there is a sector.
same_unit() {
  below=$(cat /sys/block/vda/queue/$1) own=$(cat /sys/block/ublkb0/queue/$1)
  [ "$below" != 0 ] || below=512
  [ "$own" = "$below" ] || die "$1 is $own, and $below below"
}

# Requests that make no sense, and those that the driver makes of what users do.
odd() {
  udm create odd --export 'ublk:?queues=2&depth=3' --table "0 65536 linear /dev/vda 0" || die create
  [ "$(ls /sys/block/ublkb0/mq | wc -l)" = 2 ] || die "not two queues"
  [ "$(cat /sys/block/ublkb0/queue/fua)" = 1 ] || die "no FUA"
  [ "$(cat /sys/block/ublkb0/queue/write_cache)" = "write back" ] || die "no write cache"
  # The units of the device below.
  for unit in logical_block_size physical_block_size minimum_io_size discard_granularity; do
    same_unit $unit
  done
  labio gen 7 $((65536 * 512)) 600 300000 dzfs > /tmp/ops && labio run /dev/ublkb0 /tmp/ops &&
    labio check /dev/ublkb0 /tmp/ops || die "random operations"
  udm suspend odd || die suspend
  dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 iflag=direct 2> /dev/null &
  sleep 1
  # It ends although a request waits for a resume that never comes.
  udm remove odd --force || die "remove --force"
  wait
  [ ! -e /dev/ublkb0 ] || die "a disk is left"
  udm create ro --export ublk:0 --table "0 8192 zero" || die "udm create ro"
  udm info ro --json | grep -q '"failed": *0' || die "$(udm info ro --json)"
  udm unexport ro /dev/ublkb0 || die unexport
  [ ! -e /dev/ublkb0 ] || die "a disk is left"
  udm remove ro || die remove
  echo "LAB: odd things were fine"
}

rate() {
  attach $1
  labio rate $disk 3 4 > /dev/null
  for threads in 1 16; do echo "RATE $1 $threads: $(labio rate $disk 5 $threads)"; done
  clean $1
  detach $1
}

for step in "$@"; do
  set -- $(echo "$step" | tr : ' ')
  case "$1" in
    session) session $2 $3 ;;
    kills) kills $2 $3 ;;
    plain) crc=false ;;
    hits) hits ;;
    resize) resize ;;
    odd) odd ;;
    rate) rate $2 ;;
    shared) shared ;;
    memory) memory ;;
    *) die "unknown step $step" ;;
  esac
done
exit 0
