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

# Who reads the environment of a process that is stuck in execve waits for it. Such a process counts
# as the command's if its parent does.
marked() {
  local found pid parent
  if found=$(timeout -s KILL 10 grep -lsaz "^$mark=" /proc/[0-9]*/environ); [ $? -ne 137 ]; then
    grep -o '[0-9]*' <<< "$found"
    return
  fi
  local stuck=()
  found=" "
  for pid in /proc/[0-9]*; do
    pid=${pid#/proc/}
    timeout -s KILL 1 grep -qsaz "^$mark=" "/proc/$pid/environ"
    case $? in
      0) found+="$pid " ;;
      137) stuck+=("$pid") ;;
    esac
  done 2> /dev/null
  for pid in "${stuck[@]}"; do
    parent=$(cut -d' ' -f4 "/proc/$pid/stat" 2> /dev/null)
    [[ $found == *" $parent "* ]] && found+="$pid "
  done
  xargs -r -n 1 <<< "$found"
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
    echo "--- process $pid: $(timeout -s KILL 1 cat "/proc/$pid/cmdline" | tr '\0' ' ' | cut -c1-300)"
    if command -v gdb > /dev/null &&
      timeout -k 5 30 gdb -p "$pid" -batch -nx -iex 'set debuginfod enabled off' \
        -ex 'thread apply all backtrace 15' 2> /dev/null | grep -E '^(Thread|#)'; then
      continue
    fi
    for thread in "/proc/$pid/task"/*; do
      echo "thread ${thread##*/} $(cat "$thread/comm"): $(cut -d' ' -f3 "$thread/stat")," \
        "waits in $(cat "$thread/wchan")," \
        "system call $(timeout -s KILL 1 cut -d' ' -f1 "$thread/syscall")"
      timeout -s KILL 1 sed 's/^/    /' "$thread/stack"
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
  line=$(timeout -s KILL 1 cat "/proc/$pid/cmdline" 2> /dev/null | tr '\0' ' ' | cut -c1-300)
  [ -z "$line" ] || echo "LEFT RUNNING: process $pid: $line"
done 2> /dev/null
[ ${#left[@]} -eq 0 ] || end_all
exit "$status"
