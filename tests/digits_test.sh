#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Handwritten digits, learned by a resnet and an mlp: on those kept aside 97 of 100 are read, in minutes on two cores.
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

yoke=$YOKE_BUILD/yoke
command -v npm >/dev/null || { echo "no npm here, which has the digits" && exit 77; }
timeout 100 "$YOKE_SOURCE/tools/digits" "$scratch/digits" || { echo "npm could not get the digits" && exit 77; }
expect 0 '^images: 10000 of 10 classes .*28 x 28$' "$yoke" data check "$scratch/digits"
cd "$YOKE_SOURCE"
learn() { # NAME KEY…
  local begin=$SECONDS
  expect 0 '^done; ' timeout 170 "$yoke" train examples/train/digits.toml data.path="$scratch/digits" run.dir="$scratch/runs" \
    run.name="$1" "${@:2}"
  "$yoke" eval "$scratch/runs/$1" --json --device cpu >"$scratch/eval"
  python3 - "$1" "$scratch/eval" $((SECONDS - begin)) <<'PYTHON'
import json, sys
result = json.load(open(sys.argv[2]))
print(sys.argv[1], result, "in", sys.argv[3], "s")
assert result["samples"] == 1000 and result["accuracy"] >= 0.97, "less than 97 of 100"
PYTHON
}
learn resnet
learn mlp model.arch=mlp model.layers=2 model.dim=128 train.steps=3000 train.eval_every=1000 train.log_every=500

# Damaged files.
head -c 100000 "$scratch/digits/train-images-idx3-ubyte" >"$scratch/short-images-idx3-ubyte"
cp "$scratch/digits/train-labels-idx1-ubyte" "$scratch/short-labels-idx1-ubyte"
expect 1 'short-images-idx3-ubyte. should have 7840000 bytes from byte 16 on, and has 99984' \
  "$yoke" data check "$scratch/short-images-idx3-ubyte"
mkdir -p "$scratch/pictures/cat" "$scratch/pictures/dog"
printf 'no picture' >"$scratch/pictures/cat/a.png"
printf 'no picture' >"$scratch/pictures/dog/b.jpg"
expect 1 'cat/a.png. is no picture to read: it begins neither like a PNG nor like a JPEG' "$yoke" data check "$scratch/pictures"
