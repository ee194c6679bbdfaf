#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Training gives the losses that PyTorch's own DDP and FSDP2 give, from the same weights and data.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
"$python" -c 'import torch' 2>/dev/null || { echo "no python3 with torch here" && exit 77; }
for model in mlp gpt; do
  export YOKE_TEST_PYTORCH=$scratch/$model
  mkdir "$YOKE_TEST_PYTORCH"
  timeout 200 "$python" "$YOKE_SOURCE/tests/pytorch_reference.py" --model $model --folder "$YOKE_TEST_PYTORCH" \
    >"$YOKE_TEST_PYTORCH/losses.json"
  timeout 100 "$YOKE_BUILD/rooms/parallel/yoke_parallel_tests" --gtest_filter='PytorchGiven.*' >"$scratch/$model.log" ||
    { cat "$scratch/$model.log" && exit 1; }
  grep -q '^\[  PASSED  \] 1 test' "$scratch/$model.log"
  echo "$model: $(cat "$YOKE_TEST_PYTORCH/losses.json")"
done
