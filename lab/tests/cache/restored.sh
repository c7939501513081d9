# Metadata that `udm cache restore` wrote is the kernel's own: it takes dirty blocks for dirty and
# clean ones for clean, in both versions, and what it leaves is whole.
begin_cache 1 writeback $((16 * MiB)) $((64 * MiB))
cat > "$work/xml" <<'XML'
<superblock uuid="" block_size="64" nr_cache_blocks="512" policy="smq" hint_width="4">
  <mappings>
    <mapping cache_block="0" origin_block="5" dirty="false"/>
    <mapping cache_block="1" origin_block="96" dirty="true"/>
    <mapping cache_block="300" origin_block="7" dirty="true"/>
    <mapping cache_block="511" origin_block="1000" dirty="false"/>
  </mappings>
  <hints>
    <hint cache_block="0" data="AQAAAA=="/>
    <hint cache_block="1" data="PwAAAA=="/>
    <hint cache_block="300" data="CgAAAA=="/>
    <hint cache_block="511" data="AAAAAA=="/>
  </hints>
</superblock>
XML
# Each slot of the cache device says its number.
for slot in $(seq 0 511); do yes "slot $slot" | head -c 32768; done > "$cache"
block() { dd if="$1" bs=32k skip="$2" count=1 2> /dev/null | head -1 | tr -d '\0'; }

for version in 1 2; do
  rm -f "$origin" "$meta"
  truncate -s $((64 * MiB)) "$origin"
  truncate -s $((4 * MiB)) "$meta"
  "$udm" cache restore -i "$work/xml" -o "$meta" --metadata-version $version || die "restore"
  kernel drain status remove
  same "mapped slots" "$(said STATUS | cut -d' ' -f7)" 4/512
  same "dirty slots" "$(said STATUS | cut -d' ' -f14)" 0
  same "slot 1 on the origin" "$(block "$origin" 96)" "slot 1"
  same "slot 300 on the origin" "$(block "$origin" 7)" "slot 300"
  # A clean slot is not written back, so the origin still has zeroes there.
  same "clean slots on the origin" "$(block "$origin" 5)$(block "$origin" 1000)none" none
  cache_is_whole "version $version: what the kernel left"
  same "mappings" "$("$udm" cache dump "$meta" | grep -c '<mapping .*dirty="false"')" 4
done
