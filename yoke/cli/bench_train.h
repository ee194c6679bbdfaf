// SPDX-License-Identifier: Apache-2.0
// `yoke bench train`: the loop that `yoke train` runs, next to the same loop in PyTorch.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_bench_train(CLI::App& bench);

}  // namespace yoke::cli
