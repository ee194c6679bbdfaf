// SPDX-License-Identifier: Apache-2.0
// The rows of operations and tasks of a graph whose nodes have their devices, firings and bodies.
#pragma once

#include "yoke/flow/compile.h"

namespace yoke::flow {

// Throws Kind::Config.
void lower(Compiled& compiled);

}  // namespace yoke::flow
