// SPDX-License-Identifier: Apache-2.0
// What the module with gRPC gives to the program that opens it.
#pragma once

#include "yoke/serve/grpc_front.h"
#include "yoke/serve/grpc_load.h"

namespace yoke::serve {

struct GrpcApi {
  GrpcFront* (*open)(Service&, const GrpcOptions&);
  void (*close)(GrpcFront*);
  std::string (*address)(const GrpcFront&);
  void (*shut_down)(GrpcFront&, Time);
  decltype(&grpc_question) question;
  decltype(&grpc_values) values;
  decltype(&run_grpc_load) run_load;
  decltype(&run_grpc_stream) run_stream;
};

}  // namespace yoke::serve

extern "C" const yoke::serve::GrpcApi* yoke_grpc_api();
