// SPDX-License-Identifier: Apache-2.0
// `yoke bench data`: training steps under data parallelism, next to one rank alone and to PyTorch.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "yoke/comm/communicator.h"

namespace yoke::cli {

struct BenchData {
  // gpt: 3.5 M parameters, 1,024 tokens a rank; mlp: 16 x 1024^2, batch 4; gpt2: 124 M parameters
  // in bfloat16, 16 x 1,024 tokens a rank
  std::string model = "gpt";
  int ranks = 2;
  std::string device = "cpu";  // of all ranks: "cpu", "cuda:0"
  std::string nccl = {};       // "": the local backend; "auto": LibTorch's NCCL; else its file
};

// Something that trains the model, a round of steps at a time.
class Trainer {
 public:
  virtual ~Trainer() = default;
  virtual double round(int steps) = 0;  // seconds
};

// A program of bench/peers that says when it is ready and obeys "run N".
std::unique_ptr<Trainer> make_peer(const std::string& program,
                                   const std::vector<std::string>& arguments);

// Every rank of the world does the steps, after a few to warm up; seconds of the slowest.
double time_steps(const comm::Communicator& world, at::Device device, int steps,
                  const std::function<void()>& step);

// What a rank computes in one step.
struct StepLoad {
  double tokens = 0;  // or samples
  double flops = 0;   // 6 for each parameter and token, and attention's; 0: not counted
};
StepLoad load_of(const std::string& model);

// "alone": one rank without a wrapper, at the work of one rank; "one": the same under the wrapper;
// "zero0" to "zero3": ours; "bf16": replicas of a float32 model that computes in bfloat16;
// "torch", "compile", "ddp", "fsdp2": PyTorch, by bench/peers/data.py.
std::unique_ptr<Trainer> make_trainer(const std::string& name, const BenchData& bench);

// Of the time in which GPUs communicate, the part in which they also compute; from a trace of a few
// steps, which is written to the file.
struct Overlap {
  double communicated_ms = 0, hidden_ms = 0;  // of a step
};
Overlap trace_overlap(Trainer& trainer, int steps, const std::string& file);

}  // namespace yoke::cli
