# SPDX-License-Identifier: Apache-2.0
# Imported targets for LibTorch, made from the include and lib folders of a torch package: torch::cpu
# and, where the package and the host both have CUDA, torch::cuda. The package's own CMake config is
# not used: a CUDA build of it refuses to configure on a host without the CUDA toolkit.
#
# YOKE_TORCH names the package's folder (the one that holds include/ and lib/); `./dev` sets it.
if(TARGET torch::cpu)
  return()
endif()
set(YOKE_TORCH "$ENV{YOKE_TORCH}" CACHE PATH "Folder of LibTorch: the one with include/ and lib/")
if(NOT EXISTS "${YOKE_TORCH}/include/ATen/ATen.h" OR NOT EXISTS "${YOKE_TORCH}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "No LibTorch at YOKE_TORCH='${YOKE_TORCH}' (looked for include/ATen/ATen.h and "
                      "lib/libtorch_cpu.so). Run './dev setup', or configure with -DYOKE_TORCH=FOLDER.")
endif()
set(YOKE_TORCH_VERSION 0)
foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
  if(EXISTS "${YOKE_TORCH}/include/${header}")
    file(READ "${YOKE_TORCH}/include/${header}" text)
    if(text MATCHES "TORCH_VERSION_MAJOR ([0-9]+).*TORCH_VERSION_MINOR ([0-9]+).*TORCH_VERSION_PATCH ([0-9]+)")
      set(YOKE_TORCH_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
      break()
    endif()
  endif()
endforeach()
if(YOKE_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "LibTorch at ${YOKE_TORCH} is ${YOKE_TORCH_VERSION}; Yoke needs 2.11 or newer. "
                      "Run './dev setup' for one of its own.")
endif()

add_library(torch::c10 SHARED IMPORTED)
set_target_properties(torch::c10 PROPERTIES IMPORTED_LOCATION "${YOKE_TORCH}/lib/libc10.so")
add_library(torch::cpu SHARED IMPORTED)
set_target_properties(torch::cpu PROPERTIES IMPORTED_LOCATION "${YOKE_TORCH}/lib/libtorch_cpu.so")
target_include_directories(torch::cpu SYSTEM INTERFACE
  "${YOKE_TORCH}/include" "${YOKE_TORCH}/include/torch/csrc/api/include")
target_compile_definitions(torch::cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
target_link_libraries(torch::cpu INTERFACE torch::c10)

set(YOKE_TORCH_CUDA OFF)
if(EXISTS "${YOKE_TORCH}/lib/libtorch_cuda.so")
  find_path(YOKE_CUDA_INCLUDE cuda_runtime_api.h
    HINTS ENV CUDA_HOME PATHS /usr/local/cuda "${YOKE_TORCH}/../nvidia/cu13"
    PATH_SUFFIXES include targets/x86_64-linux/include)
  find_library(YOKE_CUDART cudart
    HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib)
  if(YOKE_CUDA_INCLUDE AND YOKE_CUDART)
    set(YOKE_TORCH_CUDA ON)
    add_library(torch::cuda INTERFACE IMPORTED)
    target_include_directories(torch::cuda SYSTEM INTERFACE "${YOKE_CUDA_INCLUDE}")
    # No symbol of ours may need libtorch_cuda, and still its kernels must be registered.
    target_link_libraries(torch::cuda INTERFACE
      -Wl,--no-as-needed "${YOKE_TORCH}/lib/libtorch_cuda.so" -Wl,--as-needed
      "${YOKE_TORCH}/lib/libc10_cuda.so" "${YOKE_CUDART}" torch::cpu)
  endif()
endif()
if(YOKE_WITH_CUDA AND NOT YOKE_TORCH_CUDA)
  message(FATAL_ERROR "YOKE_WITH_CUDA is on, but ${YOKE_TORCH} has no libtorch_cuda.so or the CUDA toolkit's "
                      "cuda_runtime_api.h and libcudart were not found. Set CUDA_HOME, or use the release preset.")
endif()
message(STATUS "LibTorch ${YOKE_TORCH_VERSION} at ${YOKE_TORCH}, CUDA ${YOKE_TORCH_CUDA}")
