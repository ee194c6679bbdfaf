#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Flows whose queues share a GPU: the tests of the room again, and the examples.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
yoke=$YOKE_BUILD/yoke
export YOKE_TEST_DEVICE=cuda:0
"$YOKE_BUILD/rooms/flow/yoke_flow_tests" --gtest_brief=1
loss() { "$yoke" flow run "$YOKE_SOURCE/examples/flow/$1.toml" "flow.devices=$2" 2>/dev/null | sed -n '$s/.*  [a-z_]*loss \([0-9.]*\).*/\1/p'; }
for flow in chain:2 mutual:2 hybrid:4 gan:2; do
  here=$(loss "${flow%:*}" "cuda:0x${flow#*:}") there=$(loss "${flow%:*}" "cpu:${flow#*:}")
  echo "${flow%:*}: last loss on the GPU $here, on the CPU $there"
  awk -v a="$here" -v b="$there" 'BEGIN {exit !(a != "" && a - b < 0.05 && b - a < 0.05)}' || fail "${flow%:*} differs on a GPU"
done
# All of the others run, each on as many queues as it has devices.
for flow in mutual_copies:4 ensemble:3 bagging:3 branch:2 broadcast:2 stale:2 subgraph:4 mutual_exam:2; do
  file=$YOKE_SOURCE/examples/flow/${flow%:*}.toml
  given=$(awk -F'"' '/^\[\[input\]\]/ {getline; sub(/:.*/, "", $2); print "--input " $2 "=1,2"}' "$file")
  # shellcheck disable=SC2086 # two words
  expect 0 'bottleneck: ' "$yoke" flow run "$file" "flow.devices=cuda:0x${flow#*:}" ${given:---rounds 20}
done
# What running costs where all ranks are on one GPU.
measure "$yoke" flow bench overhead handover ensemble chain real --device cuda:0 --seconds 3
"$yoke" flow run "$YOKE_SOURCE/examples/flow/ensemble.toml" flow.devices=cuda:0x3 --figures 2>&1 | tail -45
expect 0 '^root = FP32\[1,3\] 1.41421 1.73205 3.16228' "$yoke" flow run "$YOKE_SOURCE/examples/flow/loop.toml" --input 'a=2,3,10' flow.devices=cuda:0x2
