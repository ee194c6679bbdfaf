// SPDX-License-Identifier: Apache-2.0
// What an exception says, without the backtrace that LibTorch adds to its own.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace yoke::comm {

inline std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace yoke::comm
