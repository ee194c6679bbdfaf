#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The communicators' contract over real processes of one host, with one rank or several in each;
# YOKE_TEST_BACKEND=nccl: on its first GPU.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT

layouts='2x1 3x1 4x1 2x2'
filters='Launched/*'
if [[ ${YOKE_TEST_BACKEND:-} == nccl ]]; then
  layouts='2x1 2x2' # a world takes seconds there
  # Where processes take turns on a GPU, NCCL may free memory under a kernel that it has told to end: the failure
  # is reported as it should be, but the process can lose its CUDA context, and with it every later test.
  failures=$(sed -n 's/^TEST_P(CommContract, \(.*\)) {/Launched\/*.\1\/*/p' "$YOKE_SOURCE/yoke/comm/contract_failure_test.cpp")
  filters+="-$(paste -sd: <<<"$failures") $failures"
fi
for layout in $layouts; do
  processes=${layout%x*} ranks=${layout#*x}
  set -f # the filters are not file names
  for filter in $filters; do
    set +f
    export YOKE_TEST_RANKS=$ranks YOKE_PORT
    YOKE_PORT=$(free_port)
    for ((rank = 0; rank < processes; ++rank)); do
      start "$layout" $rank "$processes" "$YOKE_BUILD/rooms/comm/yoke_comm_tests" --gtest_filter="$filter"
    done
    for ((rank = 0; rank < processes; ++rank)); do
      finish "$layout.$rank" 0 200
      says "$layout.$rank" '^\[  PASSED  \] [1-9][0-9]* test'
    done
    echo "$layout $filter: $(grep PASSED "$scratch/$layout.0")"
  done
done
