#!/bin/bash
# Makes sure that the programs which the tests and the demo drive are here.
#
#   scripts/install-tools.sh [lab|report|service]
#
# Programs that only some machines can have are installed where that works; without them, tests are
# skipped.
#
# Installs what is missing when run as root on a machine with apt-get; otherwise says exactly what
# to install and fails. Instant when everything is there. With the word "lab", also what `make lab`
# needs: QEMU and what goes into the virtual machine. With the word "report", also the browser that
# `make check-report` opens the benchmarks' report in. With the word "service", also the container
# that `make service` boots.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

# program:Debian package
tools="fio:fio nbdinfo:libnbd-bin nbdcopy:libnbd-bin nbdkit:nbdkit qemu-io:qemu-utils qemu-img:qemu-utils
       mke2fs:e2fsprogs e2fsck:e2fsprogs debugfs:e2fsprogs zstd:zstd strace:strace valgrind:valgrind
       cache_check:thin-provisioning-tools openssl:openssl jq:jq"
lab_tools="qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio dmsetup:dmsetup gcc:gcc pgrep:procps
           mkfs.ext4:e2fsprogs ldd:libc-bin nbd-client:nbd-client mkfs.xfs:xfsprogs"
if [ "${1:-}" = lab ]; then tools="$tools $lab_tools"; fi
if [ "${1:-}" = service ]; then tools="$tools systemd-nspawn:systemd-container man:man-db"; fi
if [ "${1:-}" = report ]; then tools="$tools chromium:chromium"; fi

# A kernel that is a process, for its NBD driver and file systems.
optional_tools="linux.uml:user-mode-linux nbd-client:nbd-client mkfs.xfs:xfsprogs insmod:kmod"

missing=() packages=()
for pair in $tools; do
  if ! command -v "${pair%%:*}" > /dev/null; then
    missing+=("${pair%%:*}")
    packages+=("${pair##*:}")
  fi
done
optional=()
for pair in $optional_tools; do
  command -v "${pair%%:*}" > /dev/null || optional+=("${pair##*:}")
done
if [ ${#optional[@]} -gt 0 ]; then
  if command -v apt-get > /dev/null && [ "$(id -u)" -eq 0 ]; then
    echo "Installing ${optional[*]}, if they can be had here"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update > /dev/null 2>&1 || true
    for package in "${optional[@]}"; do
      apt-get -qq install -y --no-install-recommends "$package" > /dev/null 2>&1 ||
        echo "NOTE: $package cannot be installed: the tests that need it are skipped"
    done
  else
    echo "NOTE: tests are skipped without ${optional[*]}"
  fi
fi
[ ${#missing[@]} -eq 0 ] && exit 0

mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
if command -v apt-get > /dev/null && [ "$(id -u)" -eq 0 ]; then
  echo "Installing ${packages[*]} (missing: ${missing[*]})"
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  apt-get -qq install -y --no-install-recommends "${packages[@]}" > /dev/null
  for program in "${missing[@]}"; do
    command -v "$program" > /dev/null || { echo "$program is still missing" >&2; exit 1; }
  done
else
  echo "Missing: ${missing[*]}" >&2
  echo "Install them, for instance with: sudo apt-get install ${packages[*]}" >&2
  exit 1
fi
