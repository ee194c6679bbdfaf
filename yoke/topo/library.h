// SPDX-License-Identifier: Apache-2.0
// A shared library that is looked for at run time, so that a host without it can still start the
// program. Functions take an OpenLibrary, which lets a test hand in its own functions or none.
#pragma once

#include <functional>
#include <string>

namespace yoke::topo {

struct Library {
  std::function<void*(const char* name)> symbol = {};  // null for a name it does not have
  std::string error = {};                              // why it could not be opened

  explicit operator bool() const { return bool(symbol); }

  // The function `name`, or null. The caller vouches for its type.
  template <typename Function>
  Function* function(const char* name) const {
    return symbol ? reinterpret_cast<Function*>(symbol(name)) : nullptr;
  }
};

using OpenLibrary = std::function<Library(const char* file)>;

// dlopen. The library stays loaded while a copy of the result lives.
Library open_library(const char* file);

}  // namespace yoke::topo
