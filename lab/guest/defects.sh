# Payload: the steps that show defects B, C, C2 and E of dm-writecache (docs/kernel-defects.md), in mode s.
# /dev/mapper/origin lies over /dev/vda; the cache is /dev/vdb.
#
#   defects.sh WHO STEP...
#
# WHO is the target that is tried: udm, or kernel. Steps, in order:
#   attach:WORDS  create the device; after the block size, the table has these words
#   run:FILE      execute an ops file of the host's work folder
#   hold          from now on the origin keeps every write to itself, for hours
#   fail, heal    the origin fails whatever it is asked; it is well again
#   busy          wait until something is on its way to the origin
#   stuck         wait until all that is cached is
#   clean         wait until nothing is cached
#   error:N       wait until the error field of the status is N
#   flush:CODE    message flush, which must return, with 0 or with an error (1)
#   suspend       suspend and resume, which must return
#   origin        "ORIGIN: " and the SHA-256 of the bare origin
#   remove        remove the device
#   cut           say that the host may cut the power
who=$1
shift
mkdir -p -m 700 /run/udm

die() {
  echo "FAIL: $*"
  tail -5 /run/udm/lab.log 2> /dev/null
  dmesg | tail -15
  exit 1
}

sectors=$(blockdev --getsz /dev/vda)
pass="0 $sectors linear /dev/vda 0"
# dm-delay lets reads and flushes through.
hold="0 $sectors delay /dev/vda 0 0 /dev/vda 0 30000000 /dev/vda 0 0"
origin_is() {
  dmsetup load origin --table "$1" && dmsetup suspend --nolockfs --noflush origin &&
    dmsetup resume origin || die "no new origin"
}

attach() {
  table="0 $sectors writecache s /dev/mapper/origin /dev/vdb 4096 $(echo $* | wc -w) $*"
  case $who in
    udm)
      udm create lab --export nbd+unix:///run/lab.sock --table "$table" || die "udm create"
      device=nbd+unix:///run/lab.sock ;;
    kernel)
      dmsetup create lab --table "$table" || die "dmsetup create"
      device=/dev/mapper/lab ;;
  esac
}

# Words of the status line: error, blocks, free ones, those under write-back.
status() {
  case $who in
    udm) set -- $(udm status lab) ;;
    kernel) set -- $(dmsetup status lab) ;;
  esac
  error=$4 blocks=$5 free=$6 busy=$7
}
control() {
  case $who in
    udm) timeout 60 udm "$@" ;;
    kernel) timeout 60 dmsetup "$@" ;;
  esac
}
# wait_for WHAT TEST...: for a minute at most.
wait_for() {
  what=$1
  shift
  for _ in $(seq 120); do
    status
    if eval "$*"; then
      echo "$what: $error $blocks $free $busy"
      return
    fi
    sleep 0.5
  done
  die "not $what: $error $blocks $free $busy"
}

dmsetup create origin --table "$pass" || die origin
for step in "$@"; do
  case "$step" in
    attach:*) attach $(echo "${step#*:}" | tr , ' ') ;;
    run:*) labio run "$device" "/mnt/host/${step#*:}" || die "$step" ;;
    hold) origin_is "$hold" ;;
    fail) origin_is "0 $sectors error" ;;
    heal) origin_is "$pass" ;;
    busy) wait_for busy '[ $busy -gt 0 ]' ;;
    stuck) wait_for stuck '[ $busy -gt 0 ] && [ $((free + busy)) = $blocks ]' ;;
    clean) wait_for clean '[ $free = $blocks ]' ;;
    error:*) wait_for "$step" "[ \$error = ${step#*:} ]" ;;
    flush:*)
      control message lab 0 flush
      code=$?
      # 124 and 143: timeout ended it.
      case $code in
        0) ;;
        124 | 143) die "message flush hangs" ;;
        *) code=1 ;;
      esac
      [ $code = "${step#*:}" ] || die "$step, but it ended with $code" ;;
    suspend) control suspend lab && control resume lab || die suspend ;;
    origin) echo "ORIGIN: $(labio cat /dev/vda | sha256sum | cut -d' ' -f1)" ;;
    remove) control remove lab || die remove ;;
    cut) echo "LAB: cut now"; sleep 60; die "no cut" ;;
    *) die "unknown step $step" ;;
  esac
done
exit 0
