// SPDX-License-Identifier: Apache-2.0
// Bodies of REST for libFuzzer, which finds what rest_body_test.cpp does not try. From the root:
//   cd yoke/serve && clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I../..
//     fuzz/rest_fuzz.cpp {rest_read,rest_write,compression,check,status}.cpp ../plan/port.cpp
//     ../base/{error,text}.cpp -lsimdjson -lz -o ../../build/rest_fuzz
//   mkdir -p build/found && build/rest_fuzz -max_total_time=120 build/found tests/corpus/rest
#include "yoke/serve/rest_body_test.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static yoke::serve::RestReader reader;  // keeps its memory, as a server's does
  yoke::serve::try_body(reader, {reinterpret_cast<const char*>(data), size});
  return 0;
}
