// SPDX-License-Identifier: Apache-2.0
// A build without gRPC.
#include "yoke/base/error.h"
#include "yoke/serve/grpc_load.h"

namespace yoke::serve {
namespace {

[[noreturn]] void refuse_load() {
  fail(Kind::Usage, "this build has no gRPC; libgrpc++-dev with protobuf-compiler-grpc brings it");
}

}  // namespace

bool has_grpc_load() { return false; }
std::string grpc_question(const Question&) { refuse_load(); }
bool grpc_values(std::string_view, std::span<float>) { refuse_load(); }
std::vector<LoadReport> run_grpc_load(const LoadOptions&, const std::vector<LoadUser>&) {
  refuse_load();
}
uint64_t run_grpc_stream(const net::Address&, uint64_t, uint64_t, Duration,
                         const std::function<void(uint64_t, Question&)>&, const OnStreamAnswer&) {
  refuse_load();
}

}  // namespace yoke::serve
