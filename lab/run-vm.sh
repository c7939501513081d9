#!/bin/bash
# Boots the lab's kernel in QEMU (TCG: no KVM, no root needed), runs a payload as root, prints the
# serial console, exits with the payload's exit code.
#
#   run-vm.sh [options] payload.sh [words...]
#     -p FILE        NVDIMM over FILE: /dev/pmem0, pmem1, ... in the order given
#     -d FILE[:ro]   virtio-blk disk: /dev/vda, vdb, ...
#     -d nbd:SOCKET  the same over an NBD server, which hears the guest's flushes
#     -v SOCKET      vhost-user-blk disk with two rings, over a vhost-user server: /dev/vda, ...
#     -v SOCKET:packed   the same with packed rings
#     -s DIR:TAG     folder of the host, at /mnt/TAG of the guest
#     -m SIZE        memory (default 1G)      -c N    CPUs (default 2)
#     -t SEC         timeout (default 1800)
#     -x             the guest is expected to reset itself: exit 0 when it ends after LAB-CRASH
#     -k REGEX       kill -9 QEMU when the console shows REGEX: a power cut; exit 0 then
#     -w SEC         not immediately, but this much later
#     -g             show the kernel's log
# Exit: the payload's code; 124 timeout; 125 the guest died unexpectedly (an oops is a panic is an exit).
#
# LAB_KERNEL (default $LAB_SCRATCH/bzImage) is the kernel; LAB_SCRATCH (default lab/scratch) holds
# what mktools.sh built.
set -u
here=$(cd "$(dirname "$0")" && pwd)
scratch=${LAB_SCRATCH:-$here/scratch}
kernel=${LAB_KERNEL:-$scratch/bzImage}
disks=() vhosts=() pmems=() shares=() mem=1G cpus=2 limit=1800 crash=0 kill_at= kill_after=0 log="quiet loglevel=4"
while getopts "p:d:v:s:m:c:t:xk:w:g" option; do
  case $option in
    p) pmems+=("$OPTARG") ;; v) vhosts+=("$OPTARG") ;; d) disks+=("$OPTARG") ;; s) shares+=("$OPTARG") ;;
    m) mem=$OPTARG ;; c) cpus=$OPTARG ;; t) limit=$OPTARG ;;
    x) crash=1 ;; k) kill_at=$OPTARG ;; w) kill_after=$OPTARG ;; g) log="loglevel=7" ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
payload=${1:?run-vm.sh: no payload}
shift
for file in "$kernel" "$scratch/initramfs.cpio.gz" "$scratch/tools.img" "$payload"; do
  [ -e "$file" ] || { echo "run-vm.sh: no $file (see lab/README.md)" >&2; exit 2; }
done

job=$(mktemp -d "${TMPDIR:-/tmp}/udm-lab.XXXXXX")
guard=
trap '[ -z "$guard" ] || kill "$guard" 2> /dev/null; rm -rf "$job"' EXIT
trap 'exit 130' INT TERM
cp "$payload" "$job/payload.sh"
echo "$*" > "$job/args"

qemu=(qemu-system-x86_64 -accel tcg,thread=multi,tb-size=256 -cpu max -smp "$cpus"
  -nodefaults -no-user-config -display none -vga none -no-reboot
  -kernel "$kernel" -initrd "$scratch/initramfs.cpio.gz"
  -serial stdio -monitor none -device virtio-rng-pci)
