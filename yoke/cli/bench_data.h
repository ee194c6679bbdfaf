// SPDX-License-Identifier: Apache-2.0
// `yoke bench data`: training steps under data parallelism, next to one rank alone and to PyTorch.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace yoke::cli {

struct BenchData {
  std::string model =
      "gpt";  // gpt: 3.5 M parameters, 1,024 tokens a rank; mlp: 16 x 1024^2, batch 4
  int ranks = 2;
};

// Something that trains the model, a round of steps at a time.
class Trainer {
 public:
  virtual ~Trainer() = default;
  virtual double round(int steps) = 0;  // seconds
};

// "alone": one rank without a wrapper, at the work of one rank; "zero0" to "zero3": ours;
// "torch", "ddp", "fsdp2": PyTorch, by bench/peers/data.py.
std::unique_ptr<Trainer> make_trainer(const std::string& name, const BenchData& bench);

}  // namespace yoke::cli
