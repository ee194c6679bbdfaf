// SPDX-License-Identifier: Apache-2.0
// How a model is spread over ranks, as one value: the mesh, the schedule, what is sharded, which
// layers are cut and how. Text form: words of key=value, in any order; what is not said is as
// below.
//   pp=2 dp=2 tp=2 schedule=zbv micro=4 zero=1 sequence=yes layers=4,5,5,4
//   split=*.up:outputs split=*.qkv:outputs:64,32,32 split=*.down:inputs tie=0.weight,17.weight
//   partial=*.q_norm.*
// Values: every rank makes an equal one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/plan/generate.h"

namespace yoke::plan {

// Of all layers of a kind that a name matches; * stands for any characters.
struct SplitRule {
  enum class Kind { Outputs, Inputs, Words, Heads };
  std::string pattern = {};
  Kind kind = Kind::Outputs;
  std::vector<int64_t> parts = {};  // of the outputs, each of which is cut
  bool operator==(const SplitRule&) const = default;
};
bool matches(std::string_view pattern, std::string_view name);

struct Plan {
  int pp = 1, dp = 1, tp = 1;  // stages of a pipeline, replicas, parts of a layer
  std::string schedule = "1f1b";
  int micro_batches = 1;
  int chunks = 2;  // stages of a rank, where the schedule lets one choose
  int zero = 0;
  bool sequence = false;                   // ranks of a layer have their own tokens between layers
  std::vector<int> layers_per_stage = {};  // empty: equal parts
  std::vector<SplitRule> splits = {};
  std::vector<std::vector<std::string>> ties = {};  // parameters that are one
  // Patterns of parameters that all ranks of a layer have, and use on their own heads or features.
  std::vector<std::string> partial = {};
  bool operator==(const Plan&) const = default;

  int num_ranks() const { return pp * dp * tp; }
  ScheduleShape shape() const {
    return {.ranks = pp, .micro_batches = micro_batches, .chunks = chunks};
  }
  // Throws Kind::Config, with the numbers, where it is not for so many ranks and layers.
  void check(int ranks, int layers) const;
};

std::string to_text(const Plan& plan);   // what is not the default
Plan parse_plan(std::string_view text);  // throws Kind::Config with the word it does not understand

}  // namespace yoke::plan
