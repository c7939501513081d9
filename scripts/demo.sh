#!/bin/bash
# `make demo`: a slow file becomes a fast, crash-safe block device. About a minute; needs no root,
# leaves no files. UDM=/path/to/udm shows another build.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
root=$(cd "$(dirname "$0")/.." && pwd)
udm=${UDM:-$root/target/release/udm}

sectors=2097152   # 1 GiB
backing_mib=1024 cache_mib=512

bold= dim= plain_text=
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' plain_text=$'\e[0m'; fi
step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain_text"; }
say() { printf '  %s\n' "$@"; }
die() { printf '\ndemo: %s\n' "$*" >&2; exit 1; }
# Shows a command of udm's, with the folders' names shortened, and runs it.
show() {
  local line=udm word
  for word in "$@"; do
    case "$word" in *' '*) line+=" '$word'" ;; *) line+=" $word" ;; esac
  done
  line=${line//$slow/DISK} line=${line//$fast/MEMORY} line=${line//$run/RUN}
  printf '  %s$ %s%s\n' "$dim" "$line" "$plain_text"
  if [ "$1" = drain ]; then
    "$udm" "$@" # straight to the terminal: it draws a progress bar there
  else
    "$udm" "$@" 2>&1 | sed 's/^/  /'
  fi
}

[ -x "$udm" ] || die "$udm is not there; run: make build"
fio --enghelp 2> /dev/null | grep -qw nbd || die "this fio has no NBD engine"

# The slow folder is on disk, beside the build; the fast one in memory; sockets want short paths.
mkdir -p "$root/target"
slow=$(mktemp -d "$root/target/demo.XXXXXX")
memory=/dev/shm
[ "$(df --output=avail -BM "$memory" 2> /dev/null | tail -1 | tr -dc 0-9)" -ge $cache_mib ] ||
  die "$memory has no $cache_mib MiB free for the cache"
fast=$(mktemp -d "$memory/udm-demo.XXXXXX")
run=$(mktemp -d "/tmp/udm-demo.XXXXXX")
export UDM_RUNTIME_DIR=$run UDM_STATE_DIR=$run/state
started=$SECONDS

pid_of() { "$udm" info "$1" --json | tr -d ' "' | tr ',{}' '\n' | sed -n 's/^pid://p' | head -1; }
cleanup() {
  local code=$? name pid
  trap - EXIT INT TERM
  for name in plain demo; do
    pid=$(pid_of "$name" 2> /dev/null) || true
    [ -n "$pid" ] && kill -9 "$pid" 2> /dev/null
  done
  rm -rf "$slow" "$fast" "$run"
  [ $code -eq 0 ] || printf '\ndemo: did not get through; nothing was left behind\n' >&2
  exit $code
}
trap cleanup EXIT
trap 'exit 130' INT TERM

backing=$slow/backing.img cache=$fast/cache.img socket=$run/nbd.sock
export_uri=nbd+unix://$socket
client_uri="nbd+unix:///?socket=$socket"
pcache_table="0 $sectors pcache $cache $backing 4 cache_mode writeback data_crc false"

# measure JOBS: 4 KiB random writes over NBD, each job with one request at a time, for four
# seconds or 128 MiB, whichever is first. Prints IOPS, p50 and p99 in microseconds.
measure() {
  fio --name=demo --ioengine=nbd --uri="$client_uri" --rw=randwrite --bs=4k --iodepth=1 \
    --numjobs="$1" --size=${backing_mib}M --io_size=$((128 / $1))M --runtime=4 --randseed=7 \
    --group_reporting --percentile_list=50:99 --output-format=terse --terse-version=3 2> "$run/fio" |
    awk -F';' '
      $1 == 3 {
        # Write side: field 49 is IOPS; percentiles stand as 50.000000%=N among the fields after it.
        for (i = 50; i <= NF; i++) {
          if ($i ~ /^50\.0+%=/) { split($i, p, "="); median = p[2] }
          if ($i ~ /^99\.0+%=/) { split($i, p, "="); late = p[2] }
        }
        printf "%d %d %d\n", $49, median, late
      }' | grep . || { cat "$run/fio" >&2; die "fio failed"; }
}
row() { printf '  %-30s %10s %8s %8s   %10s %8s %8s\n' "$@"; }

step "1. A slow file and some fast memory"
dd if=/dev/zero of="$backing" bs=1M count=$backing_mib oflag=direct status=none 2> /dev/null ||
  dd if=/dev/zero of="$backing" bs=1M count=$backing_mib conv=fsync status=none
truncate -s ${cache_mib}M "$cache"
say "backing file  DISK/backing.img   $backing_mib MiB, on the disk of this checkout" \
  "cache         MEMORY/cache.img   $cache_mib MiB, in /dev/shm" \
  "(In earnest the cache is persistent memory or a DAX file: /dev/shm survives the death of the" \
  "server, which we show below, but not a power cut.)"