machine=q35 memory=("$mem") append=
if [ ${#pmems[@]} -gt 0 ]; then
  machine=q35,nvdimm=on
  memory=("$mem,slots=$((${#pmems[@]} + 1)),maxmem=16G")
  # QEMU places NVDIMMs where we say: 1 GiB apart, from 4 GiB. The kernel's NFIT driver would give
  # raw namespaces without struct pages, which dm-pcache refuses, and an fsdax label would shift
  # the media by 2 MiB. So NFIT is switched off and the range handed to the e820 pmem driver:
  # /dev/pmemN is then the file, byte for byte, with DAX.
  number=0 at=4
  for file in "${pmems[@]}"; do
    size=$(stat -c %s "$file")
    qemu+=(-object "memory-backend-file,id=mem$number,share=on,mem-path=$file,size=$size"
      -device "nvdimm,id=nv$number,memdev=mem$number,unarmed=off,addr=$((at << 30))")
    append+=" memmap=$size!$((at << 30))"
    at=$((at + ((size + (1 << 30) - 1) >> 30)))
    number=$((number + 1))
  done
  append+=" initcall_blacklist=nfit_init"
fi
# What is outside of the machine can only use memory that is shared.
if [ ${#vhosts[@]} -gt 0 ]; then
  qemu+=(-object "memory-backend-memfd,id=ram,size=$mem,share=on")
  machine+=,memory-backend=ram
fi
qemu+=(-machine "$machine" -m "${memory[@]}")
number=0
for socket in "${vhosts[@]}"; do
  rings=
  case "$socket" in *:packed) rings=,packed=on ;; esac
  qemu+=(-chardev "socket,id=v$number,path=${socket%:packed},reconnect=1"
    -device "vhost-user-blk-pci,chardev=v$number,num-queues=2$rings")
  number=$((number + 1))
done
number=0
for disk in "${disks[@]}"; do
  case "$disk" in
    nbd:*) drive="file=nbd+unix:///?socket=${disk#nbd:},cache=writeback" ;;
    *:ro) drive="file=${disk%:ro},cache=unsafe,aio=threads,readonly=on" ;;
    *) drive="file=$disk,cache=unsafe,aio=threads" ;;
  esac
  qemu+=(-drive "if=none,id=d$number,format=raw,$drive"
    -device "virtio-blk-pci,drive=d$number,num-queues=1")
  number=$((number + 1))
done
qemu+=(-drive "if=none,id=tools,format=raw,file=$scratch/tools.img,readonly=on,cache=unsafe"
  -device virtio-blk-pci,drive=tools,serial=labtools
  -virtfs "local,path=$job,mount_tag=job,security_model=none,readonly=on")
for share in "${shares[@]}"; do
  qemu+=(-virtfs "local,path=${share%%:*},mount_tag=${share#*:},security_model=none")
done
# no_timer_check: on a busy host the timer's first interrupts may come later than the kernel waits.
qemu+=(-append "console=ttyS0 $log panic=-1 oops=panic nokaslr tsc=reliable clocksource=tsc
  mitigations=off rcupdate.rcu_expedited=1 no_timer_check $append")

mkfifo "$job/console"
timeout -k 5 "$limit" "${qemu[@]}" < /dev/null > "$job/console" 2>&1 &
guard=$!
code=125 is_over=0 crashed=0 cutting=
while IFS= read -r line; do
  line=${line%$'\r'}
  printf '%s\n' "$line"
  case "$line" in
    *LAB-EXIT:*) code=${line##*LAB-EXIT:} is_over=1 ;;
    *LAB-CRASH*) crashed=1 ;;
  esac
  if [ -n "$kill_at" ] && [ -z "$cutting" ] && [[ "$line" =~ $kill_at ]]; then
    machine_pid=$(pgrep -P "$guard" | head -1)
    (sleep "$kill_after"; kill -9 "$machine_pid") 2> /dev/null &
    cutting=$!
  fi
# That the machine was killed is no news.
done < "$job/console" 2> /dev/null
wait "$guard" 2> /dev/null
guard_code=$?
guard=
# 137: it died by that kill, and not by itself.
if [ -n "$cutting" ]; then
  kill "$cutting" 2> /dev/null
  if [ $is_over = 0 ] && [ $guard_code = 137 ]; then
    code=0 is_over=1
    echo "LAB: power cut"
  fi
fi
if [ $is_over = 0 ]; then
  if [ $crash = 1 ] && [ $crashed = 1 ]; then code=0
  elif [ $guard_code = 124 ] || [ $guard_code = 137 ]; then code=124
  fi
fi
exit "$code"
