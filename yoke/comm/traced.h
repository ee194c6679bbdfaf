// SPDX-License-Identifier: Apache-2.0
// A communicator that notes where its rank waits: every call and every wait is a span of the
// calling thread, as communication, or as waiting where it is for a message.
#pragma once

#include "yoke/comm/communicator.h"
#include "yoke/observe/trace.h"

namespace yoke::comm {

// The tracer outlives it, and all that is split from it.
Communicator traced(const Communicator& comm, observe::Tracer& tracer);

}  // namespace yoke::comm
