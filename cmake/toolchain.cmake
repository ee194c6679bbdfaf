# SPDX-License-Identifier: Apache-2.0
# Language level, warnings, sanitizers; ccache and mold where they are installed.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

# One set of flags for libraries and programs alike, so that they can share a precompiled header.
add_compile_options(-Wall -Wextra -fPIC)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  add_compile_options(-Wno-restrict)  # warns about a plain "a" + std::string
endif()
include_directories(${PROJECT_SOURCE_DIR})

if(YOKE_SANITIZE)
  add_compile_options(-fsanitize=${YOKE_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${YOKE_SANITIZE})
endif()

find_program(YOKE_CCACHE ccache)
if(YOKE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # What ccache must overlook to cache files that use a precompiled header, and where the checkout lies: two clones share.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${YOKE_CCACHE})
  add_compile_options(-fpch-preprocess)
endif()

find_program(YOKE_MOLD mold)
if(YOKE_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
