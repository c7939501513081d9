# What a failing metadata device leaves, in both versions. The kernel marks the metadata as to be
# checked (needs_check): nobody opens it until the mark is gone, which udm and cache_check take away
# alike. Where the kernel cannot even do that, and where udm met the failure, there is no mark. Nobody
# loses what was flushed.
superblock_says() { "$udm" inspect "$meta" --json | tr -d ' \n' | grep -q "\"needs_check\":$1"; }
keep() { for medium in meta cache origin; do cp --sparse=always "$work/$medium.img" "$work/$medium.kept"; done; }
put_back() { for medium in meta cache origin; do cp --sparse=always "$work/$medium.kept" "$work/$medium.img"; done; }

# media VERSION: `first` is written and flushed; `second`, whole blocks that come into the cache, may
# be there.
media() {
  begin_cache "$1" writeback $((4 * MiB)) $((16 * MiB))
  echo "q 0 65536 30 16777216 32768 p 1 0" > "$work/first"
  "$labio" gen 61 "$origin_bytes" 200 65536 fs >> "$work/first"
  echo "q 32768 65536 40 16777216 32768 p 1000 0" > "$work/second"
  cat "$work/first" "$work/second" > "$work/both"
  echo s >> "$work/second"
}

# refused WHAT COMMAND...: udm names the flag that helps, and changes nothing.
refused() {
  local what=$1
  shift
  "$udm" "$@" > "$work/refusal" 2>&1 && die "$what was not refused"
  grep -q -e '--clear-needs-check-flag' "$work/refusal" || { cat "$work/refusal"; die "$what"; }
  cmp "$meta" "$work/meta.kept" && cmp "$origin" "$work/origin.kept" || die "$what has written"
  echo "ok: $what is refused"
}

marked() {
  media "$1"
  kernel run:first keep fail fails:second status remove
  case "$(said STATUS)" in
    *" ro needs_check "*) ;;
    *) die "the kernel is in another state" ;;
  esac
  superblock_says true || die "udm sees no mark"
  keep
  refused "$1: a device" create lab --export "$nbd" --table "$(table)"
  refused "$1: a recovery" recover "$meta" "$cache" "$origin"
  kernel refused
  cmp "$meta" "$work/meta.kept" || die "the kernel has changed what it refuses"

  # udm's way out, and the kernel's opinion of it.
  "$udm" cache check "$meta" || die "udm finds a fault beside the mark"
  superblock_says true || die "a check took the mark away"
  "$udm" cache check --clear-needs-check-flag "$meta" || die "the mark does not go"
  superblock_says false || die "the mark is there"
  cache_is_whole "after the mark"
  ours=$(cache_dump "$meta" | sha256sum)
  kernel check:both hash status remove
  case "$(said STATUS)" in *" rw - "*) ;; *) die "the kernel does not write to it" ;; esac
  content=$(said LOGICAL)

  # The other tool's, and udm's opinion of that.
  put_back
  cache_check --clear-needs-check-flag "$meta" || die "cache_check"
  same "$1: both tools leave the same" "$(cache_dump "$meta" | sha256sum)" "$ours"
  create
  same "$1: udm reads what the kernel reads" "$(udm_sha)" "$content"
  remove --drain
  same "$1: udm's write-back" "$(sha_of "$origin")" "$content"

  # A repaired copy has no mark either.
  put_back
  truncate -s $((4 * MiB)) "$work/repaired"
  "$udm" cache repair -i "$meta" -o "$work/repaired" || die "repair"
  mv "$work/repaired" "$meta"
  cache_is_whole "repaired"
  kernel hash drain remove origin
  same "$1: the kernel opens a repaired one" "$(said LOGICAL)" "$content"
  same "$1: and writes it back" "$(said ORIGIN)" "$content"
}

unmarked() {
  media "$1"
  kernel run:first keep fail-all fails:second status remove
  case "$(said STATUS)" in
    *" Fail"* | *" ro needs_check "*) ;;
    *) die "the kernel is in another state" ;;
  esac
  superblock_says false || die "there is a mark"
  cache_is_whole "what a kernel left that could not write"
  create
  udm_check both || exit 1
  content=$(udm_sha)
  remove
  kernel hash drain remove origin
  same "$1: the kernel goes on with it" "$(said LOGICAL)" "$content"
  same "$1: and writes it back" "$(said ORIGIN)" "$content"
}

# udm in the machine: it says ro, and goes on when the device does; a reset leaves no mark.
of_udm() {
  media "$1"
  operations third 63 200 65536 fs
  kernel -x udm run:first "$2" fails:second status heal rw check:both run:third hash status crash
  content=$(said LOGICAL)
  superblock_says false || die "udm left a mark"
  cache_is_whole "what udm left"
  kernel hash status remove
  same "$1: the kernel reads it" "$(said LOGICAL)" "$content"
  case "$(said STATUS)" in *" rw - "*) ;; *) die "the kernel does not write to it" ;; esac
  # What was /dev/vdb and /dev/vda is a file here.
  more=" rebind true"
  create
  same "$1: udm reads it" "$(udm_sha)" "$content"
  remove
}

for version in 1 2; do
  (marked $version) || exit 1
  (unmarked $version) || exit 1
  for failure in fail fail-all; do
    (of_udm $version $failure) || exit 1
  done
done
