// SPDX-License-Identifier: Apache-2.0
// A call as bytes, for ranks of different processes that compare their calls before data moves.
#pragma once

#include <string>
#include <string_view>

#include "yoke/comm/operation.h"

namespace yoke::comm {

std::string encode(const Operation& operation);
// The same but for the data: its tensors have shape, dtype and device, and no memory. What
// mismatch() and text() look at is all there.
Operation decode(std::string_view bytes);

}  // namespace yoke::comm
