// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "yoke/comm/backend_factory.h"
namespace yoke::comm {
struct NcclOptions {
  std::string file = {};
};
BackendFactory nccl_backend(const NcclOptions& options = {});
}  // namespace yoke::comm
