#!/bin/bash
# Runs steps one after the other, each with a limit of its own, and shows a table at the end.
#
#   scripts/steps.sh NAME SECONDS COMMAND [NAME SECONDS COMMAND]...
#
# A shell runs each COMMAND. A step that fails, or is ended at its limit (scripts/limited.sh), does
# not keep the others from running; the exit status is 1 then. A file named by UDM_STEPS gets the
# rows of the table, for a caller that shows one table of several such calls.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
rows=${UDM_STEPS:-$(mktemp)}
failed=0
while [ $# -ge 3 ]; do
  echo "== $1"
  SECONDS=0
  "$here/limited.sh" "$2" bash -c "$3" < /dev/null
  status=$?
  case $status in
    0) outcome=ok ;;
    124) outcome="LIMIT REACHED" failed=1 ;;
    *) outcome="FAILED ($status)" failed=1 ;;
  esac
  printf '%s\t%s\t%s\t%s\n' "$1" "$SECONDS" "$2" "$outcome" >> "$rows"
  shift 3
done
[ $# -eq 0 ] || { echo "$0: a step is NAME SECONDS COMMAND" >&2; exit 2; }
if [ -z "${UDM_STEPS:-}" ]; then
  "$here/step-table.sh" "$rows"
  rm -f "$rows"
fi
exit $failed
