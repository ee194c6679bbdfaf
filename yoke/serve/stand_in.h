// SPDX-License-Identifier: Apache-2.0
// A replica without a model, for tests and benchmarks of the server itself: it sleeps as long as a
// model would compute, and gives twice what it got. "stand-in:ms=10,row_ms=1,jitter_ms=5": so long
// a batch, so much more each row, and up to so much more by chance; value_ms=0.1: so much more for
// each 1 of the rows' first values, so that who asks decides how long it takes; pure=0: it says
// that it is not pure. A row whose first value is -1 makes it throw, with -2 the process dies, with
// -3 it hangs.
#pragma once

#include <memory>

#include "yoke/serve/worker.h"

namespace yoke::serve {

bool is_stand_in(const std::string& path);
// Throws Kind::Usage where the text is malformed. Inputs are x:FP32[-1,4] if the spec has none.
std::unique_ptr<Runner> open_stand_in(const ReplicaSpec& spec);

}  // namespace yoke::serve
