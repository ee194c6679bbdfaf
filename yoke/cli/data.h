// SPDX-License-Identifier: Apache-2.0
// `yoke data`: look at data before training on it, and prepare it.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_data(CLI::App& app);

}  // namespace yoke::cli
