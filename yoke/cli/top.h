// SPDX-License-Identifier: Apache-2.0
// `yoke top`: what a running `yoke serve` does, seen live.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_top(CLI::App& app);

}  // namespace yoke::cli
