#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installed as bin/yoke: finds LibTorch, then becomes the program.
set -eu
prefix=$(dirname "$(dirname "$(readlink -f "$0")")")

is_torch() { [ -n "$1" ] && [ -e "$1/lib/libtorch_cpu.so" ]; }

python_torch() {
  python3 -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")' \
    2>/dev/null || true
}

if [ -n "${YOKE_TORCH:-}" ]; then
  torch=$YOKE_TORCH
  if ! is_torch "$torch"; then
    echo "yoke: YOKE_TORCH=$torch has no lib/libtorch_cpu.so; give the folder of a torch package, the one with lib/" >&2
    exit 2
  fi
else
  torch=$prefix/torch
  is_torch "$torch" || torch=$(cat "$prefix/share/yoke/torch_path" 2>/dev/null || true)
  is_torch "$torch" || torch=$(python_torch)
  if ! is_torch "$torch"; then
    echo "yoke: LibTorch not found; 'pip install torch', or set YOKE_TORCH to (or link as $prefix/torch) a torch package's folder" >&2
    exit 2
  fi
fi
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$prefix/libexec/yoke/yoke" "$@"
