// SPDX-License-Identifier: Apache-2.0
// Bodies of REST for libFuzzer, which finds what rest_body_test.cpp does not try: `./dev fuzz`.
#include "yoke/serve/rest_body_test.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static yoke::serve::RestReader reader;  // keeps its memory, as a server's does
  yoke::serve::try_body(reader, {reinterpret_cast<const char*>(data), size});
  return 0;
}
