// SPDX-License-Identifier: Apache-2.0
#include "yoke/base/error.h"
#include "yoke/data/pretokenize.h"

namespace yoke::data {
namespace {

[[noreturn]] void refuse() {
  fail(Kind::Usage,
       "this yoke was built without PCRE2, which BPE wants: install libpcre2-dev and build again");
}

}  // namespace

Splitter::Splitter(const std::string&, const std::string&) { refuse(); }
void Splitter::split(std::string_view, const Part&) const { refuse(); }

}  // namespace yoke::data
