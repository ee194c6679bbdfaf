#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tokens and text are those of Hugging Face's tokenizers and of SentencePiece, for tokenizers trained here.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

python=$YOKE_TORCH/../../../../bin/python3
[[ -x $python ]] || python=python3
export PYTHONPATH=$YOKE_SOURCE/.deps/transformers
export TOKENIZERS_PARALLELISM=false
timeout 30 "$python" -c 'import tokenizers, sentencepiece' 2>/dev/null || { echo "no python3 with tokenizers and sentencepiece here" && exit 77; }
timeout 100 "$python" "$YOKE_SOURCE/tests/tokenizer_reference.py" "${YOKE_TOKENS_PROGRAM:-$YOKE_BUILD/yoke}" "$YOKE_SOURCE" "$scratch" ||
  fail "not the tokens of the peers"

# A model of such tokens: learned, used, and its tokens prepared before.
yoke=$YOKE_BUILD/yoke
cd "$YOKE_SOURCE"
small=(model.layers=1 model.dim=32 model.seq=64 train.steps=3 run.dir="$scratch/runs" --devices cpu:2)
tokenizer=$scratch/gpt2.json
expect 0 '^done; ' "$yoke" train data.path=docs data.tokenizer="$tokenizer" data.documents=true run.name=words "${small[@]}"
expect 0 '^"?Once' "$yoke" generate "$scratch/runs/words" --prompt Once --tokens 8 --device cpu
expect 0 'perplexity' "$yoke" eval "$scratch/runs/words" --device cpu
expect 0 'data.documents=true data.end=' "$yoke" data encode "$tokenizer" docs "$scratch/docs.bin"
read -r -a keys <<<"$(grep -oE '(model|data)\.[a-z]+=[^ ,]+' "$scratch/output" | tr '\n' ' ')"
expect 0 '^done; ' "$yoke" train "${keys[@]}" run.name=numbers "${small[@]}"
expect 2 'model.vocab = 10, and the tokenizer has' "$yoke" train data.path=docs data.tokenizer="$tokenizer" model.vocab=10 "${small[@]}"
expect 1 "there is no '.*nowhere'|cannot" "$yoke" train data.path=docs data.tokenizer=nowhere "${small[@]}"
