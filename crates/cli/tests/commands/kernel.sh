# What the kernel runs in place of init (see kernel.rs). $udm, $target and $PATH are set above this.
# A file system on udm, by the kernel's NBD device: its server is killed under writes, and the next
# one has every file that was synced. So has the origin alone, after everything was written back.
# The last line says whether all of it was right.
trap 'poweroff -f' EXIT
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2> /dev/null
mkdir -p /dev/shm && mount -t tmpfs -o size=90% shm /dev/shm && cd /dev/shm || exit
mkdir -m 700 run && mkdir mnt
# Without a folder for results, udm does not measure copies, which takes 30 seconds here.
export UDM_RUNTIME_DIR=/dev/shm/run UDM_STATE_DIR=/dev/null/none HOME=/root

fail() {
  echo "WRONG: $target on $fs: $*"
  cat run/*.log
  exit
}

must() {
  "$@" > said 2>&1 || fail "$* fails: $(cat said)"
}

sectors=$(cat /sys/block/ubda/size)
start() {
  local words
  case $target in
    cache) words="cache /dev/shm/meta /dev/shm/fast /dev/ubda 128 1 writeback smq 0" ;;
    pcache) words="pcache /dev/shm/fast /dev/ubda 0" ;;
    # nbd-client does not ask for the size of its blocks, which are larger than 512 bytes.
    writecache) words="writecache s /dev/ubda /dev/shm/fast 4096 0" ;;
  esac
  must "$udm" create vol --table "0 $sectors $words" --export nbd+unix:///dev/shm/sock
  must nbd-client -unix /dev/shm/sock /dev/nbd0 -N vol
}

# Writes files, and lists those that are synced, until a write fails.
write_files() {
  local nth=0
  while head -c 40000 /dev/urandom > "mnt/$1$nth" && sync "mnt/$1$nth"; do
    md5sum "mnt/$1$nth" >> synced
    nth=$((nth + 1))
  done 2> /dev/null
}

insmod "/usr/lib/uml/modules/$(uname -r)/kernel/drivers/block/nbd.ko" nbds_max=1 || exit
for fs in ext4 xfs; do
  rm -f fast meta synced
  truncate -s "$([ $target = pcache ] && echo 520M || echo 64M)" fast
  truncate -s 4M meta
  touch synced
  start
  case $fs in
    ext4) must mkfs.ext4 -q -F /dev/nbd0 ;;
    xfs) must mkfs.xfs -q -f /dev/nbd0 ;;
  esac
  must mount -t $fs /dev/nbd0 mnt
  for round in a b; do
    write_files $round &
    until [ "$(grep -c "/$round" synced)" -ge 8 ]; do
      kill -0 $! 2> /dev/null || fail "no more files can be written"
      sleep 0.2
    done
    kill -KILL "$("$udm" info vol --json | jq .pid)"
    must nbd-client -d /dev/nbd0
    wait
    must umount mnt
    start
    must mount -t $fs /dev/nbd0 mnt
    must md5sum --quiet -c synced
  done
  must umount mnt
  must nbd-client -d /dev/nbd0
  must "$udm" remove vol --drain
  case $fs in
    ext4) must e2fsck -fn /dev/ubda ;;
    xfs) must xfs_repair -n /dev/ubda ;;
  esac
  must mount -t $fs -o ro /dev/ubda mnt
  must md5sum --quiet -c synced
  must umount mnt
  echo "$target on $fs: $(wc -l < synced) files"
done
echo RIGHT
