#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The communicators' contract over real processes of one host, with one rank or several in each;
# YOKE_TEST_BACKEND=nccl: on its first GPU.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT

layouts='2x1 3x1 4x1 2x2'
[[ ${YOKE_TEST_BACKEND:-} == nccl ]] && layouts='2x1 2x2' # a world takes seconds there
for layout in $layouts; do
  processes=${layout%x*} ranks=${layout#*x}
  export YOKE_TEST_RANKS=$ranks YOKE_PORT
  YOKE_PORT=$(free_port)
  for ((rank = 0; rank < processes; ++rank)); do
    start "$layout" $rank "$processes" "$YOKE_BUILD/rooms/comm/yoke_comm_tests" --gtest_filter='Launched/*'
  done
  for ((rank = 0; rank < processes; ++rank)); do
    finish "$layout.$rank" 0 280
    says "$layout.$rank" '^\[  PASSED  \] [1-9][0-9]* tests'
  done
  echo "$layout: $(grep PASSED "$scratch/$layout.0")"
done
