// SPDX-License-Identifier: Apache-2.0
// A parent that starts this program again when it has died or failed (run.max_restarts). Signals to
// the parent go to the child; the child dies with the parent.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace yoke::cli {

// Whether this process is such a child.
bool is_supervised();
// The command, on top of which the children get --resume. Returns the last one's exit code, 128 + n
// after signal n. What is asked for (0, 2, and the codes of a clean stop) is not done again.
int supervise(std::vector<std::string> command, int64_t max_restarts);
std::vector<std::string> own_command();  // as it was typed, with the program's file in front

}  // namespace yoke::cli
