// SPDX-License-Identifier: Apache-2.0
// `yoke flow run|check|show|bench|words|keys`: several models that work together.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_flow(CLI::App& app);
void add_flow_bench(CLI::App& flow);

}  // namespace yoke::cli
