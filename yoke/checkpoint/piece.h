// SPDX-License-Identifier: Apache-2.0
// What a rank has, or wants, of a named tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "yoke/checkpoint/safetensors.h"
#include "yoke/plan/box.h"

namespace yoke::checkpoint {

struct Piece {
  std::string name = {};
  std::vector<int64_t> shape = {};  // of the whole tensor
  plan::Box box = {};
  at::Tensor value = {};  // of the box's shape, with any strides, on any device
};

struct Contents {
  std::vector<Piece> pieces = {};
  Strings values = {};  // "step", "config", and whatever else is to be known
};

}  // namespace yoke::checkpoint
