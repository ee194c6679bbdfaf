// SPDX-License-Identifier: Apache-2.0
// The service by gRPC: the Open Inference Protocol's GRPCInferenceService with Triton's extensions
// (grpc/inference.proto). Messages become requests of the Service and its answers messages; a call
// of ModelStreamInfer is one stream, answered in the order of its requests.
// Owns: gRPC's server with its threads.
// Threads: all functions from any.
#pragma once

#include <memory>
#include <string>

#include "yoke/serve/service.h"

namespace yoke::serve {

bool has_grpc();  // whether this build can

struct GrpcOptions {
  std::string address;                      // "127.0.0.1:8001"; port 0 is a free one; "unix:PATH"
  std::string tls_cert = {}, tls_key = {};  // PEM, not paths; empty: without TLS
  int64_t max_body_bytes = 256 << 20;       // of a message that comes in
  // Of messages that are not whole, and of a tenant's answers that clients do not take.
  size_t max_unread_bytes = 1 << 30;
  Duration idle = std::chrono::seconds(60);
};

class GrpcFront {
 public:
  // Listens when it returns. Throws Kind::Io where the address cannot be had, Kind::Config where
  // the build has no gRPC.
  GrpcFront(Service& service, const GrpcOptions& options);
  ~GrpcFront();  // cancels the calls there are

  std::string address() const;  // with the real port
  // No more calls are taken. Those there end until `deadline` and are cancelled then; streams are
  // read no further.
  void shut_down(Time deadline);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace yoke::serve
