#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A small GPT learns this repository's text better than any model of single bytes or of pairs of them could, and writes.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

yoke=$YOKE_BUILD/yoke
cd "$YOKE_SOURCE"
text=yoke,docs
expect 0 '^done; ' timeout 300 "$yoke" train data.path=$text model.layers=3 model.dim=128 train.batch=16 train.steps=300 \
  train.lr=4e-3 train.warmup=30 data.val_fraction=0.1 train.eval_every=300 train.log_every=100 run.dir="$scratch" run.name=gpt \
  --devices cpu:2
"$yoke" eval "$scratch/gpt" --json --device cpu >"$scratch/eval"
python3 - "$scratch/eval" <<'PYTHON'
import collections, json, math, os, sys

text = b""
for folder in ("yoke", "docs"):
    for path in sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names):
        content = open(path, "rb").read()
        text += b"" if b"\0" in content or os.path.basename(path).startswith(".") else content
result = json.load(open(sys.argv[1]))
kept = text[-128 * result["samples"]:]  # give or take the last sample's end
count, single, pairs = len(kept), collections.Counter(kept), collections.Counter(zip(kept, kept[1:]))
unigram = -sum(n / count * math.log(n / count) for n in single.values())
bigram = -sum(n / (count - 1) * math.log(n / single[first]) for (first, _), n in pairs.items())
print(f"loss {result['loss']:.3f} on {count} bytes kept aside; the best of single bytes {unigram:.3f}, of pairs {bigram:.3f}")
assert result["loss"] < bigram < unigram
PYTHON

# What it writes: the same for the same seed, another for another.
write() { "$yoke" generate "$scratch/gpt" --prompt 'at::Tensor ' --tokens 50 --device cpu "$@"; }
write --seed 1 >"$scratch/one"
write --seed 1 >"$scratch/again"
write --seed 2 >"$scratch/two"
cmp "$scratch/one" "$scratch/again" || fail "the same seed gave another text"
! cmp -s "$scratch/one" "$scratch/two" || fail "another seed gave the same text"
grep -q '^at::Tensor ' "$scratch/one" || fail "the text does not begin with the prompt"
[[ $(wc -c <"$scratch/one") -ge 61 ]] || fail "fewer than 50 bytes were added"
write --temperature 0 --json | grep -q '"tokens":\[' || fail "no tokens in the JSON"
printf 'from the input ' | "$yoke" generate "$scratch/gpt" --prompt - --tokens 5 --device cpu | grep -q '^from the input ' ||
  fail "the prompt was not read from the input"
expect 2 'a temperature and top_k from 0 on' write --temperature -1
expect 2 'a temperature and top_k from 0 on and a top_p above 0 up to 1' write --top-p 0
expect 1 "there is no 'nowhere'" "$yoke" generate nowhere
expect 2 'is no checkpoint' "$yoke" generate "$scratch"
expect 0 'the model knows no more positions' "$yoke" generate "$scratch/gpt" --prompt a --tokens 500 --device cpu
expect 0 '^[0-9]+ samples, loss .*, perplexity ' "$yoke" eval "$scratch/gpt" data.path=README.md data.val_fraction=0 train.eval_every=0

# Tokens for training, and back.
"$yoke" data encode bytes docs "$scratch/docs.bin" >"$scratch/output"
expect 0 '^tokens below 256: ' "$yoke" data check "$scratch/docs.bin" --vocab 256
expect 1 "docs.bin' has the token [0-9]+ at byte [0-9]+, and the model knows 10" "$yoke" data check "$scratch/docs.bin" --vocab 10
"$yoke" data tokens bytes README.md >"$scratch/numbers"
"$yoke" data text bytes "$scratch/numbers" | cmp - README.md || fail "tokens are not the text they came from"

# Without any data there is this text.
expect 0 '^done; ' "$yoke" train train.steps=2 run.dir="$scratch" run.name=own --devices cpu
