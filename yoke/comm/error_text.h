// SPDX-License-Identifier: Apache-2.0
// What an exception says, without the backtraces that LibTorch adds: its own, and TorchScript's,
// whose last line is what went wrong.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace yoke::comm {

inline std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  if (const auto at = text.find("\nException raised from "); at != text.npos) text.resize(at);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const bool of_script = text.starts_with("The following operation failed in the TorchScript");
  return of_script ? text.substr(text.rfind('\n') + 1) : text;
}

}  // namespace yoke::comm
