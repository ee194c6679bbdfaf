// SPDX-License-Identifier: Apache-2.0
// A build without gRPC.
#include "yoke/base/error.h"
#include "yoke/serve/grpc_front.h"

namespace yoke::serve {

bool has_grpc() { return false; }

struct GrpcFront::Impl {};

GrpcFront::GrpcFront(Service&, const GrpcOptions& options) {
  fail(Kind::Config, "cannot listen on ", options.address,
       ": this build has no gRPC; serve.grpc=\"\" switches it off, and libgrpc++-dev with "
       "protobuf-compiler-grpc at build time brings it");
}
GrpcFront::~GrpcFront() = default;
std::string GrpcFront::address() const { return {}; }
void GrpcFront::shut_down(Time) {}

}  // namespace yoke::serve
