#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The project configures against a LibTorch that was built with CUDA on a host without the CUDA toolkit. The
# package's own CMake config does not, which is shown first, so that this test means something.
# shellcheck source=tests/expect.sh
. "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

if [[ -e /usr/include/cuda_runtime_api.h ]]; then
  echo "skipped: the CUDA toolkit lies among the system's headers and cannot be hidden"
  exit 77
fi

# A farm of links to the real package, with the libraries and the claim of a CUDA build.
torch=$scratch/site/torch
mkdir -p "$torch/lib" "$torch/share"
ln -s "$YOKE_TORCH/include" "$torch/include"
ln -s "$YOKE_TORCH"/lib/* "$torch/lib/"
for library in torch_cuda c10_cuda; do [[ -e $torch/lib/lib$library.so ]] || touch "$torch/lib/lib$library.so"; done
cp -rL "$YOKE_TORCH/share/cmake" "$torch/share/cmake"
chmod -R u+w "$torch/share/cmake"
sed -i 's/^if(0)$/if(1)/; s/CAFFE2_USE_CUDA 0)/CAFFE2_USE_CUDA 1)/; s/if( AND NOT CAFFE2_USE_CUDA)/if(1 AND NOT CAFFE2_USE_CUDA)/' \
  "$torch/share/cmake/Caffe2/Caffe2Config.cmake"

# Hide a toolkit that this host may have.
unset CUDA_HOME CUDA_PATH CUDACXX CMAKE_PREFIX_PATH
hidden=$(find -L /usr/local/cuda* -maxdepth 4 -type d 2>/dev/null | paste -sd ';' || true)
export PATH=/usr/local/bin:/usr/bin:/bin
hide=(-G Ninja "-DCMAKE_IGNORE_PATH=$hidden" "-DCUDA_TOOLKIT_ROOT_DIR=$scratch/none")

mkdir "$scratch/theirs"
cat >"$scratch/theirs/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(theirs CXX)
find_package(Torch REQUIRED)
CMAKE
expect 1 'uses CUDA but I cannot find the CUDA' \
  cmake -S "$scratch/theirs" -B "$scratch/theirs/build" "${hide[@]}" "-DCMAKE_PREFIX_PATH=$torch"

expect 0 'LibTorch .* CUDA OFF' cmake -S "$YOKE_SOURCE" -B "$scratch/ours" "${hide[@]}" "-DYOKE_TORCH=$torch" -DYOKE_TESTS=OFF
expect 1 'YOKE_WITH_CUDA is on, but' \
  cmake -S "$YOKE_SOURCE" -B "$scratch/ours" "${hide[@]}" "-DYOKE_TORCH=$torch" -DYOKE_WITH_CUDA=ON
