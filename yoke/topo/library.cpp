// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "yoke/base/error.h"

namespace yoke::topo {

Library open_library(const char* file) {
  // A file that is named by its path may come beside another version of itself that is loaded
  // already (LibTorch's NCCL): its own functions must find each other first.
  const bool by_path = std::strchr(file, '/') != nullptr;
  if (by_path && ::access(file, R_OK) != 0) return {.error = cat(file, ": ", std::strerror(errno))};
  void* handle = ::dlopen(file, RTLD_NOW | RTLD_LOCAL | (by_path ? RTLD_DEEPBIND : 0));
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    return {.error = reason ? reason : "dlopen gave no reason"};
  }
  const auto owner = std::shared_ptr<void>(handle, [](void* h) { ::dlclose(h); });
  return {.symbol = [owner](const char* name) { return ::dlsym(owner.get(), name); }};
}

}  // namespace yoke::topo
