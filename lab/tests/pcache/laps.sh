# More than a lap over all segments, with write-back and collection running: first by udm, then
# by the kernel on the same media, then by udm again.
for crc in false true; do
  (
    begin $((512 * MiB)) $((192 * MiB)) $crc
    for round in 1 2 3; do operations "ops$round" $((10 + round)) 6000 262144 sdz; done
    create
    "$udm" message lab 0 gc_percent 20 || die gc_percent
    udm_run ops1
    expect_after ops1
    same "udm after its laps" "$(udm_sha)" "$(sha_of "$model")"
    remove
    kernel frozen status hash release drain run:ops2 status hash drain status remove origin
    expect_after ops2
    same "the kernel's laps on udm's media" "$(said LOGICAL)" "$(sha_of "$model")"
    same "the kernel's write-back" "$(said ORIGIN)" "$(sha_of "$model")"
    create
    same "udm after the kernel's laps" "$(udm_sha)" "$(sha_of "$model")"
    udm_run ops3
    expect_after ops3
    same "udm's laps on the kernel's media" "$(udm_sha)" "$(sha_of "$model")"
    remove
    kernel_agrees
  ) || exit 1
done
