// SPDX-License-Identifier: Apache-2.0
// `yoke schedule`: prints, checks, simulates and draws a pipeline schedule.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_schedule(CLI::App& app);

}  // namespace yoke::cli
