// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/data_parallel.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/error_text.h"
#include "yoke/parallel/autocast.h"
#include "yoke/parallel/flat_sums.h"
#include "yoke/parallel/gradients.h"
#include "yoke/parallel/readback.h"
#include "yoke/parallel/weights.h"

namespace yoke::parallel {
namespace {

at::ScalarType compute_type(Precision precision, at::ScalarType own) {
  return precision == Precision::Bf16   ? at::kBFloat16
         : precision == Precision::Fp16 ? at::kHalf
                                        : own;
}

constexpr int64_t kTail = 3;     // numbers besides the parameters' in what the ranks agree on
constexpr int64_t kNumbers = 3;  // of a StepInfo

}  // namespace

struct DataParallel::Impl {
  Impl(const comm::Communicator& comm, const DataParallelOptions& options)
      : comm(comm), options(options) {
    if (options.zero < 0 || options.zero > 3)
      fail(Kind::Usage, "zero is the ZeRO stage, 0 to 3, got ", options.zero);
    if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0)
      fail(Kind::Usage, "buckets want a size above 0, got ", options.bucket_bytes, " and ",
           options.first_bucket_bytes, " bytes");
    if (!options.wire) fail(Kind::Usage, "wire wants a Wire, such as plain_wire(), got none");
    if (options.precision == Precision::Fp16) scale.value = options.loss_scale;
  }

  void take(Model given) {
    take_in(std::move(given));
    if (model.trainable.empty())
      fail(Kind::Usage, "the module has no parameter that requires a gradient");
    collect_values();
    build(plan_for({backwards(0)}));
    learning = options.learn_order && options.zero < 2;
    if (learning) first_sums = checksums();
    if (!learning || compute_type(options.precision, own_type) == own_type) values.clear();
    warm_up();
    start_autocast();
  }

  void take(const std::vector<UnitFactory>& factories) {
    if (options.zero != 3 || factories.empty() || !options.shared.empty())
      fail(Kind::Usage,
           "a model in parts wants zero = 3, at least one part and nothing shared, got zero = ",
           options.zero, ", ", factories.size(), " parts and ", options.shared.size(), " shared");
    auto growing = std::make_shared<plan::Layout>();
    growing->num_shards = comm.size();
    growing->buckets.resize(factories.size());
    layout = growing;
    for (size_t i = 0; i < factories.size(); ++i) {
      units.push_back(factories[i]());
      Model part = model_of(*units.back());
      std::erase_if(part.trainable, [&](const auto& parameter) { return tie(parameter, i); });
      for (auto* list : {&part.trainable, &part.frozen})
        for (auto& parameter : *list) parameter.name = cat(i, ".", parameter.name);
      const size_t first = model.trainable.size(), bucket = factories.size() - 1 - i;
      const auto parameters = parameters_of(part);
      take_in(std::move(part));
      if (!weights) weights = make_weights();
      plan::put_bucket(*growing, bucket, parameters);
      values.resize(first);
      for (size_t p = first; p < model.trainable.size(); ++p)
        values.push_back(model.trainable[p].tensor().detach());
      weights->add(bucket, values);
      for (auto& value : values) value.reset();
    }
    if (model.trainable.empty())
      fail(Kind::Usage, "the parts have no parameter that requires a gradient");
    values.clear();
    weights->start();
    ranges = {{0, layout->buckets.size()}};
    gradients = make_gradients();
    warm_up();
    start_autocast();
  }

  void take(Parts parts) {
    device = options.device.value_or(device);
    std::vector<std::vector<int>> groups;
    for (const auto& part : parts) {
      const auto first = model.trainable.size();
      Model given = model_of(*part);
      std::erase_if(given.trainable, [&](const auto& parameter) {
        auto* known = find(parameter.tensor());
        if (known == nullptr) return false;
        if (!shares(known->name))
          fail(Kind::Usage, "'", known->name, "' and '", parameter.name,
               "' are one parameter of two parts; it is to be shared (ties)");
        for (const auto& leaf : parameter.leaves) add_leaf(*known, leaf);
        return true;
      });
      take_in(std::move(given));
      groups.push_back(backwards(first));
    }
    collect_values();
    for (const auto& shared : options.shared)
      for (const int p : members_of(shared))
        if (shared.tied) model.trainable[size_t(p)].name = shared.names[0];
    build(plan_for(groups));
    values.clear();
    units = std::move(parts);
    warm_up();
    start_autocast();
  }

