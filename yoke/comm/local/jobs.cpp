// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/local/jobs.h"

#include <algorithm>
#include <cstring>

#include "yoke/base/error.h"

namespace yoke::comm {
namespace {

// Small enough that two buffers of it stay in a core's own cache, large enough to hide the claim.
constexpr int64_t kItemBytes = 64 << 10;

const at::Tensor& piece(const std::vector<at::Tensor>& list, size_t rank) {
  return list.size() == 1 ? list[0] : list[rank];
}

}  // namespace

std::vector<Job> jobs_of(const std::vector<Operation>& parts) {
  const size_t n = parts.size();
  const OpKind kind = parts[0].kind;
  const size_t root = size_t(std::max(parts[0].root, 0));
  std::vector<Job> jobs;
  auto add = [&jobs](Job job) {
    if (job.sources.size() == 1)
      std::erase_if(job.targets, [&](const at::Tensor& t) {
        return t.const_data_ptr() == job.sources[0].const_data_ptr();
      });
    if (job.sources[0].numel() > 0 && !job.targets.empty()) jobs.push_back(std::move(job));
  };
  auto all_inputs = [&](size_t target) {
    std::vector<at::Tensor> sources;
    for (const auto& part : parts) sources.push_back(piece(part.inputs, target));
    return sources;
  };
  auto all_outputs = [&](size_t source) {
    std::vector<at::Tensor> targets;
    for (const auto& part : parts)
      if (!part.outputs.empty()) targets.push_back(piece(part.outputs, source));
    return targets;
  };
  switch (kind) {
    case OpKind::AllReduce:
    case OpKind::Reduce:
      add({all_inputs(0), all_outputs(0)});
      break;
    // Copies go by target, so that each rank's share of the items writes to its own memory.
    case OpKind::Broadcast:
      for (const auto& target : all_outputs(root)) add({{parts[root].inputs[0]}, {target}});
      break;
    case OpKind::AllGather:
    case OpKind::Gather:
      for (const auto& part : parts)
        for (size_t source = 0; source < part.outputs.size(); ++source)
          add({{parts[source].inputs[0]}, {part.outputs[source]}});
      break;
    case OpKind::ReduceScatter:
      for (size_t target = 0; target < n; ++target)
        add({all_inputs(target), {parts[target].outputs[0]}});
      break;
    case OpKind::Scatter:
      for (size_t target = 0; target < n; ++target)
        add({{piece(parts[root].inputs, target)}, {parts[target].outputs[0]}});
      break;
    case OpKind::AllToAll:
      for (size_t target = 0; target < n; ++target)
        for (size_t source = 0; source < n; ++source)
          add({{piece(parts[source].inputs, target)}, {piece(parts[target].outputs, source)}});
      break;
    default:
      break;
  }
  return jobs;
}

CpuItems::CpuItems(const std::vector<Job>& jobs, const Operation& operation) {
  if (jobs.empty()) return;
  const at::Tensor& sample = jobs[0].sources[0];
  element_bytes_ = sample.element_size();
  elements_per_item_ = kItemBytes / element_bytes_;
  if (operation.reduce) kernel_ = reduce_kernel(sample.scalar_type(), *operation.reduce);
  YOKE_CHECK(kernel_ != nullptr || !operation.reduce, operation.text());
  int64_t bytes = 0;
  for (const auto& job : jobs) {
    Span span{.sources = {}, .targets = {}, .count = job.sources[0].numel(), .first_item = total_};
    for (const auto& source : job.sources) span.sources.push_back(source.const_data_ptr());
    for (const auto& target : job.targets) span.targets.push_back(target.mutable_data_ptr());
    total_ += (span.count + elements_per_item_ - 1) / elements_per_item_;
    bytes += span.count * element_bytes_;
    spans_.push_back(std::move(span));
  }
  small_ = bytes <= kItemBytes;
  if (small_) total_ = 1;
}

void CpuItems::run(int64_t item) const {
  if (small_) {
    for (const auto& span : spans_) run(span, 0, span.count);
    return;
  }
  const auto after = std::ranges::upper_bound(spans_, item, {}, &Span::first_item);
  const Span& span = *(after - 1);
  const int64_t begin = (item - span.first_item) * elements_per_item_;
  run(span, begin, std::min(span.count, begin + elements_per_item_));
}

void CpuItems::run(const Span& span, int64_t begin, int64_t end) const {
  if (kernel_ != nullptr && span.sources.size() > 1)
    return kernel_(span.sources, span.targets, begin, end);
  for (void* target : span.targets)
    std::memcpy(static_cast<char*>(target) + begin * element_bytes_,
                static_cast<const char*>(span.sources[0]) + begin * element_bytes_,
                size_t((end - begin) * element_bytes_));
}

}  // namespace yoke::comm
