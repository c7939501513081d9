# A writecache that udm formatted is the kernel's own fresh one, byte for byte up to the label in
# the superblock's reserved bytes, and the kernel takes it for one; in both modes.
for mode in p s; do
  for block in 4096 512; do
    (
      begin_writecache $mode $block $((64 * MiB)) $((16 * MiB))
      # The kernel's own, on a blank device.
      kernel status remove
      status=$(said STATUS)
      cp --sparse=always "$cache" "$work/theirs.img"
      rm "$cache" && truncate -s $((64 * MiB)) "$cache"

      create
      same "udm's status" "$("$udm" status lab)" "$status"
      same "udm reads zeroes" "$(udm_sha)" "$(sha_of "$model")"
      remove
      blocks=$(echo "$status" | cut -d' ' -f5)
      table_bytes=$((64 + 16 * blocks))
      for image in "$cache" "$work/theirs.img"; do
        { head -c 32 "$image"; head -c $table_bytes "$image" | tail -c +65; } | sha256sum
      done > "$work/sums"
      same "the kernel's bytes" "$(head -1 "$work/sums")" "$(tail -1 "$work/sums")"
      kernel frozen status hash release drain remove origin
      same "the kernel's status" "$(said STATUS)" "$status"
      same "content" "$(said LOGICAL)" "$(sha_of "$model")"
    ) || exit 1
  done
done
