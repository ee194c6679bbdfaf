// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/status.h"

#include <array>

namespace yoke::serve {
namespace {

struct Row {
  int http;
  const char* name;
};
constexpr std::array<Row, 12> kRows{{{200, "ok"},
                                     {400, "invalid"},
                                     {401, "unauthenticated"},
                                     {403, "forbidden"},
                                     {404, "not_found"},
                                     {413, "too_large"},
                                     {429, "exhausted"},
                                     {499, "cancelled"},
                                     {500, "internal"},
                                     {501, "unsupported"},
                                     {503, "unavailable"},
                                     {504, "deadline"}}};  // as Status has them

}  // namespace

int http_status(Status status) { return kRows[size_t(status)].http; }
const char* status_name(Status status) { return kRows[size_t(status)].name; }

}  // namespace yoke::serve
