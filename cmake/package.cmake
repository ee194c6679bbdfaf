# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` and `./dev package` put where, by component:
#   runtime  bin/yoke (a launcher that finds LibTorch), libexec/yoke/yoke (the program), share/yoke
#   devel    include/yoke, lib/*.a and the CMake package, for find_package(yoke)
#   local    where this build found LibTorch: true on this host only, so not in the tarball
#   bundle   the shared libraries the program needs besides LibTorch and the C++ runtime: tarball only
set(YOKE_PACKAGE_FOLDER lib/cmake/yoke)

get_target_property(installed yoke INTERFACE_LINK_LIBRARIES)
list(FILTER installed INCLUDE REGEX "^yoke_")
if(TARGET yoke_comm_mpi)
  list(APPEND installed yoke_comm_mpi)
  # Targets of their own file: who does not ask for them need not have MPI.
  install(EXPORT yoke_mpi NAMESPACE yoke:: FILE yokeMpiTargets.cmake DESTINATION ${YOKE_PACKAGE_FOLDER}
    COMPONENT devel)
endif()
if(TARGET yoke_program)
  list(APPEND installed yoke_program)
  # An RPATH, unlike a RUNPATH, also serves the libraries of the libraries.
  target_link_options(yoke_program PRIVATE -Wl,--disable-new-dtags)
  set_target_properties(yoke_program PROPERTIES INSTALL_RPATH "$ORIGIN/../../lib")
  install(TARGETS yoke_program RUNTIME DESTINATION libexec/yoke COMPONENT runtime)
  if(TARGET yoke_grpc)
    target_link_options(yoke_grpc PRIVATE -Wl,--disable-new-dtags)
    set_target_properties(yoke_grpc PROPERTIES INSTALL_RPATH "$ORIGIN/../../lib")
    install(TARGETS yoke_grpc LIBRARY DESTINATION libexec/yoke COMPONENT runtime)
    set(YOKE_GRPC_MODULE "$<TARGET_FILE:yoke_grpc>")
  endif()
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/tools/launcher.sh DESTINATION bin RENAME yoke COMPONENT runtime)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/peers DESTINATION share/yoke COMPONENT runtime
    PATTERN __pycache__ EXCLUDE)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md
    DESTINATION share/yoke COMPONENT runtime)
  file(WRITE ${PROJECT_BINARY_DIR}/torch_path "${YOKE_TORCH}\n")
  install(FILES ${PROJECT_BINARY_DIR}/torch_path DESTINATION share/yoke COMPONENT local)
  install(CODE "set(module \"${YOKE_GRPC_MODULE}\")" COMPONENT bundle EXCLUDE_FROM_ALL)
  install(CODE [[
    if(module)
      set(module MODULES "${module}")
    endif()
    file(GET_RUNTIME_DEPENDENCIES EXECUTABLES "$<TARGET_FILE:yoke_program>" ${module}
      RESOLVED_DEPENDENCIES_VAR libraries UNRESOLVED_DEPENDENCIES_VAR missing
      PRE_EXCLUDE_REGEXES "^libtorch" "^libc10" "^ld-linux" "^lib(c|m|dl|rt|pthread|gcc_s|stdc\\+\\+)\\.so")
    if(missing)
      message(FATAL_ERROR "The program needs libraries that this host does not have: ${missing}")
    endif()
    file(INSTALL ${libraries} DESTINATION "${CMAKE_INSTALL_PREFIX}/lib" FOLLOW_SYMLINK_CHAIN)
  ]] COMPONENT bundle EXCLUDE_FROM_ALL)
endif()
# Everything that an install copies, and nothing else (no tests).
add_custom_target(installable DEPENDS ${installed})

include(CMakePackageConfigHelpers)
target_compile_features(yoke INTERFACE cxx_std_20)
target_include_directories(yoke INTERFACE $<INSTALL_INTERFACE:include>)
install(TARGETS yoke EXPORT yoke COMPONENT devel)
install(FILES ${PROJECT_SOURCE_DIR}/yoke/yoke.h DESTINATION include/yoke COMPONENT devel)
install(EXPORT yoke NAMESPACE yoke:: FILE yokeTargets.cmake DESTINATION ${YOKE_PACKAGE_FOLDER} COMPONENT devel)
foreach(library PCRE2 SENTENCEPIECE IMAGES UNISTRING)
  get_property(YOKE_${library} GLOBAL PROPERTY YOKE_${library})
endforeach()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/yokeConfig.cmake.in
  ${PROJECT_BINARY_DIR}/yokeConfig.cmake INSTALL_DESTINATION ${YOKE_PACKAGE_FOLDER})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/yokeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/yokeConfig.cmake ${PROJECT_BINARY_DIR}/yokeConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/torch.cmake DESTINATION ${YOKE_PACKAGE_FOLDER} COMPONENT devel)
