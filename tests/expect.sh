# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the script tests: a scratch folder that goes away at the end, and checks that say what was wrong.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
: "${YOKE_SOURCE:?}" "${YOKE_BUILD:?}" "${YOKE_TORCH:?run by ctest, which sets these three}"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# Runs the command, which must exit with the code and print (on stdout or stderr) a line that matches.
expect() { # CODE PATTERN COMMAND…
  local got=0
  "${@:3}" >"$scratch/output" 2>&1 || got=$?
  if [[ $got != "$1" ]] || ! grep -qE -- "$2" "$scratch/output"; then
    cat "$scratch/output" >&2
    fail "'${*:3}' gave exit $got; wanted exit $1 and a line with '$2'"
  fi
}

# Runs a benchmark and shows it. A figure that misses its target is told, not judged; a wrong value is judged.
measure() { # COMMAND…
  local got=0
  "$@" 2>&1 | tee "$scratch/figures" || got=$?
  ((got == 0)) || grep -q 'figures missed their targets' "$scratch/figures" || fail "'$*' gave exit $got"
}
