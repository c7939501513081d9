#!/bin/bash
# Tools of other projects that are newer than this system's, as judges of what udm writes and serves:
# thin-provisioning-tools 1.x (a rewrite of 0.9), libblkio (another client of vhost-user-blk), and a
# fio that drives libblkio.
#
#   scripts/newer-tools.sh          fetches and builds them: target/newer
#   scripts/newer-tools.sh check    the same, and lets them judge the debug build
#
# They are packages of a later Debian, which run on this one. Nothing is installed. Where they
# cannot be had, `check` says so and goes on; a judgement that is bad fails.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$root/target/newer
mode=${1:-fetch}
# The release whose packages are taken: these need no C library that Debian 12 does not have. Of fio
# only the source is taken, of the newest release.
release=trixie
newest=sid
mkdir -p "$out"

cannot() {
  echo "$1" >&2
  if [ "$mode" = check ]; then echo "SKIPPED: newer tools judged nothing: $1"; exit 0; fi
  exit 1
}

# Unpacks packages of that release, from the system's own mirror, with lists of its own.
fetch() {
  command -v apt-get > /dev/null && [ -r /etc/os-release ] || cannot "no apt-get to fetch packages with"
  local here lists=$out/lists parts=$out/parts keys=/usr/share/keyrings/debian-archive-keyring.gpg
  here=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  [ -n "$here" ] || cannot "the system does not say which release it is"
  rm -rf "$parts"
  mkdir -p "$lists/partial" "$parts"
  # Only entries of the release itself: a security archive or a vendor's has other names.
  local mirror
  mirror=$(apt-get indextargets --format '$(SITE) $(CODENAME)' 'Created-By: Packages' 'Origin: Debian' 2> /dev/null |
    awk -v here="$here" '$2 == here { print $1; exit }')
  [ -n "$mirror" ] || cannot "no mirror of Debian $here is known to apt"
  echo "deb [signed-by=$keys] $mirror $release main" > "$parts/newer.list"
  echo "deb-src [signed-by=$keys] $mirror $newest main" >> "$parts/newer.list"
  local options=(-qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$parts"
    -o Dir::State::lists="$lists" -o Dir::State::status=/dev/null)
  apt-get "${options[@]}" update > "$out/fetch.log" 2>&1 || cannot "the lists of $release cannot be fetched ($out/fetch.log)"
  (cd "$out" && rm -f ./*.deb fio_* &&
    apt-get "${options[@]}" download thin-provisioning-tools libblkio1 libblkio-dev) \
    >> "$out/fetch.log" 2>&1 || cannot "packages of $release cannot be fetched ($out/fetch.log)"
  # A mirror may lack the files that make a package of the source. They are not needed, and apt
  # compares each file that it fetches with the signed lists.
  (cd "$out" && apt-get "${options[@]}" source --download-only fio) >> "$out/fetch.log" 2>&1 || true
  ls "$out"/fio_*.orig.tar.?z > /dev/null 2>&1 ||
    cannot "the source of fio in $newest cannot be fetched ($out/fetch.log)"
  for package in "$out"/*.deb; do dpkg -x "$package" "$out/files"; done
  mkdir -p "$out/fio-source"
  tar xf "$(find "$out" -maxdepth 1 -name 'fio_*.orig.tar.?z*' ! -name '*.asc')" -C "$out/fio-source" \
    --strip-components=1
}

# A fio with libblkio's engine; most of its other engines need libraries that are not looked for.
build_fio() {
  local pc
  pc=$(find "$out/files" -name blkio.pc)
  sed -i -e "s,^prefix=.*,prefix=$out/files/usr," -e "s,^libdir=.*,libdir=$library," \
    -e "s,^includedir=.*,includedir=$out/files/usr/include," "$pc"
  export PKG_CONFIG_PATH=${pc%/*} LIBRARY_PATH=$library
  (cd "$out/fio-source" && ./configure --disable-native > "$out/configure.log" 2>&1 &&
    make -j "$(nproc)" fio > "$out/make.log" 2>&1) || cannot "fio cannot be built ($out/make.log)"
  grep -q '^libblkio engine.*yes' "$out/configure.log" || cannot "fio did not find libblkio ($out/configure.log)"
  for example in info copy; do
    cc -O2 -I "$out/files/usr/include" -o "$out/blkio-$example" \
      "$out/files/usr/share/doc/libblkio-dev/examples/blkio-$example.c" -L "$library" -lblkio \
      -Wl,-rpath,"$library"
  done
  cp "$out/fio-source/fio" "$out/fio"
}

[ -f "$out/files/usr/sbin/pdata_tools" ] || fetch
library=$(dirname "$(find "$out/files" -name 'libblkio.so.1' | head -n 1)")
[ -x "$out/fio" ] || build_fio
echo "$out: $("$out/files/usr/sbin/cache_check" -V), libblkio $(basename "$(readlink "$library/libblkio.so.1")"), fio"
[ "$mode" = check ] || exit 0

# What the newer cache_check, cache_dump and cache_restore say of our metadata, and we of theirs.
PATH=$out/files/usr/sbin:$PATH ${CARGO:-cargo} test --locked -p udm --features mutants --test cache tools::

# libblkio's own programs and fio with its engine, as clients of vhost-user-blk.
${CARGO:-cargo} build --locked --workspace
udm=$root/target/debug/udm
work=$(mktemp -d)
export UDM_RUNTIME_DIR=$work/run LD_LIBRARY_PATH=$library
mkdir -m 700 "$work/run"
end() {
  "$udm" remove judged > /dev/null 2>&1 || true
  rm -rf "$work"
}
trap end EXIT
truncate -s 256M "$work/origin"
truncate -s 64M "$work/fast"
address=vhost-user://$work/judged.sock
"$udm" create judged --table "0 524288 writecache s $work/origin $work/fast 4096 0" --export "$address"
device=(virtio-blk-vhost-user "path=$work/judged.sock")
said=$("$out/blkio-info" "${device[@]}" capacity max-queues flush-needed | tr '\n' ' ')
[[ "$said" == "268435456 "* ]] || { echo "blkio-info says $said" >&2; exit 1; }
head -c 48M /dev/urandom > "$work/in"
truncate -s 256M "$work/in" "$work/back"
"$out/blkio-copy" "--input-file=$work/in" "--output-blkio=${device[0]}" "${device[1]}"
"$out/blkio-copy" "--input-blkio=${device[0]}" "${device[1]}" "--output-file=$work/back"
cmp "$work/in" "$work/back"
job=("$out/fio" --name=judged --ioengine=libblkio --libblkio_driver=virtio-blk-vhost-user
  "--libblkio_path=$work/judged.sock" --thread --bs=4k --size=32m --offset_increment=32m --numjobs=2
  --randseed=7 --output-format=terse)
"${job[@]}" --rw=randrw --iodepth=16 --verify=crc32c > "$work/fio.out"
"${job[@]}" --rw=randwrite --iodepth=4 --bsrange=4k-256k --verify=crc32c --hipri > "$work/fio.out"
# With trims alone fio 3.41's engine has no memory to map, and may crash.
"${job[@]}" --rw=randtrimwrite --iodepth=8 > "$work/fio.out"
"$udm" drain judged
"$udm" remove judged > /dev/null
echo "libblkio's copy and fio with its engine found what they wrote through vhost-user-blk"
