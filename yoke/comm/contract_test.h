// SPDX-License-Identifier: Apache-2.0
// The fixture of the communicator's contract, which every backend passes at every group size:
// values in contract_test.cpp, order in contract_order_test.cpp, failures in
// contract_failure_test.cpp. A backend joins by adding itself to the instantiations at the end of
// contract_test.cpp. Started by a launcher as several processes, each runs the whole suite, and
// they form a new world for each run().
#pragma once

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/comm/local/cuda_lane.h"
#include "yoke/comm/nccl/api.h"
#include "yoke/comm/nccl/backend.h"
#include "yoke/comm/run_world.h"

namespace yoke::comm {

using namespace std::chrono_literals;

struct Case {
  std::string name;
  at::Device device;
  int size;
  BackendFactory backend = {};
  std::optional<topo::LaunchInfo> launch = {};  // this process is one of several
  int here = size;                              // ranks of this process
  bool nccl() const { return backend.name == "nccl"; }
};

// The backend of processes that a launcher has started; each test program has its own.
BackendFactory launched_backend();

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name << ", " << c.size << " ranks";
}

// The NCCL under test: the one that the environment names, else LibTorch's.
inline std::string nccl_file() {
  const char* file = std::getenv("YOKE_TEST_NCCL");
  return file ? file : "";
}

// Why it cannot have so many ranks on one GPU; empty: it can.
inline std::string nccl_obstacle(int size) {
  try {
    const NcclApi api = open_nccl(nccl_file());
    if (size == 1) return "";
    if (api.version < 23000) return cat("NCCL ", api.version_text(), " has one rank on a GPU");
    return std::getenv("NCCL_MULTI_RANK_GPU_ENABLE") ? "" : "NCCL_MULTI_RANK_GPU_ENABLE is not set";
  } catch (const Error& error) {
    return error.what();
  }
}

class CommContract : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().device.is_cuda() && !cuda_available())
      GTEST_SKIP() << "no CUDA in this build or host";
    const std::string obstacle = GetParam().nccl() ? nccl_obstacle(size()) : "";
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
  }

  int size() const { return GetParam().size; }
  at::TensorOptions options(at::ScalarType type = at::kFloat) const {
    return at::device(GetParam().device).dtype(type);
  }

  int here() const { return GetParam().here; }  // ranks of this process
  // Processes come to a barrier later than threads do, above all where cores are few.
  Duration short_timeout() const { return GetParam().launch ? Duration(3s) : Duration(500ms); }

  void run(const std::function<void(Communicator&)>& fn, WorldOptions world = {.timeout = 60s}) {
    RunOptions options{.world = std::move(world), .backend = GetParam().backend};
    options.on_world = [this](std::shared_ptr<World> made) { world_ = std::move(made); };
    const topo::Device gpu{topo::DeviceKind::Cuda, 0};
    if (GetParam().device.is_cuda()) options.devices.assign(size_t(here()), gpu);
    if (!GetParam().launch) return run_ranks(size(), fn, options);
    topo::LaunchInfo launch = *GetParam().launch;  // processes that are in the same test meet
    launch.job_id = cat(testing::UnitTest::GetInstance()->current_test_info()->name(), num_runs_++);
    run_world(launch, fn, {.run = options, .ranks = here(), .meet_timeout = 20s});
  }
  // For a rank that stays away until the others have given up.
  void wait_for_failure() const {
    for (int i = 0; i < 30'000 && !world_->failed(); ++i) std::this_thread::sleep_for(1ms);
  }

  // Runs what must fail, and gives the text of the error, without hosts and processes.
  std::string failure_of(const std::function<void(Communicator&)>& fn,
                         WorldOptions world = {.timeout = 60s}) {
    try {
      run(fn, std::move(world));
    } catch (const Error& error) {
      return std::regex_replace(error.what(), std::regex(" \\(host [^)]*\\)"), "");
    }
    ADD_FAILURE() << "the run should have failed";
    return "";
  }

  // [first, first + count) as a tensor of the device under test.
  at::Tensor range(int64_t first, int64_t count, at::ScalarType type = at::kFloat) const {
    return at::arange(first, first + count, at::kLong).to(type).to(GetParam().device);
  }
  at::Tensor full(std::vector<int64_t> sizes, double value,
                  at::ScalarType type = at::kFloat) const {
    return at::full(sizes, value, options(type));
  }

 private:
  std::shared_ptr<World> world_;
  int num_runs_ = 0;
};

// A CUDA result is ready on the current stream; comparing synchronises with it.
inline void expect_equal(const at::Tensor& got, const at::Tensor& want,
                         const std::string& what = "") {
  EXPECT_TRUE(at::equal(got.cpu(), want.cpu()))
      << what << "\ngot " << got.cpu() << "\nwant " << want.cpu();
}

inline double sum_of_ranks(int n) { return n * (n - 1) / 2.0; }

}  // namespace yoke::comm
