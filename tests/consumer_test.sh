#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A user's program is built with find_package(yoke) against an installed package that was moved, and runs. It is
# not told where LibTorch is: the package remembers.
# shellcheck source=tests/expect.sh
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

torch=$YOKE_TORCH
unset YOKE_TORCH
cmake --install "$YOKE_BUILD" --prefix "$scratch/prefix" >/dev/null
mv "$scratch/prefix" "$scratch/moved"

mkdir "$scratch/app"
cat >"$scratch/app/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(app CXX)
find_package(yoke 0.1 REQUIRED)
add_executable(app app.cpp)
target_link_libraries(app yoke::yoke)
CMAKE
cat >"$scratch/app/app.cpp" <<'CPP'
#include <iostream>

#include "yoke/yoke.h"

int main() {
  std::cout << "yoke " << yoke::bytes_text(1 << 20) << std::endl;
}
CPP
configure=(cmake -S "$scratch/app" -B "$scratch/app/build" -G Ninja "-DCMAKE_PREFIX_PATH=$scratch/moved")
expect 0 "LibTorch .* at $torch" "${configure[@]}"
expect 0 '' cmake --build "$scratch/app/build"
expect 0 '^yoke ' "$scratch/app/build/app"

expect 1 "No LibTorch at YOKE_TORCH='/nowhere'" "${configure[@]}" -DYOKE_TORCH=/nowhere
expect 0 '' "$scratch/moved/bin/yoke" --help
