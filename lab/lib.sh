# Sourced by the tests: what they do on the host and in the virtual machine.
#
# Each test runs in its own process with its own work folder ($work), which run-vm.sh shows to the
# guest at /mnt/host. Its media are $cache and $origin; the device is called after the test.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
scratch=${LAB_SCRATCH:-$here/scratch}
vectors=$root/tests/vectors
labio=$scratch/labio
udm=${UDM:-$root/target/release/udm}

MiB=$((1 << 20))

die() { echo "FAIL: $*"; exit 1; }

# begin CACHE-BYTES ORIGIN-BYTES CRC: fresh media for a pcache, nothing running.
begin() {
  origin_bytes=$2 sectors=$(($2 / 512)) crc=$3 target=pcache
  work=$(mktemp -d "${LAB_MEDIA:-/dev/shm}/udm-lab.XXXXXX")
  export UDM_RUNTIME_DIR=$work/run UDM_STATE_DIR=$work/state
  mkdir -m 700 "$UDM_RUNTIME_DIR"
  trap finish EXIT
  cache=$work/cache.img origin=$work/origin.img model=$work/model.img socket=$work/nbd.sock
  nbd=nbd+unix://$socket
  truncate -s "$1" "$cache"
  truncate -s "$2" "$origin" "$model"
}

# begin_writecache MODE BLOCK-BYTES CACHE-BYTES ORIGIN-BYTES: the same for a writecache. The kernel
# opens it in mode $kernel_mode, which a test may change.
begin_writecache() {
  begin "$3" "$4" none
  target=writecache mode=$1 kernel_mode=$1 block=$2
}

# begin_cache METADATA-VERSION MODE CACHE-BYTES ORIGIN-BYTES: the same for a cache of blocks of 32 KiB,
# with its metadata in $meta. The kernel opens it in $kernel_mode, too; udm's table may have $more.
begin_cache() {
  begin "$3" "$4" none
  target=cache version=$1 mode=$2 kernel_mode=$2 more=
  meta=$work/meta.img
  truncate -s $((4 * MiB)) "$meta"
}

# cache_is_whole WHAT: udm and thin-provisioning-tools find no fault in the metadata.
cache_is_whole() {
  cache_check "$meta" > "$work/check" 2>&1 || { cat "$work/check"; die "$1: cache_check"; }
  "$udm" cache check "$meta" || die "$1: udm cache check"
}

# Whatever happened, no server outlives its test.
finish() {
  local code=$?
  trap - EXIT
  if [ -x "$udm" ] && "$udm" info lab > /dev/null 2>&1; then
    "$udm" status --all lab || true
    kill_server || true
  fi
  rm -rf "$work"
  exit $code
}

# --- operations and what they must lead to ---------------------------------------------------

# operations FILE SEED COUNT LEN_MAX FLAGS: makes an ops file in the work folder.
operations() { "$labio" gen "$2" "$origin_bytes" "$3" "$4" "$5" > "$work/$1" || die gen; }
# expect_after FILE: the model's content after that ops file too.
expect_after() { "$labio" apply "$model" "$work/$1" 2> /dev/null || die apply; }

sha_of() { sha256sum < "$1" | cut -d' ' -f1; }

# same WHAT FOUND EXPECTED
same() {
  [ -n "$2" ] && [ "$2" = "$3" ] || die "$1: found '$2', expected '$3'"
  echo "ok: $1"
}

# --- udm ---------------------------------------------------------------------------------------

table() {
  case $target in
    pcache) echo "0 $sectors pcache $cache $origin 4 cache_mode writeback data_crc $crc" ;;
    writecache) echo "0 $sectors writecache $mode $origin $cache $block 0" ;;
    cache)
      local features="1 $mode"
      [ "$version" = 1 ] || features="2 metadata2 $mode"
      echo "0 $sectors cache $meta $cache $origin 64 $features smq 0$more" ;;
  esac
}
create() { "$udm" create lab --export "$nbd" "$@" --table "$(table)" || die "udm create"; }
remove() { "$udm" remove lab "$@" || die "udm remove"; }
server_pid() { "$udm" info lab --json | tr -d ' "' | tr ',{}' '\n' | sed -n 's/^pid://p' | head -1; }
kill_server() {
  local pid
  pid=$(server_pid)
  [ -n "$pid" ] || die "udm info names no pid"
  kill -9 "$pid"
  while kill -0 "$pid" 2> /dev/null; do sleep 0.05; done
}
# The device's whole content, read by libnbd's own client.
udm_sha() { nbdcopy "nbd+unix:///?socket=$socket" - | sha256sum | cut -d' ' -f1; }
udm_run() { "$labio" run "$nbd" "$work/$1" || die "operations $1 on udm"; }
udm_check() { "$labio" check "$nbd" "$work/$1" || die "check of $1 on udm"; }

# --- the kernel ----------------------------------------------------------------------------------

# kernel STEP...: boots the machine over the media; its console is $console.
kernel() {
  console=$work/console
  local options=()
  while [ "${1#-}" != "$1" ]; do
    options+=("$1")
    if [ "$1" = -k ]; then options+=("$2"); shift; fi
    shift
  done
  local payload=("$here/guest/$target.sh" "$sectors")
  options+=(-d "$origin" -s "$work:host")
  case $target in
    pcache) options+=(-p "$cache") payload+=("$crc") ;;
    writecache)
      payload+=("$kernel_mode" "$block")
      case $kernel_mode in
        p) options+=(-p "$cache") ;;
        s) options+=(-d "$cache") ;;
      esac ;;
    cache)
      payload+=("$version" "$kernel_mode")
      options+=(-d "$cache" -d "$meta") ;;
  esac
  echo "--- dm-$target: $*"
  "$here/run-vm.sh" "${options[@]}" "${payload[@]}" "$@" > "$console" 2>&1
  local code=$?
  sed 's/^/    /' "$console"
  [ $code = 0 ] || die "the virtual machine's payload ended with code $code"
}
# said WORD: what the guest printed after WORD, the last time.
said() { sed -n "s/.*$1: //p" "$console" | tail -1; }

# The kernel reads the media as the model says, and so is the backing device once it has drained.
kernel_agrees() {
  kernel frozen status hash release drain status remove origin
  same "the kernel reads the device" "$(said LOGICAL)" "$(sha_of "$model")"
  same "the kernel's write-back" "$(said ORIGIN)" "$(sha_of "$model")"
  same "the backing file itself" "$(sha_of "$origin")" "$(sha_of "$model")"
}
