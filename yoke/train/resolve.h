// SPDX-License-Identifier: Apache-2.0
// From what a config says to what runs: the plan for so many ranks, and the batch in numbers.
// Throws Kind::Config, with the numbers, where they do not fit together.
#pragma once

#include "yoke/data/dataset.h"
#include "yoke/models/architecture.h"
#include "yoke/plan/plan.h"
#include "yoke/train/config.h"

namespace yoke::train {

struct Sizes {
  int64_t batch = 0;        // samples of a step
  int64_t micro_batch = 0;  // of one pass of one replica
};

// batch = dp x micro_batches x micro_batch; what the config does not say follows from the rest.
std::pair<plan::Plan, Sizes> resolve(const Config& config, int ranks);

// What the config leaves to others becomes a number in it: sizes of a model in model.init, of
// images, of a tokenizer, and what is usual for the architecture.
void settle(Config& config);
models::Architecture architecture(const Config& config, at::Device device);  // of a settled one
std::shared_ptr<data::Dataset> open_data(const Config& config);
// Of text: that of data.tokenizer, or of the folder in model.init, or bytes. Throws Kind::Io.
std::shared_ptr<const data::Tokenizer> open_tokenizer(const Config& config);

}  // namespace yoke::train
