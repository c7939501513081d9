#!/bin/bash
# The Debian packages as a service, in a systemd container: installs them, serves a device from
# /etc/udm/vol.conf, restarts the container, kills the server, upgrades, removes and purges.
# `make service` builds the packages first. It needs root and systemd-nspawn.
#
# The container's root is an overlay of this machine's root. Changes are in memory and vanish at the
# end, and the machine's own services do not start. Each wait has a deadline; if one passes, the
# script prints the container's journal and fails. On a busy machine, multiply with LIMIT_FACTOR.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C
factor=${LIMIT_FACTOR:-1}
[ "$(id -u)" -eq 0 ] || { echo "service: this test boots a container, which needs root" >&2; exit 1; }
if [ "${1:-}" != unshared ]; then
  scripts/install-tools.sh service
  # Mounts end with this namespace.
  exec unshare --mount --propagation private "$0" unshared
fi

packages=$(realpath -m "${CARGO_TARGET_DIR:-target}")/deb
work=$(mktemp -d /var/tmp/udm-service.XXXXXX)
container=
finish() {
  local status=$?
  trap - EXIT
  if [ "$status" -ne 0 ] && [ -n "$container" ]; then
    echo "service: the last lines of the container's journal:" >&2
    inside journalctl --no-pager --lines 60 >&2 || true
  fi
  end_container
  umount -R "$work/root" "$work/memory" 2> /dev/null || true
  rm -rf --one-file-system "$work"
  exit "$status"
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

die() { echo "service: $*" >&2; exit 1; }
step() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

# The first process of the container.
leader() { pgrep -P "$container" | tail -1; }

# Runs a command in the container.
inside() { timeout $((60 * factor)) nsenter --target "$(leader)" --all -- "$@"; }

# Repeats a command until it succeeds, for at most so many seconds.
wait_for() {
  local seconds=$(($1 * factor)) what=$2 end
  shift 2
  end=$((SECONDS + seconds))
  until "$@" > /dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || die "waited $seconds s in vain: $what"
    sleep 0.2
  done
}

end_container() {
  [ -n "$container" ] || return 0
  local first
  first=$(leader) || true
  kill -TERM "$container" 2> /dev/null || true
  for _ in $(seq 50); do
    kill -0 "$container" 2> /dev/null || break
    sleep 0.2
  done
  kill -KILL "$container" ${first:+"$first"} 2> /dev/null || true
  wait "$container" 2> /dev/null || true
  container=
}

# An overlay in memory over this machine's root, without the machine's own services.
make_root() {
  mkdir "$work/memory" "$work/root" "$work/data" "$work/new"
  mount -t tmpfs -o mode=755 udm-service "$work/memory"
  mkdir "$work/memory/upper" "$work/memory/work"
  mount -t overlay overlay "$work/root" \
    -o "lowerdir=/,upperdir=$work/memory/upper,workdir=$work/memory/work"
  local etc=$work/root/etc
  rm -rf "$etc"/systemd/system/*.wants "$etc"/systemd/system/*.requires "$etc"/rc?.d/S* "$etc"/udm
  : > "$etc/fstab"
  tr -d - < /proc/sys/kernel/random/uuid > "$etc/machine-id"
  echo udm-service > "$etc/hostname"
  # systemd-nspawn keeps files in a folder that must be in memory.
  mkdir -p /run/systemd
  mount -t tmpfs -o mode=755 udm-service /run/systemd
}

is_booted() { case $(inside systemctl is-system-running) in running | degraded) ;; *) false ;; esac; }

boot() {
  systemd-nspawn --quiet --boot --directory="$work/root" --machine=udm-service --register=no \
    --keep-unit --private-network --link-journal=no --system-call-filter=@aio --console=pipe \
    --bind="$work/data:/srv/udm" --bind-ro="$packages:/packages" --bind-ro="$work/new:/new" \
    > "$work/console" 2>&1 < /dev/null &
  container=$!
  wait_for 60 "the container boots" is_booted
}

property() { inside systemctl show --value --property "$1" udm@vol; }
is_active() { [ "$(property ActiveState)" = active ] && [ "$(property SubState)" = running ]; }
dirty_bytes() { inside udm ls --json | jq '.[0].dirty_bytes'; }

# Copies a file to the export, or compares the first bytes of the export with it.
uri='nbd+unix:///?socket=/run/udm/vol.sock'
write() { inside nbdcopy "/srv/udm/$1" "$uri"; }
check_data() {
  rm -f "$work/data/copy"
  inside nbdcopy "$uri" /srv/udm/copy
  cmp -n "$(stat -c %s "$work/data/$1")" "$work/data/$1" "$work/data/copy" ||
    die "after $2, the device has other data"
}

install_packages() {
  step "installs the packages"
  local deb files=()
  for deb in udm udm-bench libudm0 libudm-dev; do
    files+=("/packages/$(cd "$packages" && ls -t "${deb}"_*.deb | head -1)")
  done
  inside dpkg -i "${files[@]}" > "$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; die "dpkg failed"; }
  inside udm --version
  [ "$(inside stat -c %a /run/udm) $(inside stat -c %a /etc/udm)" = "700 755" ] ||
    die "/run/udm or /etc/udm has another mode"
  inside man --where udm udm.5 udm.7 udm-create udm-bench libudm > /dev/null
  grep -q 'libudm\.so\.0 ' <<< "$(inside ldconfig -p)" || die "the loader does not know libudm.so.0"
}

serve() {
  step "serves a device from /etc/udm/vol.conf"
  truncate -s 64M "$work/data/slow.img"
  truncate -s 64M "$work/data/fast.img"
  head -c 4194304 /dev/urandom > "$work/data/first"
  inside udm create vol --origin /srv/udm/slow.img --fast /srv/udm/fast.img --target writecache \
    --export nbd+unix:///run/udm/vol.sock > "$work/messages" 2>&1 || { cat "$work/messages" >&2; false; }
  inside udm save vol -o /etc/udm/vol.conf
  inside udm check-config
  inside udm remove vol > "$work/messages"
  inside systemctl enable --now udm@vol 2> "$work/messages" || { cat "$work/messages" >&2; false; }
  wait_for 30 "the device is served" is_active
  write first
  [ "$(dirty_bytes)" -gt 0 ] || die "no data is dirty"
  ! cmp -s -n 4194304 "$work/data/first" "$work/data/slow.img" || die "the origin has the data"
}

# What the unit promises of the server's process.
check_sandbox() {
  step "checks the limits of the server"
  local pid status
  pid=$(property MainPID)
  status=$(inside cat "/proc/$pid/status")
  grep -q '^NoNewPrivs:.1$' <<< "$status" || die "NoNewPrivs is not set"
  grep -q '^Seccomp:.2$' <<< "$status" || die "no filter of system calls"
  # CHOWN, DAC_OVERRIDE, FOWNER, NET_BIND_SERVICE, SYS_ADMIN.
  grep -q '^CapBnd:.000000000020040b$' <<< "$status" || die "other capabilities: $status"
  # A container may not be allowed to lower the score of a process.
  [ "$(property OOMScoreAdjust)" = -900 ] || die "another OOM score"
  grep -q '^ro' <<< "$(inside nsenter --target "$pid" --mount findmnt -no OPTIONS /usr)" ||
    die "/usr is writable"
}

restart_machine() {
  step "restarts the machine"
  local status=0
  inside systemctl reboot || true
  is_down() { ! kill -0 "$container"; }
  wait_for 60 "the container ends" is_down
  # With --keep-unit, systemd-nspawn leaves the restart to its caller.
  wait "$container" || status=$?
  [ "$status" -eq 133 ] || die "the container ended with status $status instead of a restart"
  boot
  wait_for 30 "the device is served again" is_active
  [ "$(dirty_bytes)" -gt 0 ] || die "the dirty data is gone"
  check_data first "a restart of the machine"
}

kill_server() {
  step "kills the server"
  local before
  before=$(property MainPID)
  head -c 4194304 /dev/urandom > "$work/data/second"
  write second
  inside kill -KILL "$before"
  is_restarted() { is_active && [ "$(property MainPID)" != "$before" ]; }
  wait_for 30 "the service starts the server again" is_restarted
  check_data second "a kill"
}

# The same package with a higher version.
upgrade() {
  step "upgrades the package"
  local deb before
  deb=$(ls -t "$packages"/udm_*.deb | head -1)
  dpkg-deb --raw-extract "$deb" "$work/unpacked"
  sed -i 's/^Version: .*/&+new/' "$work/unpacked/DEBIAN/control"
  dpkg-deb --root-owner-group -Znone --build "$work/unpacked" "$work/new/udm.deb" > /dev/null
  before=$(property MainPID)
  inside dpkg -i /new/udm.deb > "$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; die "dpkg failed"; }
  is_active && [ "$(property MainPID)" = "$before" ] || die "the upgrade restarted the server"
  [ "$(property NeedDaemonReload)" = no ] || die "systemd was not reloaded"
  check_data second "an upgrade"
  inside systemctl restart udm@vol
  wait_for 30 "the new program serves" is_active
  [ "$(property MainPID)" != "$before" ] || die "systemctl restart did not restart the server"
  check_data second "an upgrade and a restart of the service"
}

remove_package() {
  step "removes the package"
  if inside dpkg --remove udm > "$work/dpkg" 2>&1; then die "dpkg removed udm with a device"; fi
  grep -q 'UDM_REMOVE=yes' "$work/dpkg" || { cat "$work/dpkg" >&2; die "another refusal"; }
  is_active || die "the refused removal stopped the server"
  inside systemctl stop udm@vol
  if inside dpkg --remove udm > "$work/dpkg" 2>&1; then die "dpkg removed udm with dirty data"; fi
  grep -q '^vol  *stopped ' "$work/dpkg" ||
    { cat "$work/dpkg" >&2; die "another refusal"; }
  inside systemctl start udm@vol
  wait_for 30 "the service starts again" is_active
  inside env UDM_REMOVE=yes dpkg --remove udm > "$work/dpkg" 2>&1 ||
    { cat "$work/dpkg" >&2; die "UDM_REMOVE=yes: dpkg failed"; }
  if inside test -e /usr/bin/udm; then die "the program is still there"; fi
  inside test -e /etc/udm/vol.conf || die "the configuration is gone"
  inside dpkg -i /new/udm.deb > "$work/dpkg" 2>&1
  inside systemctl start udm@vol
  wait_for 30 "the device is served after a new installation" is_active
  check_data second "a removal and a new installation"
}

purge() {
  step "purges the packages"
  inside udm remove vol --drain > /dev/null 2>&1
  cmp -n 4194304 "$work/data/second" "$work/data/slow.img" || die "the origin lacks data"
  inside dpkg --purge udm > "$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; die "dpkg failed"; }
  inside test -e /etc/udm/vol.conf || die "the purge removed a configuration file"
  if inside test -L /etc/systemd/system/multi-user.target.wants/udm@vol.service; then
    die "the purge left a link to the unit"
  fi
  if inside test -e /var/lib/udm; then die "the purge left /var/lib/udm"; fi
  inside rm /etc/udm/vol.conf
  inside dpkg -i /new/udm.deb > "$work/dpkg" 2>&1
  inside dpkg --purge udm udm-bench libudm-dev libudm0 > "$work/dpkg" 2>&1 ||
    { cat "$work/dpkg" >&2; die "dpkg failed"; }
  if inside test -e /etc/udm; then die "the purge left an empty /etc/udm"; fi
}

command -v systemd-nspawn > /dev/null || die "systemd-nspawn is missing: NOTHING WAS TESTED"
ls "$packages"/udm_*.deb > /dev/null || die "no packages: run make deb"
make_root
step "boots the container"
boot
install_packages
serve
check_sandbox
restart_machine
kill_server
upgrade
remove_package
purge
step "done: the packages serve devices, and leave nothing"
