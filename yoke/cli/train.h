// SPDX-License-Identifier: Apache-2.0
// `yoke train`: from a config to a trained model, with a folder of its own for every run.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_train(CLI::App& app);

}  // namespace yoke::cli
