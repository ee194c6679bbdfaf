// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/normalize.h"

#include <uninorm.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "yoke/base/error.h"

namespace yoke::data {

std::string normalize(Form form, std::string text) {
  if (std::ranges::all_of(text, [](char c) { return uint8_t(c) < 0x80; })) return text;
  const auto how = form == Form::Nfc    ? UNINORM_NFC
                   : form == Form::Nfd  ? UNINORM_NFD
                   : form == Form::Nfkc ? UNINORM_NFKC
                                        : UNINORM_NFKD;
  size_t size = 0;
  const std::unique_ptr<uint8_t, decltype(&std::free)> done(
      u8_normalize(how, reinterpret_cast<const uint8_t*>(text.data()), text.size(), nullptr, &size),
      &std::free);
  if (done == nullptr) fail(Kind::Io, "normalizing a text of ", text.size(), " bytes failed");
  return {reinterpret_cast<const char*>(done.get()), size};
}

}  // namespace yoke::data
