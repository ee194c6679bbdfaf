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
#include <torch/torch.h>
#include <yoke/yoke.h>

#include <cstdio>

int main() {
  yoke::comm::run_ranks(2, [](yoke::comm::Communicator& world) {
    auto sum = torch::full({3}, world.rank() + 1.0f);
    world.all_reduce(sum).wait();
    if (world.rank() == 0) std::printf("sum %g\n", sum[0].item<float>());
  });
}
CPP
configure=(cmake -S "$scratch/app" -B "$scratch/app/build" -G Ninja "-DCMAKE_PREFIX_PATH=$scratch/moved")
expect 0 "LibTorch .* at $torch" "${configure[@]}"
expect 0 '' cmake --build "$scratch/app/build"
expect 0 '^sum 3$' "$scratch/app/build/app"

expect 1 "No LibTorch at YOKE_TORCH='/nowhere'" "${configure[@]}" -DYOKE_TORCH=/nowhere
expect 0 '^ok +LibTorch' "$scratch/moved/bin/yoke" doctor
