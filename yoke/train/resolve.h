// SPDX-License-Identifier: Apache-2.0
// From what a config says to what runs: the plan for so many ranks, and the batch in numbers.
// Throws Kind::Config, with the numbers, where they do not fit together.
#pragma once

#include <optional>

#include "yoke/data/dataset.h"
#include "yoke/models/hugging_face.h"
#include "yoke/plan/plan.h"
#include "yoke/train/config.h"

namespace yoke::train {

struct Sizes {
  int64_t batch = 0;        // samples of a step
  int64_t micro_batch = 0;  // of one pass of one replica
};

// batch = dp x micro_batches x micro_batch; what the config does not say follows from the rest.
std::pair<plan::Plan, Sizes> resolve(const Config& config, int ranks);

// Where model.init names a folder, the sizes become those of the model in it.
void adopt_model(Config& config);
// Of a model of words; none: it is another.
std::optional<models::WordsOptions> words_options(const Config& config);
models::Model make_model(const Config& config, at::Device device);
std::shared_ptr<data::Dataset> open_data(const Config& config);

}  // namespace yoke::train
