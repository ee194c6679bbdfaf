#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tarball of `./dev package` runs from another folder with an empty environment, brings its shared libraries,
# and finds LibTorch by YOKE_TORCH or a link, or says in one line what to do.
# shellcheck source=tests/expect.sh
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

expect 0 'yoke-[0-9.]+-linux-[a-z0-9_]+\.tar\.gz$' "$YOKE_SOURCE/dev" package --from "$YOKE_BUILD" --output "$scratch/dist"
tar -C "$scratch" -xzf "$scratch"/dist/*.tar.gz
prefix=$(echo "$scratch"/yoke-*)
for file in LICENSE README.md peers/gloo.py peers/openmpi.c; do
  [[ -f $prefix/share/yoke/$file ]] || fail "no share/yoke/$file"
done
[[ ! -e $prefix/share/yoke/torch_path ]] || fail "the tarball says where this host keeps LibTorch"

yoke=$prefix/bin/yoke
# No python3 on this PATH, as on a host without torch.
mkdir "$scratch/bin"
for tool in dirname readlink cat; do ln -s "$(command -v $tool)" "$scratch/bin/"; done
expect 2 'LibTorch not found; .*YOKE_TORCH' env -i "PATH=$scratch/bin" "$yoke" --help
expect 2 'YOKE_TORCH=/nowhere has no lib/libtorch_cpu.so' env -i YOKE_TORCH=/nowhere "$yoke" --help
expect 0 '^ok +LibTorch' env -i "YOKE_TORCH=$YOKE_TORCH" "$yoke" doctor
ln -s "$YOKE_TORCH" "$prefix/torch"
expect 0 '^ok +LibTorch' env -i "$yoke" doctor
ln -s "$yoke" "$scratch/link"
expect 0 'same loss on 1 rank' env -i "$scratch/link" demo

# Every library but LibTorch and the C and C++ runtimes comes out of the tarball.
env -i "LD_LIBRARY_PATH=$YOKE_TORCH/lib" ldd "$prefix/libexec/yoke/yoke" >"$scratch/libraries"
if grep -vE "($prefix|$(readlink -f "$YOKE_TORCH")|$YOKE_TORCH)/|linux-vdso|ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so" "$scratch/libraries"; then
  fail "these libraries are not in the tarball"
fi
