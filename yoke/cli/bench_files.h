// SPDX-License-Identifier: Apache-2.0
// `yoke bench files`: how fast the models and data that people have are read and used.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_bench_files(CLI::App& bench);

}  // namespace yoke::cli
