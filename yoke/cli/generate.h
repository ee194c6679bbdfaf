// SPDX-License-Identifier: Apache-2.0
// `yoke generate` and `yoke eval`: what a trained model writes, and how good it is.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_generate(CLI::App& app);
void add_eval(CLI::App& app);

}  // namespace yoke::cli
