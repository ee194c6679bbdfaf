# SPDX-License-Identifier: Apache-2.0
# yoke_headers(TARGET FILE PACKAGE)
#   An interface target for a library of headers alone: from the system, or from .deps/include where a machine
#   has no package of it and somebody has put them there.
function(yoke_headers target file package)
  if(TARGET ${target})
    return()
  endif()
  find_path(YOKE_${target}_INCLUDE ${file} HINTS ${PROJECT_SOURCE_DIR}/.deps/include)
  if(NOT YOKE_${target}_INCLUDE)
    message(FATAL_ERROR "${file} is missing: install ${package}, or put it below .deps/include")
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  if(NOT YOKE_${target}_INCLUDE STREQUAL /usr/include)
    target_include_directories(${target} SYSTEM INTERFACE ${YOKE_${target}_INCLUDE})
  endif()
endfunction()