  void collect_values() {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : model.trainable) values.push_back(parameter.tensor().detach());
    for (const auto& shared : options.shared) {
      const auto members = members_of(shared);
      if (members.empty())
        fail(Kind::Usage, "no parameter is called '", join(shared.names, "' or '"),
             "', which is to be shared");
      for (const int p : members) shared.group.broadcast(values[size_t(p)], 0).wait();
    }
  }

  bool shares(const std::string& name) const {
    return std::ranges::any_of(options.shared, [&](const auto& shared) {
      return std::ranges::find(shared.names, name) != shared.names.end();
    });
  }

  std::vector<int> members_of(const DataParallelOptions::Shared& shared) const {
    std::vector<int> members;
    for (size_t p = 0; p < model.trainable.size(); ++p)
      if (std::ranges::find(shared.names, model.trainable[p].name) != shared.names.end())
        members.push_back(int(p));
    return members;
  }

  // The parameters from `first` on, as backward comes to them.
  std::vector<int> backwards(size_t first) const {
    std::vector<int> order(model.trainable.size() - first);
    std::iota(order.rbegin(), order.rend(), int(first));
    return order;
  }

  ModelParameter* find(const at::Tensor& tensor) {
    const auto known = std::ranges::find_if(model.trainable, [&](const auto& parameter) {
      return same_memory(parameter.tensor(), tensor);
    });
    return known == model.trainable.end() ? nullptr : &*known;
  }

  // True if an earlier part has it: then the leaves become that parameter's too.
  bool tie(const ModelParameter& given, size_t part) {
    if (owner_of(given.tensor()) == nullptr) return false;
    auto* known = find(given.tensor());
    if (known == nullptr)
      fail(Kind::Usage, "'", part, ".", given.name,
           "' is a piece of a parameter of an earlier part; tie the whole of it");
    for (const auto& leaf : given.leaves) add_leaf(*known, leaf);
    return true;
  }

  // Checks what the ranks have, and makes the rest equal.
  void take_in(Model part) {
    if (model.trainable.empty() && !part.trainable.empty()) {
      device = part.trainable[0].tensor().device();
      own_type = part.trainable[0].tensor().scalar_type();
    }
    for (const auto& parameter : part.trainable)
      if (parameter.tensor().scalar_type() != own_type || parameter.tensor().device() != device)
        fail(Kind::Usage, "parameter '", parameter.name, "' is ",
             c10::toString(parameter.tensor().scalar_type()), " on ", parameter.tensor().device(),
             ", others are ", c10::toString(own_type), " on ", device,
             "; convert the module to one type and device before");
    compare_models(part, comm, device);
    const at::NoGradGuard no_grad;
    for (const auto& parameter : part.frozen) comm.broadcast(parameter.tensor(), 0).wait();
    for (const auto& parameter : part.trainable)
      for (const auto& leaf : parameter.leaves) leaf.mutable_grad().reset();
    std::ranges::move(part.trainable, std::back_inserter(model.trainable));
    std::ranges::move(part.frozen, std::back_inserter(model.frozen));
  }

  // What a step sends to a GPU and reads from it lies in pinned memory, which is kept once it is
  // made. To make it waits for the device, where later a peer may be waiting for this rank.
  void warm_up() const {
    std::vector<at::Tensor> kept;
    for (int i = 0; !device.is_cpu() && i < 4; ++i)
      for (const int64_t count : {kNumbers, kTail + int64_t(model.trainable.size())})
        kept.push_back(at::empty({count}, at::TensorOptions(at::kDouble).pinned_memory(true)));
    if (!device.is_cpu()) comm.barrier();  // what one rank gives back another would take
  }

  void start_autocast() {
    if (options.precision != Precision::AsIs)
      autocast = std::make_unique<Autocast>(device.type(), true,
                                            compute_type(options.precision, own_type));
  }

  std::unique_ptr<Weights> make_weights() const {
    return std::make_unique<Weights>(
        layout, model.trainable, comm,
        Weights::Options{.zero = options.zero,
                         .dtype = compute_type(options.precision, own_type),
                         .device = device,
                         .reshard_after_forward = options.reshard_after_forward,
                         .by_hand = options.by_hand});
  }
  std::unique_ptr<Gradients> make_gradients() const {
    return std::make_unique<Gradients>(layout, model.trainable, comm,
                                       Gradients::Options{.zero = options.zero,
                                                          .first_shared = first_shared(),
                                                          .dtype = own_type,
                                                          .device = device,
                                                          .wire = options.wire});
  }

  // Of the parts' parameters; those that are shared come after them.
  plan::Layout plan_for(std::vector<std::vector<int>> groups) {
    const size_t num_parts = groups.size();
    for (const auto& shared : options.shared) {
      const auto members = members_of(shared);
      for (size_t part = 0; part < num_parts; ++part)
        std::erase_if(groups[part],
                      [&](int p) { return std::ranges::find(members, p) != members.end(); });
      groups.push_back(members);
    }
    const int64_t width = int64_t(c10::elementSize(own_type));
    auto planned = plan::make_layout(
        parameters_of(model), groups, comm.size(),
        {.usual = options.bucket_bytes / width, .first = options.first_bucket_bytes / width});
    ranges.clear();
    for (size_t begin = 0; const auto& group : groups) {
      size_t end = begin;
      for (size_t left = group.size(); left > 0; ++end) left -= planned.buckets[end].slots.size();
      ranges.push_back({begin, end});
      begin = end;
    }
    return planned;
  }

  void build(plan::Layout planned) {
    layout = std::make_shared<const plan::Layout>(std::move(planned));
    auto fresh_weights = make_weights();
    for (size_t b = 0; b < layout->buckets.size(); ++b) fresh_weights->add(b, values);
    fresh_weights->start();
    auto fresh_gradients = make_gradients();
    if (gradients) fresh_gradients->adopt(*gradients);
    gradients = std::move(fresh_gradients);
    weights = std::move(fresh_weights);
  }

  at::Tensor checksums() const {  // of each parameter
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> sums;
    for (const auto& parameter : model.trainable)
      sums.push_back(checksum(parameter.tensor().detach().reshape({-1})));
    return sums.empty() ? at::empty({0}, at::kLong) : at::stack(sums);
  }

  // Rank 0's order of the first pass becomes everybody's; what had no gradient comes last. So do
  // its values: what has been written into the parameters since they were put into buckets counts.
  void learn() {
    learning = false;
    const bool written = !at::equal(first_sums, checksums());
    values.resize(model.trainable.size());
    for (size_t p = 0; p < values.size(); ++p) {
      const at::Tensor now = model.trainable[p].tensor().detach();
      // Where the parameters have fewer bits, the others are still known.
      const bool same = values[p].defined() && at::equal(values[p].to(now.scalar_type()), now);
      if (!same) values[p] = now.to(own_type);
    }
    std::vector<int> seen = gradients->order();
    for (int p = 0; p < int(model.trainable.size()); ++p)
      if (std::ranges::find(seen, p) == seen.end()) seen.push_back(p);
    seen.push_back(written);
    const at::Tensor order = at::tensor(seen, at::kLong).to(device);
    comm.broadcast(order, 0).wait();
    const at::Tensor agreed = order.cpu();
    const auto* first = agreed.const_data_ptr<int64_t>();
    const auto* last = first + model.trainable.size();
    auto planned = plan_for({std::vector<int>(first, last)});
    if (*last || !plan::same_buckets(planned, *layout)) build(std::move(planned));
    values.clear();
  }

  void pass(const at::Tensor& loss_sum, double count, bool reduce) {
    if (!(count >= 0) || (loss_sum.defined() && loss_sum.numel() != 1))
      fail(Kind::Usage,
           "backward() wants the sum of the losses, one element, and their number; got ",
           loss_sum.defined() ? loss_sum.numel() : 0, " elements and ", count);
    guarded([&] { run_pass(loss_sum, reduce); });
    counted += count;
    ready = reduce;
  }

  void guarded(const std::function<void()>& fn) {
    try {
      fn();
    } catch (const std::exception& error) {
      // The others are in the middle of it, and must not wait for one who may not come back.
      if (comm.size() > 1) comm.abort(comm::text_of(error));
      abandon();
      throw;
    }
  }

  void run_part(size_t part, bool reduce, const std::function<void(const Deliver&)>& fn) {
    weights->check();
    gradients->begin(reduce, ranges.at(part));
    weights->begin_backward();
    {
      const Autocast off(device.type(), false, compute_type(options.precision, own_type));
      fn([this](const auto& leaf, const auto& value, bool last) {
        gradients->deliver(leaf, value, last);
      });
    }
    gradients->end();
    weights->end_backward();
    weights->check();
  }

  // `ranges` has the parts' first, then those of what is shared.
  size_t num_parts() const { return ranges.size() - options.shared.size(); }
  size_t first_shared() const {
    return options.shared.empty() ? SIZE_MAX : ranges[num_parts()].begin;
  }
  // Whether this rank counts the bucket in the norm.
  bool counts(size_t bucket) const {
    for (size_t i = 0; i < options.shared.size(); ++i)
      if (ranges[num_parts() + i].has(bucket)) return options.shared[i].group.rank() == 0;
    return true;
  }
  // After the last pass of a step.
  void reduce_shared(const std::function<void(size_t)>& on_reduce = nullptr) {
    if (options.shared.empty()) return;
    gradients->begin(true, {first_shared(), layout->buckets.size()}, on_reduce);
    for (size_t i = 0; i < options.shared.size(); ++i)
      if (options.shared[i].sum)
        gradients->sum_over(options.shared[i].group, ranges[num_parts() + i]);
    gradients->end();
  }

  void run_pass(const at::Tensor& loss_sum, bool reduce) {
    weights->check();
    const bool every_pass = options.zero >= 2;
    const auto note = [this](size_t bucket) { weights->note_reduce(bucket); };
    gradients->begin((reduce || every_pass) && !learning, ranges[0], note);
    if (loss_sum.defined()) {
      weights->begin_backward();
      const Autocast off(device.type(), false, compute_type(options.precision, own_type));
      // Not Tensor::backward(): all of the pass would be inside that operation.
      torch::autograd::backward({scale.value == 1 ? loss_sum : loss_sum * scale.value}, {});
    } else if (options.zero == 3) {
      weights->follow([this](size_t bucket) { gradients->reduce_up_to(bucket); });
    }
    gradients->end();
    if (reduce && !learning) reduce_shared(note);
    if (loss_sum.defined()) weights->end_backward();
    weights->check();
    if (learning) {
      learn();
      gradients->begin(reduce, ranges[0]);
      gradients->end();
      if (reduce) reduce_shared();
    }
  }

  // In the middle of a step.
  void abandon() {
    forget();
    gradients->abandon();
    weights->abandon();
  }

  // The step's gradients and samples.
  void forget() {
    gradients->clear();
    counted = 0;
    ready = false;
  }

  void ask() {
    if (const auto asked = std::exchange(verdict, nullptr)) asked();
  }

  Model model;
  Parts units;
  std::vector<Gradients::Range> ranges;  // of the buckets; of each part, then of what is shared
  const comm::Communicator comm;
  const DataParallelOptions options;
  at::Device device = at::kCPU;
  at::ScalarType own_type = at::kFloat;
  // As they were before they were put into buckets of fewer bits, until the order is learnt.
  std::vector<at::Tensor> values;
  bool learning = false;
  at::Tensor first_sums;  // of the parameters as they were put into buckets, while learning
  std::shared_ptr<const plan::Layout> layout;
  std::unique_ptr<Weights> weights;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<Autocast> autocast;
  double counted = 0;  // samples of this rank in this step
  bool ready = false;  // backward() has been called in this step
  int64_t num_steps = 0;
  LossScale scale;
  std::function<void()> verdict;  // on the last step
};

