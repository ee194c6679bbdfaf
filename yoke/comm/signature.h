// SPDX-License-Identifier: Apache-2.0
// What ranks of different processes tell each other about a call, so that they can compare it with
// their own before any data moves.
#pragma once

#include <string>
#include <string_view>

#include "yoke/comm/operation.h"

namespace yoke::comm {

std::string encode(const Operation& operation);
// The same operation to mismatch() and text(): its tensors have sizes, dtype and device type, but
// no memory.
Operation decode(std::string_view bytes);

}  // namespace yoke::comm
