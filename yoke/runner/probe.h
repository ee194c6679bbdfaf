// SPDX-License-Identifier: Apache-2.0
// What a model is tried with while it is loaded, and what that tells: whether a row's answer hangs
// on its neighbours or on the calls before, and how far two answers are apart.
#pragma once

#include <ATen/core/Generator.h>

#include <functional>
#include <string>

#include "yoke/models/loadable.h"
#include "yoke/runner/values.h"

namespace yoke::runner {

class Samples {
 public:
  // `words`: how many tokens there are, of a model of words; 0: whole numbers are small.
  Samples(std::vector<plan::Port> inputs, int64_t words);
  // So many rows where the first size is free; other free sizes are 32 (8 of words), or as near as
  // may be.
  Values draw(int64_t rows);
  // Tamer values from now on, for a model that throws: zeros for whole numbers, all zeros, all
  // ones. False: there are none left.
  bool tame();

 private:
  at::Tensor tensor(const plan::Port& port, int64_t rows);
  const std::vector<plan::Port> inputs_;
  const int64_t words_;
  enum class Draws { Random, ZeroIntegers, Zeros, Ones } draws_ = Draws::Random;
  at::Generator chance_;
};

Values clone(const Values& values);
// The largest absolute difference; NaN equals NaN. Infinite where types or shapes differ.
double difference(const Values& a, const Values& b);
// With a tolerance relative to the largest value, for sums in another order.
bool close(const Values& a, const Values& b, double tolerance);

using Compute = std::function<Values(const Values& inputs)>;
// Why a row's answer is not its own alone; empty: it is. `batch`: the most rows, or 0 where there
// are none; then calls are compared, not rows.
std::string why_impure(const models::Loadable& model, const Compute& compute, Samples& samples,
                       int64_t batch, double tolerance);

}  // namespace yoke::runner
