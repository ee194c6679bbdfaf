// SPDX-License-Identifier: Apache-2.0
// A model in one piece on one device, to be used rather than trained. Threads: any, without a past;
// those with one each with its own.
#pragma once

#include "yoke/checkpoint/saved.h"
#include "yoke/models/architecture.h"

namespace yoke::models {

// A Hugging Face folder, or of a checkpoint, a folder of them or a run the newest.
struct Opened {
  Architecture architecture = {};   // with `init` that gives the weights
  checkpoint::Strings values = {};  // of a checkpoint
  checkpoint::Path folder = {};
};
// Throws Kind::Io, and Kind::Usage where it is none of these.
Opened open_model(const checkpoint::Path& path);

class Whole {
 public:
  Whole(Architecture architecture, at::Device device, at::ScalarType dtype = at::kFloat);

  at::Tensor forward(const at::Tensor& input) const;
  // Of a model of words: [batch, vocab], what follows the last token, which the end alone computes.
  at::Tensor forward_last(const at::Tensor& input) const;
  const Model& model() const { return model_; }
  const Architecture& architecture() const { return architecture_; }

 private:
  const Architecture architecture_;
  const Model model_;
  const std::optional<at::ScalarType>
      dtype_;  // of what it is given; TorchScript takes what it likes
  std::vector<parallel::Layer> layers_;
};

}  // namespace yoke::models
