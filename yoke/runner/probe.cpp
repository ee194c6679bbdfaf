// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/probe.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>

#include <algorithm>
#include <limits>

#include "yoke/base/error.h"

namespace yoke::runner {
namespace {

constexpr int64_t kSmall = 8;

// A module's attributes, so that what they were can be told from what they are.
struct Seen {
  explicit Seen(const models::Loadable& model) : values(model.state()) {
    for (const auto& value : values) {
      const bool counted = value.isTensor() && value.toTensor().defined();
      const bool inference = counted && value.toTensor().is_inference();
      versions.push_back(counted && !inference ? value.toTensor()._version() : 0);
      copies.push_back(inference ? value.toTensor().clone() : at::Tensor());
    }
  }
  bool operator==(const Seen& other) const {
    if (values.size() != other.values.size()) return false;
    for (size_t i = 0; i < values.size(); ++i) {
      if (!values[i].isTensor() || !other.values[i].isTensor()) {
        if (values[i] != other.values[i]) return false;
      } else if (!values[i].toTensor().is_same(other.values[i].toTensor()) ||
                 versions[i] != other.versions[i] ||
                 (copies[i].defined() && !copies[i].equal(other.copies[i]))) {
        return false;
      }
    }
    return true;
  }
  Values values;
  std::vector<int64_t> versions;
  std::vector<at::Tensor> copies;  // of those that do not count their changes
};

Values row_of(const Values& values, int64_t row) {
  Values result;
  for (const auto& value : values)
    if (value.isTensor())
      result.emplace_back(value.toTensor().narrow(0, row, 1));
    else
      result.emplace_back(c10::List<std::string>({value.toListRef()[size_t(row)].toStringRef()}));
  return result;
}

}  // namespace

Samples::Samples(std::vector<plan::Port> inputs, int64_t words)
    : inputs_(std::move(inputs)), words_(words), chance_(at::detail::createCPUGenerator(1)) {}

bool Samples::tame() {
  if (draws_ == Draws::Ones) return false;
  draws_ = Draws(int(draws_) + 1);
  return true;
}

at::Tensor Samples::tensor(const plan::Port& port, int64_t rows) {
  const int64_t others = words_ > 0 ? 8 : 32;
  plan::Shape sizes;
  for (const auto& size : port.shape)
    sizes.push_back(std::clamp(sizes.empty() ? rows : others, size.least, size.most));
  const auto dtype = models::dtype_of(port.type);
  if (!differ()) return at::full(sizes, draws_ == Draws::Ones ? 1 : 0, dtype);
  const bool unit = draws_ == Draws::Unit;
  if (at::isFloatingType(dtype))
    return (unit ? at::rand(sizes, chance_, at::kFloat) : at::randn(sizes, chance_, at::kFloat))
        .to(dtype);
  const int64_t most = unit || dtype == at::kBool ? 2 : words_ > 0 ? words_ : kSmall;
  return at::randint(0, most, sizes, chance_, at::kLong).to(dtype);
}

Values Samples::draw(int64_t rows) {
  Values values;
  for (const auto& port : inputs_)
    if (port.has_rows()) rows = std::max(rows, port.shape[0].least);
  for (const auto& port : inputs_) {
    if (port.type != plan::Type::Bytes) {
      values.emplace_back(tensor(port, rows));
      continue;
    }
    plan::Port counted = port;
    counted.type = plan::Type::Bool;
    values.emplace_back(c10::List<std::string>());
    for (int64_t i = tensor(counted, rows).numel(); i > 0; --i)
      values.back().toList().push_back(std::string("0"));
  }
  return values;
}

Values clone(const Values& values) {
  Values result;
  for (const auto& value : values)
    result.push_back(value.isTensor() ? c10::IValue(value.toTensor().clone()) : value);
  return result;
}

double difference(const Values& a, const Values& b) {
  constexpr double kFar = std::numeric_limits<double>::infinity();
  double most = a.size() == b.size() ? 0 : kFar;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (!a[i].isTensor() || !b[i].isTensor()) {
      if (a[i] != b[i]) return kFar;
      continue;
    }
    if (a[i].toTensor().sizes() != b[i].toTensor().sizes()) return kFar;
    if (a[i].toTensor().numel() == 0) continue;
    const auto left = a[i].toTensor().to(at::kCPU, at::kDouble),
               right = b[i].toTensor().to(at::kCPU, at::kDouble);
    const auto alike = left.eq(right).logical_or(left.isnan().logical_and(right.isnan()));
    const auto apart = (left - right).abs().nan_to_num(kFar, kFar).masked_fill(alike, 0);
    most = std::max(most, apart.max().item<double>());
  }
  return most;
}

bool close(const Values& a, const Values& b, double tolerance) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    double allowed = 0;
    if (a[i].isTensor() && a[i].toTensor().numel() > 0 &&
        at::isFloatingType(a[i].toTensor().scalar_type()))
      allowed =
          tolerance *
          a[i].toTensor().to(at::kCPU, at::kDouble).nan_to_num(0, 0, 0).abs().max().item<double>();
    if (!(difference({a[i]}, {b[i]}) <= allowed)) return false;
  }
  return true;
}

std::string why_impure(const models::Loadable& model, const Compute& compute, Samples& samples,
                       int64_t batch, double tolerance) {
  const Values row = samples.draw(1);
  const Values alone = clone(compute(clone(row)));
  const Seen before(model);
  const Values again = clone(compute(clone(row)));
  if (!close(alone, again, tolerance))
    return "it keeps state between calls, or draws at random (the same row, another answer)";
  if (!(before == Seen(model))) return "it keeps state between calls (it changes its own tensors)";
  const int64_t least = batch > 0 ? row[0].toTensor().size(0) : 0;
  for (int64_t rows : {int64_t(2), int64_t(3), int64_t(5), batch}) {
    if (rows > batch || batch < 2) continue;
    rows = std::max(rows, least);
    for (const int64_t at : {int64_t(0), rows / 2, rows - 1}) {
      Values among = samples.draw(rows);
      for (size_t i = 0; i < among.size(); ++i)
        among[i].toTensor().narrow(0, at, 1).copy_(row[i].toTensor().narrow(0, 0, 1));
      if (!close(row_of(alone, 0), row_of(compute(among), at), tolerance))
        return "rows depend on their neighbours in a batch";
    }
  }
  return "";
}

}  // namespace yoke::runner
