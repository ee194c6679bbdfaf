// SPDX-License-Identifier: Apache-2.0
// A model file as a worker runs it: opened on its device, its rows proved independent of each
// other or served one by one, every size of batch run before the first request.
//
// Outputs have the names that were declared, else the keys of a dictionary, else "y" where there is
// one and "output0", "output1", … where there are several. An argument of forward() that is a
// number takes the one element of its tensor; List[str] is BYTES.
#pragma once

#include <functional>
#include <memory>

#include "yoke/serve/worker.h"
#include "yoke/topo/host.h"

namespace yoke::runner {

using ReadHost = std::function<topo::Host()>;

// Throws with what the file is and what to do. Threads: the one that calls it runs it. `read_host`
// gives the GPUs that this process sees, where that matters.
std::unique_ptr<serve::Runner> open_runner(
    const serve::ReplicaSpec& spec, const ReadHost& read_host = [] { return topo::read_host(); });

// What a file tells without being run: no outputs where it does not say, notes for the rest.
serve::Facts inspect(const std::string& path);

}  // namespace yoke::runner
