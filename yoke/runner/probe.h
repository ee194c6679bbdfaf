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
  // So many rows where the first size is free, or the least there may be; other free sizes are 32
  // (8 of words), or as near as may be.
  Values draw(int64_t rows);
  // Tamer values from now on, for a model that throws: from 0 to 1, zeros, ones. False: there are
  // none left.
  bool tame();
  bool differ() const { return draws_ < Draws::Zeros; }  // from row to row

 private:
  at::Tensor tensor(const plan::Port& port, int64_t rows);
  const std::vector<plan::Port> inputs_;
  const int64_t words_;
  enum class Draws { Normal, Unit, Zeros, Ones } draws_ = Draws::Normal;
  at::Generator chance_;
};

// What a model threw, in short.
struct Threw {
  std::string text = {};
};
// Calls it with tamer and tamer samples until the model does not throw at them; else throws Threw.
template <typename Fn>
auto tamed(Samples samples, const Fn& fn) {
  for (;;) {
    try {
      return fn(samples);
    } catch (const Threw&) {
      if (!samples.tame()) throw;
    }
  }
}

Values clone(const Values& values);
// The largest absolute difference; NaN equals NaN. Infinite where types or shapes differ.
double difference(const Values& a, const Values& b);
// With a tolerance relative to the largest value, for sums in another order.
bool close(const Values& a, const Values& b, double tolerance);

using Compute = std::function<Values(const Values& inputs)>;  // throws Threw
// Why a row's answer is not its own alone; empty: it is. `batch`: the most rows, or 0 where there
// are none; then calls are compared, not rows.
std::string why_impure(const models::Loadable& model, const Compute& compute, Samples& samples,
                       int64_t batch, double tolerance);

}  // namespace yoke::runner
