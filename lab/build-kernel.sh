#!/bin/bash
# Builds the lab's kernel: allnoconfig plus kernel.config.fragment, everything built in.
#
#   build-kernel.sh [LINUX-SOURCE-TREE-OR-TARBALL]
#
# Without an argument: the newest /usr/src/linux-source-*.tar.*, which Debian's package
# linux-source installs. The source must have dm-pcache (Linux 6.18 or newer). The result is
# bzImage in LAB_SCRATCH (default lab/scratch). About ten minutes on two slow cores.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
scratch=${LAB_SCRATCH:-$here/scratch}
first_version=6.18

# Says what is missing here, and every way to a kernel.
no_source() {
  local offered newest
  echo "$1" >&2
  offered=$(apt-cache search --names-only '^linux-source-[0-9.]+$' 2> /dev/null |
    sed 's/^linux-source-\([0-9.]*\) .*/\1/' | sort -V) || true
  newest=$(tail -1 <<< "$offered")
  {
    echo "dm-pcache is in Linux $first_version and newer. Either"
    if [ -n "$newest" ] && [ "$(printf '%s\n' $first_version "$newest" | sort -V | head -1)" = $first_version ]; then
      echo "  * apt-get install linux-source-$newest, then run this again;"
    elif [ -n "$newest" ]; then
      echo "  * add a Debian release that has linux-source-$first_version or newer (trixie-backports, sid)"
      echo "    to apt's sources, which offer only $(echo $(sed 's/^/linux-source-/' <<< "$offered")) here,"
      echo "    install that, run this again;"
    fi
    echo "  * or give a source tree or tarball:   lab/build-kernel.sh /path/to/linux-$first_version.tar.xz"
    echo "  * or give a kernel that is built, with everything of lab/kernel.config.fragment in it:"
    echo "                                        LAB_KERNEL=/path/to/bzImage make lab"
  } >&2
  exit 1
}

version_of() { awk '$2 == "=" && /^(VERSION|PATCHLEVEL|SUBLEVEL) / {v = v "." $3} END {print substr(v, 2)}' "$1"; }

source=${1:-$({ ls -1v /usr/src/linux-source-*.tar.* 2> /dev/null || true; } | tail -1)}
[ -n "$source" ] || no_source "No kernel source in /usr/src."
[ -e "$source" ] || no_source "$source is not there."

mkdir -p "$scratch"
if [ -f "$source" ]; then
  rm -rf "$scratch/linux"
  mkdir -p "$scratch/linux"
  tar -xf "$source" -C "$scratch/linux" --strip-components=1
  given=$source source=$scratch/linux
fi
[ -f "$source/Makefile" ] || no_source "${given:-$source} is no kernel source."
[ -d "$source/drivers/md/dm-pcache" ] ||
  no_source "${given:-$source} is Linux $(version_of "$source/Makefile"), which has no dm-pcache."

# program:Debian package, and header:Debian package
missing=()
for pair in gcc:gcc make:make flex:flex bison:bison bc:bc lz4:lz4 xz:xz-utils; do
  command -v "${pair%%:*}" > /dev/null || missing+=("${pair##*:}")
done
for pair in gelf.h:libelf-dev openssl/ssl.h:libssl-dev; do
  echo "#include <${pair%%:*}>" | cc -E - > /dev/null 2>&1 || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "Missing, to build a kernel: apt-get install ${missing[*]}" >&2
  exit 1
fi

out=$scratch/build
mkdir -p "$out"
KCONFIG_ALLCONFIG=$here/kernel.config.fragment make -C "$source" O="$out" allnoconfig > /dev/null
while read -r line; do
  case "$line" in
    CONFIG_*=*) grep -qxF "$line" "$out/.config" || echo "note: not taken: $line" >&2 ;;
  esac
done < "$here/kernel.config.fragment"
nice make -C "$source" O="$out" -j"$(nproc)" bzImage
cp "$out/arch/x86/boot/bzImage" "$scratch/bzImage"
echo "Built $scratch/bzImage"
