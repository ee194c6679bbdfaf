#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Data parallelism equals one device also between real processes of one host.
. "$(dirname "${BASH_SOURCE[0]}")/processes.sh"
own_namespaces
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
trap 'kill -KILL "${pids[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT

for processes in 2 3 4; do
  YOKE_PORT=$(free_port)
  export YOKE_PORT
  for ((rank = 0; rank < processes; ++rank)); do
    start parity $rank $processes "$YOKE_BUILD/rooms/parallel/yoke_parallel_tests" \
      --gtest_filter='*Parity*:DataParallelFailure.*-*Planted*:*ThatAreNotFinite*:*UseOther*:Mesh*'
  done
  for ((rank = 0; rank < processes; ++rank)); do
    finish parity.$rank 0 200
    says parity.$rank '^\[  PASSED  \] [1-9][0-9]* test'
  done
  echo "$processes processes: $(grep PASSED "$scratch/parity.0")"
done
