// SPDX-License-Identifier: Apache-2.0
// `yoke serve`: replicas of models over REST and gRPC, with tenants.
#pragma once

namespace CLI {
class App;
}

namespace yoke::cli {

void add_serve(CLI::App& app);

}  // namespace yoke::cli
