#!/bin/bash
# Builds the engine with which fio drives udm in its own process, for the fio that is installed.
#
#   scripts/fio-engine.sh          target/fio/udm-fio.so, on the release build
#   scripts/fio-engine.sh check    the same on the debug build, and lets fio verify what it wrote
#
# An engine is compiled with the headers of the very fio that loads it. They are in fio's source,
# which the system's package manager has; FIO_SOURCE=FOLDER names one that is there already (the
# version must be that of `fio --version`).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$root/target/fio
mode=${1:-release}
version=$(fio --version)
mkdir -p "$out"

cannot() {
  echo "$1" >&2
  echo "Give the folder with the source of $version: FIO_SOURCE=FOLDER make fio-engine" >&2
  # In a proof of everything, a machine without source packages skips this, and says so.
  if [ "$mode" = check ]; then echo "SKIPPED: fio's engine was not built: $1"; exit 0; fi
  exit 1
}

# Fetches the source that the installed package was made of, with lists of its own.
fetch() {
  command -v apt-get > /dev/null && command -v dpkg-query > /dev/null ||
    cannot "no apt-get to fetch the source of $version with"
  local lists=$out/lists parts=$out/parts package
  package=$(dpkg-query -W -f '${source:Version}' fio) || cannot "fio is not from a package"
  mkdir -p "$lists/partial" "$parts" "$out/source"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    [ -f "$file" ] || continue
    sed -e 's/^deb /deb-src /' -e 's/^Types:.*/Types: deb-src/' "$file" > "$parts/$(basename "$file")"
  done
  [ ! -f "$parts/sources.list" ] || mv "$parts/sources.list" "$parts/main.list"
  local options=(-qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$parts"
    -o Dir::State::lists="$lists")
  # A list of somebody else may have no sources; what counts is whether fio's are found.
  apt-get "${options[@]}" update > "$out/fetch.log" 2>&1 || true
  (cd "$out" && apt-get "${options[@]}" source --download-only "fio=$package") \
    >> "$out/fetch.log" 2>&1 || cannot "the source of $version cannot be fetched ($out/fetch.log)"
  tar xf "$(find "$out" -name 'fio_*.orig.tar.?z*' ! -name '*.asc')" -C "$out/source" --strip-components=1
}

source=${FIO_SOURCE:-$out/source}
if [ ! -f "$source/ioengines.h" ]; then fetch; fi
if [ ! -f "$source/config-host.h" ]; then
  (cd "$source" && ./configure > "$out/configure.log" 2>&1) ||
    cannot "fio's source cannot be configured ($out/configure.log)"
fi

if [ "$mode" = check ]; then
  # With the features that the tests of the workspace are built with: most is there already.
  ${CARGO:-cargo} build --locked --workspace
  library=$root/target/debug/libudm_capi.so
else
  ${CARGO:-cargo} build --locked --release -p udm-capi
  library=$root/target/release/libudm_capi.so
fi
ln -sf "$library" "$out/libudm.so.0"
# The warnings that are off are those of fio's own headers.
cc -O2 -std=gnu11 -Wall -Wno-sign-compare -D_GNU_SOURCE -shared -fPIC \
  -include "$source/config-host.h" -I "$source" -I "$root/crates/capi/include" \
  -o "$out/udm-fio.so" crates/capi/fio/udm.c "$library" -Wl,-rpath,"$out"
echo "$out/udm-fio.so: fio --ioengine=external:$out/udm-fio.so --udm_table='TABLE' ..."
[ "$mode" = check ] || exit 0

# What two jobs wrote through a small cache is read back and compared, by other processes too.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
truncate -s 64M "$work/origin"
truncate -s 16M "$work/cache"
job=(fio --ioengine=external:"$out/udm-fio.so" --udm_memory="$work" --output-format=terse
  --udm_table="0 131072 writecache s $work/origin $work/cache 4096 0"
  --bs=4k --size=16m --offset_increment=16m --numjobs=2 --randseed=7 --verify=crc32c)
"${job[@]}" --name=once --rw=randwrite --iodepth=1 --fsync=64 > "$work/out"
"${job[@]}" --name=once --rw=randread --iodepth=16 --verify_only > "$work/out"
"${job[@]}" --name=more --rw=randrw --iodepth=16 --sync=1 > "$work/out"
echo "fio verified what it wrote through $out/udm-fio.so"