step "2. How fast is the plain file?"
show create plain --table "0 $sectors linear $backing 0" --export "$export_uri"
say "fio: 4 KiB random writes over NBD, one at a time, by 1 job and then by 8 ..."
plain_1=$(measure 1) plain_8=$(measure 8)
show remove plain

step "3. The same file behind a cache"
say "The table is the kernel's own; dm-pcache would take it, and could open this cache later."
show create demo --table "$pcache_table" --export "$export_uri"
say "fio: the same again ..."
cached_1=$(measure 1) cached_8=$(measure 8)
printf '\n'
row "4 KiB random writes over NBD" "1 job" "" "" "8 jobs" "" ""
row "" "writes/s" "p50 us" "p99 us" "writes/s" "p50 us" "p99 us"
row "plain file (linear)" $plain_1 $plain_8
row "cached (pcache)" $cached_1 $cached_8
printf '\n'
say "The status line is the kernel's, field by field; --all explains it:"
show status demo
show status demo --all

step "4. A file system goes onto the device, and some of it changes"
tree=$slow/tree
mkdir "$tree"
(cd "$root" && tar -cf - --exclude=./target --exclude=./.git --exclude=./lab/scratch \
  --exclude=./lab/results .) | tar -xf - -C "$tree"
cp "$udm" "$tree/udm"
first=$slow/first.img second=$slow/second.img
mke2fs -q -F -t ext4 -d "$tree" "$first" ${backing_mib}M > "$run/mke2fs"
say "nbdcopy: an ext4 image with this project in it, $(find "$tree" -type f | wc -l) files ..."
nbdcopy "$first" "$client_uri"

# Change the tree and, in a second version of the image, the file system in the same way.
cp --sparse=always "$first" "$second"
rm "$tree/CHANGELOG.md"
seq 1 200000 > "$tree/numbers.txt"
mkdir "$tree/new"
cp "$tree"/crates/engine/src/*.rs "$tree/new/"
printf 'changed after the copy\n' > "$tree/Makefile"
{
  echo "rm CHANGELOG.md"
  echo "rm Makefile"
  echo "write $tree/Makefile Makefile"
  echo "write $tree/numbers.txt numbers.txt"
  echo "mkdir new"
  for file in "$tree"/new/*; do echo "write $file new/$(basename "$file")"; done
} > "$run/changes"
debugfs -w -f "$run/changes" "$second" > "$run/debugfs" 2>&1 || die "debugfs: $(cat "$run/debugfs")"

# Every run of blocks in which the two versions differ is written through NBD.
{ cmp -l "$first" "$second" || true; } | awk '
  function put() { if (count) printf "%d %d\n", start, count }
  { block = int(($1 - 1) / 4096) }
  block == start + count - 1 && count { next }
  block == start + count && count { count++; next }
  { put(); start = block; count = 1 }
  END { put() }' > "$run/blocks"
commands=()
while read -r start count; do
  dd if="$second" of="$run/piece.$start" bs=4096 skip="$start" count="$count" status=none
  commands+=(-c "write -q -s $run/piece.$start $((start * 4096)) $((count * 4096))")
done < "$run/blocks"
say "qemu-io: writes the $(wc -l < "$run/blocks") places that changed ..."
qemu-io -f raw "${commands[@]}" "$client_uri" > "$run/qemu-io" 2>&1 || die "$(cat "$run/qemu-io")"

step "5. The server dies"
pid=$(pid_of demo)
say "kill -9 $pid"
kill -9 "$pid"
while kill -0 "$pid" 2> /dev/null; do sleep 0.05; done
show create demo --table "$pcache_table" --export "$export_uri"
say "qemu-img compare: the device against the changed image ..."
say "$(qemu-img compare -f raw -F raw "$second" "$client_uri" || die "content differs")"

step "6. Everything goes back to the slow file"
show drain demo
show remove demo

step "7. The backing file alone: no cache, no udm"
e2fsck -fn "$backing" > "$run/fsck" 2>&1 || die "e2fsck: $(cat "$run/fsck")"
say "e2fsck -fn: $(tail -1 "$run/fsck" | sed "s#$slow#DISK#")"
mkdir "$slow/back"
debugfs -R "rdump / $slow/back" "$backing" > "$run/rdump" 2>&1
checksums() { (cd "$1" && find . -type f ! -path './lost+found/*' -print0 | sort -z | xargs -0 sha256sum); }
checksums "$tree" > "$run/expected"
checksums "$slow/back" > "$run/found"
cmp -s "$run/expected" "$run/found" || {
  diff "$run/expected" "$run/found" | head -5 >&2
  die "files differ"
}
say "SHA-256 of all $(wc -l < "$run/found") files: as written"

step "Done in $((SECONDS - started)) seconds; everything made for this is removed again."
