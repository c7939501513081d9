# A cache that udm formatted and nobody wrote to: the kernel sees it as its own fresh one.
for crc in false true; do
  (
    begin $((576 * MiB)) $((64 * MiB)) $crc
    create
    same "udm reads zeroes" "$(udm_sha)" "$(sha_of "$model")"
    remove
    kernel frozen status table hash release drain remove origin
    flags=1182
    [ $crc = true ] && flags=1183
    same "status" "$(said STATUS | cut -d' ' -f1-9)" "0 131072 pcache 0 35 35 $(said STATUS | cut -d' ' -f7) 70 $flags"
    same "content" "$(said LOGICAL)" "$(sha_of "$model")"
  ) || exit 1
done
