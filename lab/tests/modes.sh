# The modes of I/O inside the machine, on XFS and on a raw block device: every mode that this kernel
# has works, lazy keeps what is unwritten within its window, and RWF_DONTCACHE on a raw block device
# is refused before Linux 7.3 and used from then on. Rates of an emulated machine are only printed.
begin $((512 * MiB)) $((1536 * MiB)) none
truncate -s $((512 * MiB)) "$work/vdc.img"
console=$work/console
"$here/run-vm.sh" -t 1200 -d "$origin" -d "$cache" -d "$work/vdc.img" -s "$work:host" \
  "$here/guest/modes.sh" > "$console" 2>&1
code=$?
sed 's/^/    /' "$console"
[ $code = 0 ] || die "the virtual machine's payload ended with code $code"

noted() { jq -e --arg what "$2" '.[].study.notes | any(contains($what))' "$work/$1" > /dev/null; }
# within FILE COUNT: the study has COUNT claims about what is unwritten, and all hold.
within() {
  local found
  if noted "$1" "is not known: the kernel does not say"; then
    echo "SKIPPED: $1: this kernel has no cachestat (lab/build-kernel.sh builds one that has)"
    return
  fi
  found=$(jq -r '.[].study.claims[] | select(.what | test("unwritten / ")) |
    "\(.holds) \(.what): \(.median)"' "$work/$1")
  [ "$(grep -c '^true ' <<< "$found")" = "$2" ] || die "$1: not $2 claims that hold: $found"
  sed 's/^true/ok:/' <<< "$found"
}
within xfs.json 3
within raw.json 2

version=$(sed -n 's/^LAB: Linux \([0-9]*\.[0-9]*\).*/\1/p' "$console" | head -1)
[ -n "$version" ] || die "the machine does not say its version"
refused() { noted "$1" "dontcache was not measured"; }
refused xfs.json && die "RWF_DONTCACHE is refused on XFS"
if [ "$(printf '%s\n' 7.3 "$version" | sort -V | head -1)" = 7.3 ]; then
  refused raw.json && die "Linux $version: RWF_DONTCACHE is refused on a raw block device"
else
  refused raw.json || die "Linux $version: RWF_DONTCACHE works on a raw block device before 7.3"
fi
echo "ok: RWF_DONTCACHE on Linux $version"