DataParallel::DataParallel(torch::nn::Module& module, const comm::Communicator& comm,
                           const DataParallelOptions& options)
    : impl_(std::make_unique<Impl>(comm, options)) {
  impl_->take(model_of(module));
}

DataParallel::DataParallel(torch::jit::Module& module, const comm::Communicator& comm,
                           const DataParallelOptions& options)
    : impl_(std::make_unique<Impl>(comm, options)) {
  impl_->take(model_of(module));
  // On, it folds backward into one node: all gradients come at its end, and slower.
  torch::jit::setGraphExecutorOptimize(false);
}

DataParallel::DataParallel(const std::vector<UnitFactory>& units, const comm::Communicator& comm,
                           const DataParallelOptions& options)
    : impl_(std::make_unique<Impl>(comm, options)) {
  impl_->take(units);
}

DataParallel::DataParallel(Parts parts, const comm::Communicator& comm,
                           const DataParallelOptions& options)
    : impl_(std::make_unique<Impl>(comm, options)) {
  impl_->take(std::move(parts));
}

DataParallel::~DataParallel() = default;

const DataParallel::Parts& DataParallel::units() const { return impl_->units; }

void DataParallel::pass(size_t part, bool reduce, const std::function<void(const Deliver&)>& fn) {
  impl_->guarded([&] { impl_->run_part(part, reduce, fn); });
}

