# Sourced by the tests of ublk: udm and the kernel's dm-pcache in one machine, each with a disk and
# persistent memory of its own.

# ublk STEP...: see guest/ublk.sh.
ublk() {
  local code
  begin $((544 * MiB)) $((384 * MiB)) true
  cp "$cache" "$work/cache2.img"
  truncate -s $((384 * MiB)) "$work/origin2.img"
  console=$work/console
  "$here/run-vm.sh" -t 1500 -p "$cache" -p "$work/cache2.img" -d "$origin" -d "$work/origin2.img" \
    "$here/guest/ublk.sh" "$@" > "$console" 2>&1
  code=$?
  sed 's/^/    /' "$console"
  [ $code = 0 ] || die "the virtual machine's payload ended with code $code"
  for step in "$@"; do
    case "$step" in session:* | kills:*) ;; *) continue ;; esac
    grep -q "LAB: session\|LAB: .* killed" "$console" || die "no $step"
  done
}
