// SPDX-License-Identifier: Apache-2.0
// What a load asks, in the forms that the Open Inference Protocol has for it: rows of FP32 for the
// input x of a model. Values that are multiples of 1/8 pass through JSON as they are.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/serve/load.h"

namespace yoke::serve {

enum class Wire { Json, Binary };
const char* to_text(Wire wire);

struct Question {
  std::string model = {};
  std::vector<int64_t> shape = {};  // of all rows together: [rows, ...]
  std::vector<float> values = {};
  std::string stream = {}, id = {};
  int64_t timeout_us = 0;  // 0: none
};

// Random values for a question, by its number.
void fill(Question& question, uint64_t number, std::vector<int64_t> shape);

void write_question(const Question& question, Wire wire, LoadRequest& request);
// The values of the first output. False where there are not as many as wanted.
bool read_values(std::string_view body, Wire wire, std::span<float> values);

}  // namespace yoke::serve