void DataParallel::abandon_passes() { impl_->abandon(); }

void DataParallel::unshard(size_t part) {
  const auto range = impl_->ranges.at(part);
  for (size_t b = range.begin; b < range.end; ++b) impl_->weights->fetch(b);
}

void DataParallel::reshard(size_t part) {
  const auto range = impl_->ranges.at(part);
  for (size_t b = range.begin; b < range.end; ++b) impl_->weights->drop(b);
}

void DataParallel::end_passes(double count) {
  impl_->guarded([&] { impl_->reduce_shared(); });
  impl_->counted += count;
  impl_->ready = true;
}

bool DataParallel::awaits_step() const { return impl_->ready; }

void DataParallel::backward(const at::Tensor& loss_sum, double count) {
  impl_->pass(loss_sum, count, /*reduce=*/true);
}

void DataParallel::accumulate(const at::Tensor& loss_sum, double count) {
  impl_->pass(loss_sum, count, /*reduce=*/false);
}

void DataParallel::gathered(const std::function<void()>& fn) {
  impl_->ask();
  impl_->weights->check();
  impl_->weights->gather_all();
  try {
    fn();
  } catch (...) {
    impl_->weights->release_all();
    throw;
  }
  impl_->weights->release_all();
}

const comm::Communicator& DataParallel::comm() const { return impl_->comm; }
const plan::Layout& DataParallel::layout() const { return *impl_->layout; }
const DataParallelOptions& DataParallel::options() const { return impl_->options; }
const LossScale& DataParallel::loss_scale() const { return impl_->scale; }
void DataParallel::set_loss_scale(LossScale scale) {
  if (impl_->options.precision != Precision::Fp16) fail(Kind::Usage, "a loss scale is for float16");
  if (!(scale.value > 0) || !std::isfinite(scale.value))
    fail(Kind::Usage, "a loss scale is a number above 0, got ", scale.value);
  impl_->scale = scale;
}

