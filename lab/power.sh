# Sourced by the tests power_*: power cuts of the machine while udm runs inside it, its device
# mounted through the kernel's NBD client, a file system at work on it.
#
# The backing device is a disk with a volatile write cache (labdisk): unflushed data survives
# or does not, at random. So is the cache device, if it is a disk. What the work was told to be
# durable is written down outside the machine, in $work/acks, before it goes on.

rounds=${LAB_ROUNDS:-5}
seed=${LAB_SEED:-$(date +%s)}
disks=() cuts=0 checks=0

# power_begin MEDIUM FS TARGET: see guest/power.sh.
power_begin() {
  medium=$1 fs=$2
  begin "$(cache_bytes "$3")" $((384 * MiB)) none
  under_test=$3 meta=
  case $3 in
    cache:*) meta=$work/meta.img; truncate -s $((4 * MiB)) "$meta" ;;
  esac
  mkdir "$work/acks"
  echo "LAB_SEED=$seed LAB_ROUNDS=$rounds; $*"
}

# A writecache and a cache are small, so that they are full and written back while the work goes on.
cache_bytes() {
  case $1 in
    pcache:*) echo $((544 * MiB)) ;;
    writecache:*) echo $((64 * MiB)) ;;
    cache:*) echo $((16 * MiB)) ;;
  esac
}

# disk NAME FILE [none]: serves FILE at $work/NAME.sock until the machine goes away, and keeps
# some of the unflushed sectors, or none.
disk() {
  rm -f "$work/$1.sock"
  cuts=$((cuts + 1))
  "$scratch/labdisk" "$2" "$work/$1.sock" "${3:-$((seed * 1000 + cuts))}" >> "$work/lost" &
  disks+=($!)
  until [ -S "$work/$1.sock" ]; do
    kill -0 $! || die "labdisk $1"
    sleep 0.05
  done
}

# boot [-k REGEX -w SEC] CACHE ORIGIN STEP...: the machine over these media, a cache's metadata among
# them: `meta` where CACHE says `cache`. Sets $is_cut.
boot() {
  local options=() code disks=()
  while [ "${1#-}" != "$1" ]; do options+=("$1" "$2"); shift 2; done
  console=$work/console
  disk vda "$2"
  options+=(-d "nbd:$work/vda.sock")
  case $medium in
    dax) options+=(-p "$1") ;;
    disk*) disk vdb "$1"; options+=(-d "nbd:$work/vdb.sock") ;;
  esac
  local its_meta=${1/cache./meta.}
  [ -z "$meta" ] || { disk vdc "$its_meta"; options+=(-d "nbd:$work/vdc.sock"); }
  shift 2
  echo "--- udm in the machine: $*"
  "$here/run-vm.sh" "${options[@]}" -t 900 -s "$work:host" \
    "$here/guest/power.sh" "$medium" "$fs" "$under_test" "$seed" "$@" > "$console" 2>&1
  code=$?
  # A machine that did not start never came to its disks.
  grep -q 'LAB: start' "$console" || kill "${disks[@]}" 2> /dev/null
  wait "${disks[@]}"
  sed 's/^/    /' "$console"
  is_cut=$(grep -c 'LAB: power cut' "$console")
  [ -z "$meta" ] || metadata_is_whole "$its_meta"
  return $code
}
# However a machine came to its end, udm and thin-provisioning-tools find no fault in the metadata.
metadata_is_whole() {
  cache_check "$1" > "$work/check" 2>&1 || { cat "$work/check"; die "cache_check of $1"; }
  "$udm" cache check "$1" || die "udm cache check of $1"
  checks=$((checks + 1))
}
must_boot() { boot "$@" || die "the virtual machine's payload ended with code $?"; }

# Seconds between 0 and $1, from the seed.
moment() { printf '%d.%02d' $((RANDOM % $1)) $((RANDOM % 100)); }

# The media as the cut left them, for those who change them.
copy_media() {
  cp --sparse=always "$cache" "$work/cache.copy"
  cp --sparse=always "$origin" "$work/origin.copy"
  [ -z "$meta" ] || cp --sparse=always "$meta" "$work/meta.copy"
}

# power_round N
power_round() {
  RANDOM=$(((seed + $1) % 32768))
  must_boot -k 'LAB: working' -w "$(moment 8)" "$cache" "$origin" attach check:all "work:$1"
  [ "$is_cut" = 1 ] || die "the machine was through before the cut"
  echo "round $1: $(cat "$work/acks/$1".* | wc -l) operations acknowledged before the cut"

  # The cache is gone: the backing device alone is what it was at some flush. The other targets,
  # whose write-back merges across flushes, promise no such thing.
  if [ "${under_test%%:*}" = pcache ]; then
    copy_media
    must_boot "$work/cache.copy" "$work/origin.copy" alone check:order
  fi

  # The cache is written back without a device, which a second cut may interrupt.
  copy_media
  must_boot -k 'LAB: recovering' -w "$(moment 2)" "$work/cache.copy" "$work/origin.copy" recover
  must_boot "$work/cache.copy" "$work/origin.copy" recover check:all
  must_boot "$work/cache.copy" "$work/origin.copy" alone check:all

  # The kernel's own target opens them as they are.
  if [ -n "$meta" ]; then
    copy_media
    must_boot "$work/cache.copy" "$work/origin.copy" kernel check:all
  fi

  # The real media go into the next round; half of the times their attach, or the replay of the
  # journal on it, is cut first.
  if [ $((RANDOM % 2)) = 0 ]; then
    must_boot -k 'LAB: attaching' -w "$(moment 4)" "$cache" "$origin" attach check:all
  fi
}

power_test() {
  power_begin "$@"
  must_boot "$cache" "$origin" attach format drain
  for round in $(seq "$rounds"); do power_round "$round"; done
  must_boot "$cache" "$origin" attach check:all drain
  must_boot "$cache" "$origin" alone check:all
  power_summary
}

# What was tried, and that it was something.
power_summary() {
  local acknowledged
  acknowledged=$(cat "$work/acks"/* | wc -l)
  echo "LAB_SEED=$seed, $rounds rounds: $acknowledged operations acknowledged and found;" \
    "disks: $(awk '/^labdisk/ {k += $6; l += $8} END {print k + 0, "unflushed sectors kept,", l + 0, "lost"}' "$work/lost")"
  if [ -n "$meta" ]; then
    echo "$checks checks of metadata; $(cache_dump "$meta" | grep -c '<mapping ') blocks are cached"
    cache_dump "$meta" | grep -q '<mapping ' || die "nothing was cached"
  fi
  [ "$acknowledged" -ge $((20 * rounds)) ] || die "too little work"
}
