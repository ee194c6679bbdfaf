// SPDX-License-Identifier: Apache-2.0
// `yoke checkpoint`: look at checkpoints, check them, and trade them with other programs.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_checkpoint(CLI::App& app);

}  // namespace yoke::cli