plan::Memory DataParallel::memory() const {
  plan::Memory memory;
  const auto& [weights, gradients] = std::tie(*impl_->weights, *impl_->gradients);
  for (size_t b = 0; b < impl_->layout->buckets.size(); ++b) {
    const at::Tensor owned = weights.owned(b), masters = weights.masters(b);
    memory.parameters += impl_->options.zero < 3
                             ? impl_->layout->buckets[b].count * owned.element_size()
                             : int64_t(owned.nbytes());
    if (masters.scalar_type() != owned.scalar_type()) memory.optimizer += int64_t(masters.nbytes());
  }
  memory.gradients = gradients.bytes();
  memory.pool = gradients.pool_bytes() + weights.pool_bytes();
  return memory;
}

DataParallel::Reduced DataParallel::reduced(bool exact) {
  if (!impl_->ready)
    fail(Kind::Usage,
         "a step without backward(): accumulate() is for all micro-batches but the "
         "last, which wants backward()");
  const at::NoGradGuard no_grad;
  const auto& comm = impl_->comm;
  const auto& layout = *impl_->layout;
  const auto& used = impl_->gradients->used();
  const bool on_cpu = impl_->device.is_cpu();
  impl_->gradients->await();
  try {
    impl_->ask();
  } catch (...) {
    impl_->forget();
    throw;
  }
  Reduced reduced;
  // One message for what the ranks have to agree on.
  enum : int64_t { Count, Squares, Trail, Used = kTail };
  at::Tensor tail = at::empty({Used + int64_t(used.size())},
                              at::TensorOptions(at::kDouble).pinned_memory(!on_cpu));
  auto* numbers = tail.mutable_data_ptr<double>();
  const double trail = double(impl_->weights->take_trail());
  numbers[Count] = impl_->counted;
  numbers[Squares] = 0;
  numbers[Trail] = trail;
  std::ranges::copy(used, numbers + Used);
  tail = tail.to(impl_->device, /*non_blocking=*/true);
  for (size_t b = 0; b < layout.buckets.size(); ++b)
    if (impl_->counts(b)) tail[Squares] += sum_of_squares(impl_->gradients->shard(b), exact);
  comm.all_reduce(tail).wait();
  if (impl_->options.across) {
    const at::Tensor ours = tail.narrow(0, 0, Trail).clone();
    impl_->options.across.all_reduce(ours).wait();
    tail.narrow(0, 0, Trail).copy_(ours);
  }
  reduced.count = tail[Count];
  reduced.squares = tail[Squares];
  reduced.mismatch = tail[Trail] != comm.size() * trail;
  reduced.used.assign(used.size(), true);
  if (std::ranges::find(used, false) != used.end()) {  // others may have used what we have not
    const Readback agreed(tail);
    for (size_t p = 0; p < used.size(); ++p) reduced.used[p] = agreed[Used + int64_t(p)] > 0;
  }
  reduced.parts = parts();
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    reduced.parts[b].gradients = impl_->gradients->owned(b);
    reduced.parts[b].shard = impl_->gradients->shard(b);
  }
  return reduced;
}

