// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/batch_times.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "yoke/base/error.h"

namespace yoke::cli {
namespace {

constexpr size_t kLast = 1000;  // batches of a replica

struct Span {
  double begin = 0, end = 0;  // microseconds
  double length() const { return end - begin; }
  double with(const Span& other) const {
    return std::max(0.0, std::min(end, other.end) - std::max(begin, other.begin));
  }
};
using Spans = std::vector<Span>;

struct Replica {
  Spans models = {}, ins = {}, outs = {}, before = {}, after = {};
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + ptrdiff_t(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

void keep_last(Spans& spans) {
  std::ranges::sort(spans, {}, &Span::begin);
  spans.erase(spans.begin(), spans.end() - ptrdiff_t(std::min(spans.size(), kLast)));
}

// What is between the copies.
Spans kernels_of(const Replica& replica) {
  Spans kernels;
  for (size_t i = 0; i < std::min(replica.ins.size(), replica.outs.size()); ++i)
    kernels.push_back({replica.ins[i].end, replica.outs[i].begin});
  return kernels;
}

}  // namespace

BatchTimes read_batch_times(const std::string& trace) {
  std::map<int, Replica> replicas;
  try {
    const auto whole = nlohmann::json::parse(trace);
    for (const auto& event : whole.at("traceEvents")) {
      auto& replica = replicas[event.at("pid").get<int>()];
      const double begin = event.at("ts");
      const Span span{begin, begin + event.at("dur").get<double>()};
      const std::string name = event.at("name");
      if (name == "model") replica.models.push_back(span);
      if (name == "copy in") replica.ins.push_back(span);
      if (name == "copy out") replica.outs.push_back(span);
      if (name == "inputs") replica.before.push_back(span);
      if (name == "outputs") replica.after.push_back(span);
    }
  } catch (const nlohmann::json::exception& error) {
    fail(Kind::Io, "this is no trace of yoke serve: ", error.what());
  }
  BatchTimes times;
  std::vector<double> models, ins, outs, before, after;
  double copied = 0, beside = 0;
  for (auto& [number, replica] : replicas) {
    for (auto* spans :
         {&replica.models, &replica.ins, &replica.outs, &replica.before, &replica.after})
      keep_last(*spans);
    std::vector<double> idle;
    for (size_t i = 1; i < replica.models.size(); ++i)
      idle.push_back(replica.models[i].begin - replica.models[i - 1].end);
    times.idle_us = std::max(times.idle_us, median(idle));
    times.batches += int(replica.models.size());
    for (const auto& span : replica.models) models.push_back(span.length());
    for (const auto& span : replica.ins) ins.push_back(span.length());
    for (const auto& span : replica.outs) outs.push_back(span.length());
    for (const auto& span : replica.before) before.push_back(span.length());
    for (const auto& span : replica.after) after.push_back(span.length());
  }
  for (const auto& [number, replica] : replicas)
    for (const auto& [other_number, other] : replicas) {
      if (number == other_number || other.models.empty()) continue;
      // Only of when both were at work.
      const auto& mine = replica.models;
      if (mine.empty()) continue;
      const Span both{std::max(mine.front().begin, other.models.front().begin),
                      std::min(mine.back().end, other.models.back().end)};
      const Spans kernels = kernels_of(other);
      for (const auto* copies : {&replica.ins, &replica.outs})
        for (const auto& copy : *copies) {
          if (copy.begin < both.begin || copy.end > both.end) continue;
          copied += copy.length();
          for (const auto& kernel : kernels) beside += copy.with(kernel);
        }
    }
  times.model_us = median(models);
  times.copy_in_us = median(ins);
  times.copy_out_us = median(outs);
  times.inputs_us = median(before);
  times.outputs_us = median(after);
  times.beside = copied > 0 ? beside / copied : 0;
  return times;
}

}  // namespace yoke::cli
