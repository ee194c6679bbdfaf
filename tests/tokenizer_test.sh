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
