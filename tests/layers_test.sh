#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tools/check_layers accepts this tree, and sees each kind of breach when one is planted in a copy of two rooms.
# shellcheck source=tests/expect.sh
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

layers=$YOKE_SOURCE/tools/check_layers
expect 0 'every arrow is declared' "$layers"

tree=$scratch/tree
fresh() {
  rm -rf "$tree"
  mkdir -p "$tree/yoke"
  cp -r "$YOKE_SOURCE"/yoke/{base,observe} "$tree/yoke"
}
# A room above the two, with the given line as its one file.
third_room() { # DECLARATION FILE LINE
  mkdir -p "$tree/yoke/third"
  echo "yoke_room(third $1)" >"$tree/yoke/third/CMakeLists.txt"
  echo "$3" >"$tree/yoke/third/$2"
}

fresh
expect 0 '2 rooms' "$layers" --root "$tree"

sed -i '1i #include "yoke/observe/log.h"' "$tree/yoke/base/text.cpp"
expect 1 '^yoke/base/text.cpp:1: room base may not include room observe \(its DEPS: none\)$' "$layers" --root "$tree"

fresh
sed -i 's/yoke_room(base/& DEPS observe/' "$tree/yoke/base/CMakeLists.txt"
expect 1 'rooms in a circle: base -> observe -> base' "$layers" --root "$tree"

fresh
sed -i 's/yoke_room(base/& DEPS attic/' "$tree/yoke/base/CMakeLists.txt"
expect 1 'room base has an unknown room in its DEPS: attic' "$layers" --root "$tree"

fresh
third_room 'DEPS observe' a.h '#include "yoke/base/error.h"'
expect 0 '3 rooms' "$layers" --root "$tree" # what a room in DEPS may use is allowed too
third_room 'DEPS base' a.h '#include "yoke/observe/log.h"'
expect 1 'third may not include room observe \(its DEPS: base\)' "$layers" --root "$tree"
third_room 'DEPS base' a.h '#include "yoke/attic/a.h"'
expect 1 'yoke/third/a.h:1: unknown room attic' "$layers" --root "$tree"
third_room 'DEPS base' a.h '#include <ATen/core/Tensor.h>'
expect 1 'it is not declared TORCH' "$layers" --root "$tree"
third_room 'TORCH DEPS base' a.h '#include <torch/torch.h>'
expect 1 'torch/torch.h belongs in .cpp files only' "$layers" --root "$tree"
third_room 'TORCH DEPS base' a.h '#include "mpi.h"'
expect 1 'mpi.h belongs in .cpp files only' "$layers" --root "$tree"
third_room 'TORCH DEPS base' a.h '#include "yoke/yoke.h"'
expect 1 'is for users of Yoke' "$layers" --root "$tree"
third_room 'DEPS base' a.h ''
third_room 'DEPS base' string_utils.cpp ''
expect 1 'string_utils.cpp says nothing' "$layers" --root "$tree"

fresh
mkdir "$tree/yoke/attic"
echo >"$tree/yoke/attic/a.cpp"
expect 1 'yoke/attic is not a room' "$layers" --root "$tree"
