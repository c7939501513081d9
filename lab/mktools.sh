#!/bin/bash
# Builds the guest's side into LAB_SCRATCH (default lab/scratch): initramfs.cpio.gz (busybox and
# init) and tools.img (an ext4 root: busybox, dmsetup, udm, file systems' tools, the lab's own
# programs, and the libraries they need, copied from this machine). Do not run it while a virtual
# machine is up.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
scratch=${LAB_SCRATCH:-$here/scratch}
mkdir -p "$scratch"
udm=${UDM:-$here/../target/release/udm}
[ -x "$udm" ] || { echo "No $udm: make build, or say UDM=/path/to/udm" >&2; exit 1; }

command -v busybox > /dev/null || {
  echo "No busybox: scripts/install-tools.sh lab installs what the lab needs" >&2
  exit 1
}

for program in labio labfs labjob labdisk; do
  rustc --edition 2024 -O -C target-feature=+crt-static -o "$scratch/$program" "$here/$program.rs"
done

root=$scratch/tools-root
rm -rf "$root"
mkdir -p "$root"/{usr/bin,usr/sbin,usr/lib,usr/lib64,lab,proc,sys,dev,tmp,run,mnt,job,etc}
for link in bin sbin lib lib64; do ln -s "usr/$link" "$root/$link"; done
copy() { # a program, perhaps by another name, and the libraries it needs, each at its place on a usr-merged system
  local program library place
  program=$(command -v "$1")
  rm -f "$root/usr/bin/${2:-$1}"
  cp -L "$program" "$root/usr/bin/${2:-$1}"
  { ldd "$program" 2> /dev/null || true; } | awk '/=> \//{print $3} /^\t\//{print $1}' |
    while read -r library; do
      place=$library
      case "$place" in /usr/*) ;; *) place=/usr$place ;; esac
      if [ ! -e "$root$place" ]; then
        mkdir -p "$root$(dirname "$place")"
        cp -L "$library" "$root$place"
      fi
    done
}
cp "$(command -v busybox)" "$root/usr/bin/busybox"
for applet in $(busybox --list); do
  [ -e "$root/usr/bin/$applet" ] || ln -s busybox "$root/usr/bin/$applet"
done
for program in dmsetup blockdev nbd-client mkfs.ext4 e2fsck mkfs.xfs xfs_repair; do
  copy $program
done
copy "$udm" udm
strip "$root/usr/bin/udm"
bench=$(dirname "$udm")/udm-bench
if [ -x "$bench" ]; then
  copy "$bench" udm-bench
  strip "$root/usr/bin/udm-bench"
fi
cp "$scratch"/lab{io,fs,job} "$here/guest/stage2" "$root/lab/"
chmod +x "$root"/lab/*
echo "root:x:0:0:root:/tmp:/bin/sh" > "$root/etc/passwd"
cp /etc/ld.so.conf "$root/etc/" 2> /dev/null || true
cp -r /etc/ld.so.conf.d "$root/etc/" 2> /dev/null || true
ldconfig -r "$root" 2> /dev/null || true

rm -f "$scratch/tools.img"
truncate -s $(($(du -sm "$root" | cut -f1) * 12 / 10 + 16))M "$scratch/tools.img"
mkfs.ext4 -q -O ^has_journal -d "$root" "$scratch/tools.img"

initramfs=$scratch/initramfs-root
rm -rf "$initramfs"
mkdir -p "$initramfs/bin" "$initramfs/dev"
cp "$(command -v busybox)" "$initramfs/bin/busybox"
ln -s busybox "$initramfs/bin/sh"
cp "$here/guest/init" "$initramfs/init"
chmod +x "$initramfs/init"
mknod "$initramfs/dev/console" c 5 1 2> /dev/null || true
(cd "$initramfs" && find . | cpio -o -H newc --quiet | gzip -1) > "$scratch/initramfs.cpio.gz"
rm -rf "$root" "$initramfs"
