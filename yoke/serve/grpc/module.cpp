// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/grpc/api.h"

const yoke::serve::GrpcApi* yoke_grpc_api() {
  using namespace yoke::serve;
  static constexpr GrpcApi kApi{
      .open = [](Service& service,
                 const GrpcOptions& options) { return new GrpcFront(service, options); },
      .close = [](GrpcFront* front) { delete front; },
      .address = [](const GrpcFront& front) { return front.address(); },
      .shut_down = [](GrpcFront& front, yoke::Time deadline) { front.shut_down(deadline); },
      .question = grpc_question,
      .values = grpc_values,
      .run_load = run_grpc_load,
      .run_stream = run_grpc_stream};
  return &kApi;
}
