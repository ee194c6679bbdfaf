// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/library.h"

#include <dlfcn.h>

#include <memory>

namespace yoke::topo {

Library open_library(const char* file) {
  void* handle = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    return {.error = reason ? reason : "dlopen gave no reason"};
  }
  const auto owner = std::shared_ptr<void>(handle, [](void* h) { ::dlclose(h); });
  return {.symbol = [owner](const char* name) { return ::dlsym(owner.get(), name); }};
}

}  // namespace yoke::topo
