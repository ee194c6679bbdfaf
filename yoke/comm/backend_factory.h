// SPDX-License-Identifier: Apache-2.0
// How a world gets its communicators: one small value for each backend, chosen by whoever starts
// the ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "yoke/comm/communicator.h"
#include "yoke/comm/world.h"
#include "yoke/topo/device.h"

namespace yoke::comm {

struct BackendFactory {
  std::string name = {};  // as in Capabilities::backend; empty: to be chosen
  // This process's ends of the group of all ranks, in rank order. Called once, before the ranks
  // start, by every process of the world. `devices`: of this process's ranks; empty: the CPU.
  std::function<std::vector<Communicator>(const std::shared_ptr<World>& world,
                                          const std::vector<topo::Device>& devices)>
      connect = nullptr;
  // Where the launcher names no address: gives process 0's text to every process. Null: cannot.
  std::function<std::string(const std::string& text)> share = nullptr;

  explicit operator bool() const { return connect != nullptr; }
};

}  // namespace yoke::comm
