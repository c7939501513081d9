# The harness itself: the kernel's own media say in the machine what their manifests say.
field() { sed -n "s/^ *\"$1\": \"\(.*\)\",\{0,1\}$/\1/p" "$2"; }

for folder in "$vectors"/pcache-*/; do
  manifest=${folder}manifest.json
  crc=true
  case "$folder" in *nocrc*) crc=false ;; esac
  (
    begin $((512 * MiB)) $((64 * MiB)) $crc
    for image in cache origin; do
      zstd -dqf --sparse "$folder$image.img.zst" -o "$work/$image.img"
    done
    kernel frozen status hash release drain remove origin
    same "$(basename "$folder") status" "$(said STATUS)" "$(field status_after_attach_frozen "$manifest")"
    same "$(basename "$folder") content" "$(said LOGICAL)" "$(field sha256_logical "$manifest")"
    same "$(basename "$folder") drained" "$(said ORIGIN)" "$(field sha256_origin_after_drain "$manifest")"
  ) || exit 1
done
