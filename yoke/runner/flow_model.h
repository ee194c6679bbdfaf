// SPDX-License-Identifier: Apache-2.0
// A flow (a folder with a flow.toml that names its inputs and outputs) as one model that is called:
// a call is a round, on the flow's own devices. Threads: one at a time.
#pragma once

#include "yoke/flow/executor.h"
#include "yoke/models/loadable.h"

namespace yoke::runner {

// The devices of a replica of a flow: the first one's are those that it names, the next one's as
// many GPUs after them.
std::vector<topo::Device> replica_devices(std::vector<topo::Device> named, int64_t replica);

class FlowModel final : public models::Loadable {
 public:
  struct Where {
    at::Device device = at::kCPU;  // of a flow whose own are `auto`
    int threads = 1;               // of all its queues
    int64_t replica = 0;
  };
  // Throws Kind::Config.
  FlowModel(const std::string& folder, const Where& where, const topo::Host& host);
  c10::IValue call(std::vector<c10::IValue> inputs) override;
  bool has_package() const { return has_package_; }
  // The loop or branch in which all rows of a batch go one way; empty: none does.
  const std::string& decider() const { return decider_; }
  bool lost() const { return executor_->lost(); }  // no call will be answered any more
  // As JSON: what each node has computed so far.
  std::string breakdown() const;

 private:
  std::unique_ptr<flow::Executor> executor_;
  bool has_package_ = false;
  std::string decider_ = {};
};

}  // namespace yoke::runner
