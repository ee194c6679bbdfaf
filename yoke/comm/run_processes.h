// SPDX-License-Identifier: Apache-2.0
// Starts processes of this very program on this host, each of which calls a function that main()
// has registered by name; they meet in a world when they call run_world with what they are given.
// By exec, never by fork alone: after OpenMP has run, a forked child hangs at its first tensor
// operation.
//
//   int main(int, char**) {
//     const ProcessFunctions functions{{"train", train}};
//     if (const auto code = process_main(topo::environment_of(environ), functions)) return *code;
//     run_processes(4, "train");
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/topo/launch.h"

namespace yoke::comm {

using ProcessFunction =
    std::function<void(const topo::LaunchInfo& launch, const std::string& argument)>;
using ProcessFunctions = std::map<std::string, ProcessFunction>;

struct ProcessesOptions {
  std::string argument = {};                          // for the function
  std::vector<std::string> environment = {};          // "NAME=value", on top of our own
  Duration meet_timeout = std::chrono::seconds(300);  // for all to come
  Duration grace = std::chrono::seconds(10);          // for the others, once one has failed
  std::function<void(const std::vector<int>& ids)> on_start = nullptr;  // their process ids
};

// Returns when all have ended well. Else throws the first failure that they reported, or how the
// first one ended; those that outlive the grace are killed. None outlives the caller.
void run_processes(int num_processes, const std::string& function,
                   const ProcessesOptions& options = {});

// In a process that run_processes has started: calls the function and gives the exit code for
// main() to return: 0, or exit_code() of what went wrong. Else nothing.
std::optional<int> process_main(const topo::Environment& environment,
                                const ProcessFunctions& functions);

}  // namespace yoke::comm
