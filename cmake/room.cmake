# SPDX-License-Identifier: Apache-2.0
# yoke_room(NAME [TORCH] [INTERNAL] [DEPS room…] [LIBS target…] [OMIT file…])
#   Called from yoke/NAME/CMakeLists.txt. Makes the static library yoke::NAME from every .cpp below the
#   folder, less the *_test.cpp and the files of OMIT (twins of a dependency that is there or is not,
#   and what is a target of its own).
#   DEPS are the rooms it may include (tools/check_layers holds it to that), LIBS are foreign targets.
#   An INTERNAL room serves the program only: it is not installed and not part of yoke::yoke.
#   The *_test.cpp become one program, yoke_NAME_tests, registered once for each label its tests have:
#   a suite with Gpu, Slow or Multiproc in its name carries that label, the rest are the fast tests.
# yoke_rooms(room…)
#   Adds the rooms that this configuration can build.

set(YOKE_TEST_LABELS Gpu Slow Multiproc)

function(yoke_register_tests name program)
  list(TRANSFORM YOKE_TEST_LABELS REPLACE "(.+)" "*\\1*.*" OUTPUT_VARIABLE patterns)
  list(JOIN patterns ":" labelled)
  add_test(NAME ${name} COMMAND ${program} --gtest_filter=-${labelled})
  set_tests_properties(${name} PROPERTIES TIMEOUT 1200)  # a sanitizer needs ten times as long
  foreach(label IN LISTS YOKE_TEST_LABELS)
    set(found FALSE)
    foreach(source IN LISTS ARGN)
      file(STRINGS "${source}" hits REGEX "(TEST|TEST_F|TEST_P|INSTANTIATE_TEST_SUITE_P)\\([A-Za-z]*${label}" LIMIT_COUNT 1)
      if(hits)
        set(found TRUE)
      endif()
    endforeach()
    if(found)
      string(TOLOWER ${label} lower)
      add_test(NAME ${name}.${lower} COMMAND ${program} --gtest_filter=*${label}*.*)
      set_tests_properties(${name}.${lower} PROPERTIES LABELS ${lower} TIMEOUT 1200)
    endif()
  endforeach()
endfunction()

function(yoke_room name)
  cmake_parse_arguments(arg "TORCH;INTERNAL" "" "DEPS;LIBS;OMIT" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS *.cpp)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS *.h)
  list(FILTER headers EXCLUDE REGEX "_test\\.h$")
  list(TRANSFORM arg_OMIT PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  list(REMOVE_ITEM sources ${arg_OMIT})
  list(REMOVE_ITEM headers ${arg_OMIT})
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")

  set(target yoke_${name})
  add_library(${target} STATIC ${sources})
  add_library(yoke::${name} ALIAS ${target})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${headers})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name} VERIFY_INTERFACE_HEADER_SETS ON)
  list(TRANSFORM arg_DEPS PREPEND yoke_ OUTPUT_VARIABLE deps)
  target_link_libraries(${target} PUBLIC ${deps} PRIVATE ${arg_LIBS})
  if(NOT arg_INTERNAL)
    install(TARGETS ${target} EXPORT yoke COMPONENT devel FILE_SET HEADERS COMPONENT devel)
    target_link_libraries(yoke INTERFACE ${target})
  endif()
  if(arg_TORCH)
    yoke_use_torch(${target} PUBLIC)
  endif()

  if(tests AND YOKE_TESTS)
    add_executable(${target}_tests ${tests})
    target_link_libraries(${target}_tests PRIVATE ${target} ${arg_LIBS} GTest::gtest_main)
    if(arg_TORCH)
      yoke_use_torch(${target}_tests PRIVATE)
    endif()
    yoke_register_tests(${name} ${target}_tests ${tests})
  endif()
endfunction()

# LibTorch and the precompiled header that every torch file shares.
function(yoke_use_torch target scope)
  target_link_libraries(${target} ${scope} torch::cpu)
  if(YOKE_WITH_CUDA)
    target_link_libraries(${target} ${scope} torch::cuda)
  endif()
  if(NOT TARGET yoke_torch_pch)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/torch_pch.cpp CONTENT "")  # written once
    add_library(yoke_torch_pch OBJECT ${PROJECT_BINARY_DIR}/torch_pch.cpp)
    target_link_libraries(yoke_torch_pch PRIVATE torch::cpu)
    target_precompile_headers(yoke_torch_pch PRIVATE <torch/nn/module.h> <ATen/Functions.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM yoke_torch_pch)
endfunction()

macro(yoke_rooms)
  foreach(room ${ARGN})
    file(STRINGS "${PROJECT_SOURCE_DIR}/yoke/${room}/CMakeLists.txt" needs_torch REGEX "TORCH" LIMIT_COUNT 1)
    if(YOKE_WITH_TORCH OR NOT needs_torch)
      add_subdirectory(yoke/${room} rooms/${room})  # build/yoke is the program
    endif()
  endforeach()
endmacro()
