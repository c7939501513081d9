#!/bin/bash
# Runs a command that must not hang.
#
#   scripts/limited.sh SECONDS COMMAND [ARGUMENT...]
#
# If the command takes longer than SECONDS, this script prints the stacks of all its processes, also
# of servers in sessions of their own, ends them, and exits with 124. Else it exits with the status
# of the command. Processes that the command has left behind are named and ended in either case.
# With UDM_DEADLINE (in seconds since 1970) the command gets no time after that moment.
set -uo pipefail
limit=$1
shift
if [ -n "${UDM_DEADLINE:-}" ]; then
  left=$((UDM_DEADLINE - $(date +%s)))
  [ "$left" -gt 0 ] || { echo "LIMIT: no time is left for $*"; exit 124; }
  [ "$left" -ge "$limit" ] || limit=$left
fi

# Every process that the command starts inherits this variable, whatever its parent or session.
mark=UDM_LIMITED_$$_$RANDOM

marked() {
  local environ
  for environ in /proc/[0-9]*/environ; do
    if grep -qsaz "^$mark=" "$environ" 2> /dev/null; then
      environ=${environ#/proc/}
      echo "${environ%/environ}"
    fi
  done
}

# A process that has just ended another may have started one more: look until none is left.
end_all() {
  local pids tries
  for ((tries = 0; tries < 50; tries++)); do
    mapfile -t pids < <(marked)
    [ ${#pids[@]} -gt 0 ] || return 0
    kill -KILL "${pids[@]}" 2> /dev/null
    sleep 0.1
  done
  echo "LIMIT: these processes cannot be ended: ${pids[*]}"
}

stacks() {
  local pid thread
  for pid in $(marked); do
    echo "--- process $pid: $(tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c1-300)"
    if command -v gdb > /dev/null &&
      timeout -k 5 30 gdb -p "$pid" -batch -nx -iex 'set debuginfod enabled off' \
        -ex 'thread apply all backtrace 15' 2> /dev/null | grep -E '^(Thread|#)'; then
      continue
    fi
    for thread in "/proc/$pid/task"/*; do
      echo "thread ${thread##*/} $(cat "$thread/comm"): $(cut -d' ' -f3 "$thread/stat")," \
        "waits in $(cat "$thread/wchan"), system call $(cut -d' ' -f1 "$thread/syscall")"
      sed 's/^/    /' "$thread/stack"
    done 2> /dev/null
  done
}

trap 'end_all; exit 130' INT
trap 'end_all; exit 143' TERM HUP
env "$mark=1" "$@" &
command=$!
sleep "$limit" > /dev/null 2>&1 &
sleeper=$!
wait -n -p ended "$command" "$sleeper"
status=$?
if [ "$ended" = "$sleeper" ]; then
  echo "LIMIT: not finished after $limit s: $*"
  stacks
  end_all
  exit 124
fi
kill "$sleeper" 2> /dev/null
mapfile -t left < <(marked)
[ ${#left[@]} -eq 0 ] || sleep 0.2 # They may be about to end.
for pid in "${left[@]}"; do
  line=$(tr '\0' ' ' 2> /dev/null < "/proc/$pid/cmdline" | cut -c1-300)
  [ -z "$line" ] || echo "LEFT RUNNING: process $pid: $line"
done 2> /dev/null
[ ${#left[@]} -eq 0 ] || end_all
exit "$status"
