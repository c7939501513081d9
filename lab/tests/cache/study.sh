# The published study's jobs on a mounted file system: udm's cache by ublk and the kernel's over the
# same slow origin, in turns in one machine, beside the fast disk alone and the same disk as udm's
# `linear` (the export without a cache). What is there in the end is
# judged; rates of an emulated machine are only printed. LAB_FS (default ext4) is the file system.
begin_cache 2 writeback $((96 * MiB)) $((384 * MiB))
fs=${LAB_FS:-ext4}
disks=(-d "$origin" -d "$cache" -d "$meta")
for file in origin cache meta; do
  cp "$work/$file.img" "$work/$file-kernel.img"
  disks+=(-d "$work/$file-kernel.img")
done
truncate -s $((384 * MiB)) "$work/fast.img"
console=$work/console
"$here/run-vm.sh" -t 1500 "${disks[@]}" -d "$work/fast.img" "$here/guest/study.sh" \
  "$fs" 32 8 fast export kernel udm kernel udm export fast > "$console" 2>&1
code=$?
sed 's/^/    /' "$console"
[ $code = 0 ] || die "the virtual machine's payload ended with code $code"
for who in udm kernel; do grep -q "LAB: $who is right" "$console" || die "$who was not judged"; done
cache_is_whole "what udm left"
meta=$work/meta-kernel.img
cache_check "$meta" > "$work/check" 2>&1 || { cat "$work/check"; die "what the kernel left"; }
# mean_of WHO JOB THREADS FIELD: of both times.
mean_of() {
  sed -n "s/.*STUDY $1 $2 $3 //p" "$console" |
    awk -v field="$4" '{ sum += $field } END { printf "%d", NR == 2 ? sum / NR : 0 }'
}
for job in read write; do
  for threads in 1 16; do
    for who in fast export kernel udm; do
      rate=$(mean_of $who $job $threads 1)
      [ "$rate" -gt 0 ] || die "$who has no rate of $job with $threads threads"
      eval "$who=$rate ${who}_hits=$(mean_of $who $job $threads 2)"
    done
    echo "$fs, rand$job, $threads in flight: udm $udm ($udm_hits % hits), the kernel $kernel" \
      "($kernel_hits % hits), the fast disk alone $fast, by ublk $export;" \
      "$(awk "BEGIN { printf \"udm / kernel %.2f, udm / fast %.2f, kernel / fast %.2f, \
ublk / fast %.2f, udm / ublk %.2f\", \
        $udm / $kernel, $udm / $fast, $kernel / $fast, $export / $fast, $udm / $export }")"
  done
done
