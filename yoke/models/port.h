// SPDX-License-Identifier: Apache-2.0
// Ports (plan/port.h) as tensors fill them.
#pragma once

#include <ATen/core/Tensor.h>

#include "yoke/plan/port.h"

namespace yoke::models {

using plan::parse_port;
using plan::Port;

Port port(std::string name, plan::Type type, const std::vector<int64_t>& sizes);  // -1: any
// Of Type::Bytes, and of a dtype that is no type of the protocol: they throw Kind::Usage.
at::ScalarType dtype_of(plan::Type type);
plan::Type type_of(at::ScalarType dtype);
// Throws Kind::Usage with what was got and wanted; `who` begins the text.
void check(const Port& port, const at::Tensor& value, const std::string& who);

}  // namespace yoke::models
