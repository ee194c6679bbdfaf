#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Data parallelism, and two stages of layers cut in two, equal one device also on a GPU that the ranks share: over the
# local backend and over NCCL.
set -euo pipefail
export YOKE_TEST_DEVICE=cuda:0 YOKE_TEST_SIZES=1,2,3,4
tests=$YOKE_BUILD/rooms/parallel/yoke_parallel_tests
"$tests" --gtest_brief=1 --gtest_filter='*Parity*:DataParallelFailure.*-*Planted*:*UseOther*:*IsForgotten*:*Slow*'
"$tests" --gtest_brief=1 --gtest_filter='Pipeline*:Parallelize*:TensorParallel*:Placement*:Kernels*'
if [[ -z ${YOKE_TEST_NCCL:-} ]]; then
  echo 'YOKE_TEST_NCCL names no NCCL that lets ranks share a GPU: not run over it'
  exit
fi
export YOKE_TEST_BACKEND=nccl YOKE_TEST_SIZES=2,4
"$tests" --gtest_brief=1 --gtest_filter='*Parity*:-*Planted*:*Slow*'