std::vector<DataParallel::Part> DataParallel::parts() const {
  std::vector<Part> parts;
  const auto& layout = *impl_->layout;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    Part part{.weights = impl_->weights->masters(b), .counts = impl_->counts(b)};
    if (impl_->options.zero == 0)
      for (const auto& slot : layout.buckets[b].slots)
        part.pieces.push_back({slot.parameter, slot.offset, slot.count, 0});
    else
      part.pieces = layout.pieces(layout.buckets[b], impl_->comm.rank());
    parts.push_back(std::move(part));
  }
  return parts;
}

void DataParallel::restored() {
  impl_->learning = false;  // what it would put into other buckets is from before
  impl_->values.clear();
  impl_->weights->updated();
}

void DataParallel::stepped(bool updated, std::function<void()> verdict) {
  impl_->verdict = std::move(verdict);
  if (updated) impl_->weights->updated();
  impl_->forget();
  ++impl_->num_steps;
  const int every = impl_->options.check_every;
  if (every > 0 && impl_->num_steps % every == 0) check_replicas();
  if (impl_->options.precision != Precision::Fp16) return;
  constexpr int kGrowAfter = 2000;  // as torch.amp.GradScaler
  auto& [value, num_good] = impl_->scale;
  if (!updated) value = std::max(value / 2, 1.0);  // at 1 it is no longer the scale's fault
  num_good = updated ? num_good + 1 : 0;
  if (num_good >= kGrowAfter) {
    value *= 2;
    num_good = 0;
  }
}

void DataParallel::finish() { impl_->ask(); }

void DataParallel::check_replicas() {
  impl_->ask();
  if (impl_->options.zero == 3) return;  // every element is on one rank
  const at::NoGradGuard no_grad;
  const size_t num_parameters = impl_->model.trainable.size();
  impl_->weights->gather_all();
  at::Tensor mine = impl_->checksums();
  impl_->weights->release_all();
  const auto compare = [](const comm::Communicator& group, const at::Tensor& sums,
                          const std::function<std::string(size_t)>& name) {
    const at::Tensor all = at::empty({group.size() * sums.numel()}, sums.options());
    group.all_gather(all, sums).wait();
    const at::Tensor table = all.view({group.size(), -1}).cpu();
    for (int64_t p = 0; p < sums.numel(); ++p) {
      const at::Tensor column = table.select(1, p);
      const int64_t usual = std::get<0>(column.mode(0)).item<int64_t>();
      for (int r = 0; r < group.size(); ++r)
        if (column[r].item<int64_t>() != usual)
          fail(Kind::Internal, "the replicas have diverged: rank ", r, " of ", group.name(),
               " has ", name(size_t(p)),
               " than most; something that differs between ranks (an unsynchronised random "
               "number, a write into a parameter) has changed it");
    }
  };
  const auto name_of = [&](size_t p) {
    return cat("another '", impl_->model.trainable[p].name, "'");
  };
  for (const auto& shared : impl_->options.shared) {
    std::vector<at::Tensor> sums;
    const auto members = impl_->members_of(shared);
    for (const int p : members) sums.push_back(mine[p]);
    compare(shared.group, at::stack(sums), [&](size_t i) { return name_of(size_t(members[i])); });
  }
  if (impl_->options.zero == 0)
    for (size_t b = 0; b < impl_->layout->buckets.size(); ++b)
      mine = at::cat({mine, checksum(impl_->weights->masters(b)).view({1})});
  compare(impl_->comm, mine, [&](size_t p) {
    return p < num_parameters ? name_of(p) : std::string("other master weights");
  });
}

}  // namespace yoke::parallel
