#!/bin/bash
# Shows the rows that scripts/steps.sh and scripts/run-tests.sh have written to a file.
set -euo pipefail
{
  printf 'STEP\tSECONDS\tLIMIT\tOUTCOME\n'
  cat "$1"
} | awk -F'\t' '{ printf "%-34s %8s %8s  %s\n", $1, $2, $3, $4 }'
