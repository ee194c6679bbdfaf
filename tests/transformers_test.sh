#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Models that Hugging Face's transformers saves give the same logits and losses here, and what is written here it reads.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
export PYTHONPATH=$YOKE_SOURCE/.deps/transformers
timeout 100 "$python" -c 'import torch, transformers' 2>/dev/null || { echo "no python3 with torch and transformers here" && exit 77; }
mkdir "$scratch/models"
export YOKE_TEST_TRANSFORMERS=$scratch/models
timeout 200 "$python" "$YOKE_SOURCE/tests/transformers_reference.py" --make "$scratch/models" 2>"$scratch/log" ||
  { cat "$scratch/log" && exit 1; }
timeout 100 "$YOKE_BUILD/rooms/train/yoke_train_tests" --gtest_filter='Transformers.*' >"$scratch/test" ||
  { cat "$scratch/test" && exit 1; }
grep -q '^\[  PASSED  \] 1 test' "$scratch/test" || { cat "$scratch/test" && exit 1; }
check() {
  timeout 200 "$python" "$YOKE_SOURCE/tests/transformers_reference.py" --check "$scratch/models" 2>"$scratch/log" ||
    { cat "$scratch/log" && exit 1; }
}
check

# The same by the program: a run that begins with such a folder and learns nothing, and what is exported of it.
yoke=$YOKE_BUILD/yoke
train=(data.kind=synthetic model.seq=64 train.batch=4 train.steps=1 train.lr=0 run.dir="$scratch/runs" --devices cpu:2)
for name in gpt2 llama llama3 qwen2; do
  rm -r "$scratch/models/$name/ours"
  expect 0 '^step 1/1 ' "$yoke" train model.init="$scratch/models/$name" "${train[@]}" run.name="$name" plan=tensor
  expect 0 '^step 1 in .*from_pretrained$' "$yoke" checkpoint export "$scratch/runs/$name" "$scratch/models/$name/ours" --format hugging-face
done
check
expect 2 'model.seq = 100, and the model in .* knows 64 positions' "$yoke" train model.init="$scratch/models/gpt2" "${train[@]}" model.seq=100
expect 2 'has no tokenizer; give the model.s by data.tokenizer' "$yoke" train model.init="$scratch/models/gpt2" "${train[@]}" data.kind=text data.path="$scratch"
expect 1 "it is no folder of a model" "$yoke" train model.init="$scratch" "${train[@]}"
# The loss of a folder is that of its own tokens, whatever number of them a sample has.
for seq in 16 64; do
  "$yoke" eval "$scratch/models/gpt2" --json --device cpu data.kind=synthetic model.seq=$seq --samples 64 |
    grep -oE '"perplexity":[0-9.]+' | cut -d: -f2 >>"$scratch/perplexities"
done
awk '{ value[NR] = $1 } END { exit !(NR == 2 && value[1] > 20 && value[1] < 2 * value[2] && value[2] < 2 * value[1]) }' \
  "$scratch/perplexities" || fail "perplexities $(tr '\n' ' ' <"$scratch/perplexities") of 16 and 64 tokens a sample"
expect 2 'was not trained on text but on synthetic' "$yoke" generate "$scratch/runs/gpt2" --prompt a
