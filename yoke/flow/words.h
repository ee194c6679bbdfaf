// SPDX-License-Identifier: Apache-2.0
// The nodes that Yoke knows by a word, for flows that need no file: data, small models, losses and
// what joins values. "WORD" or "WORD:ARGUMENTS"; describe_words() lists them.
#pragma once

#include <optional>

#include "yoke/flow/body.h"

namespace yoke::flow {

struct Word {
  Open open = nullptr;
  std::vector<std::string> inputs = {}, outputs = {};  // names of ports
  std::string loss = {};                               // the output that is one
};
// Nothing where the text begins with no such word; throws Kind::Config where its arguments are bad.
// Weights and data are drawn by (seed, key), so that nodes of one key have equal ones.
std::optional<Word> find_word(const std::string& text, uint64_t seed, const std::string& key);
std::string describe_words();
std::vector<std::string> word_names();

// Names of as many ports: x0, x1, …
std::vector<std::string> numbered(const std::string& name, size_t count);
// What joins several values, one input each: mean, vote, stack, concat, weighted.
Open joins(const std::string& how, std::vector<double> weights = {});
// The rows in so many pieces, one output each.
Open splits(int64_t pieces, bool even = false);

}  // namespace yoke::flow
