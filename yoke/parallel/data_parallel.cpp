// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/data_parallel.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <numeric>

#include "yoke/base/error.h"
#include "yoke/parallel/autocast.h"
#include "yoke/parallel/gradients.h"
#include "yoke/parallel/weights.h"

namespace yoke::parallel {
namespace {

at::ScalarType compute_type(Precision precision, at::ScalarType own) {
  return precision == Precision::Bf16   ? at::kBFloat16
         : precision == Precision::Fp16 ? at::kHalf
                                        : own;
}

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
    if (options.precision == Precision::Fp16) scale = options.loss_scale;
  }

  void take(Model given) {
    take_in(std::move(given));
    if (model.trainable.empty())
      fail(Kind::Usage, "the module has no parameter that requires a gradient");
    for (const auto& parameter : model.trainable) values.push_back(parameter.tensor().detach());
    std::vector<int> order(model.trainable.size());
    std::iota(order.rbegin(), order.rend(), 0);  // backward comes from the end
    build(order);
    learning = options.learn_order && options.zero < 2;
    if (!learning) values.clear();
    start_autocast();
  }

  void take(const std::vector<UnitFactory>& factories) {
    if (options.zero != 3 || factories.empty())
      fail(Kind::Usage,
           "a model in parts wants zero = 3 and at least one part, got zero = ", options.zero,
           " and ", factories.size(), " parts");
    auto growing = std::make_shared<plan::Layout>();
    growing->num_shards = comm.size();
    growing->buckets.resize(factories.size());
    layout = growing;
    for (size_t i = 0; i < factories.size(); ++i) {
      units.push_back(factories[i]());
      Model part = model_of(*units.back());
      // What an earlier part has is tied to it.
      std::erase_if(part.trainable,
                    [](const auto& parameter) { return owner_of(parameter.tensor()) != nullptr; });
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
    gradients = make_gradients();
    start_autocast();
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
                         .reshard_after_forward = options.reshard_after_forward});
  }
  std::unique_ptr<Gradients> make_gradients() const {
    return std::make_unique<Gradients>(
        layout, model.trainable, comm,
        Gradients::Options{
            .zero = options.zero, .dtype = own_type, .device = device, .wire = options.wire});
  }

  void build(const std::vector<int>& order) {
    const int64_t width = int64_t(c10::elementSize(own_type));
    layout = std::make_shared<const plan::Layout>(plan::make_layout(
        parameters_of(model), order, comm.size(),
        {.usual = options.bucket_bytes / width, .first = options.first_bucket_bytes / width}));
    auto fresh_weights = make_weights();
    for (size_t b = 0; b < layout->buckets.size(); ++b) fresh_weights->add(b, values);
    auto fresh_gradients = make_gradients();
    if (gradients) fresh_gradients->adopt(*gradients);
    gradients = std::move(fresh_gradients);
    weights = std::move(fresh_weights);
  }

  // Rank 0's order of the first pass becomes everybody's; what had no gradient comes last.
  void learn() {
    learning = false;
    std::vector<int> seen = gradients->order();
    for (int p = 0; p < int(model.trainable.size()); ++p)
      if (std::ranges::find(seen, p) == seen.end()) seen.push_back(p);
    const at::Tensor order = at::tensor(seen, at::kLong).to(device);
    comm.broadcast(order, 0).wait();
    const at::Tensor agreed = order.cpu();
    const auto* first = agreed.const_data_ptr<int64_t>();
    // What has been written into the parameters since then counts.
    for (size_t p = 0; p < values.size(); ++p) {
      const at::Tensor now = model.trainable[p].tensor().detach();
      if (!at::equal(values[p].to(now.scalar_type()), now)) values[p] = now.to(own_type);
    }
    build(std::vector<int>(first, first + agreed.numel()));
    values.clear();
  }

  void pass(const at::Tensor& loss_sum, double count, bool reduce) {
    if (count < 0 || (loss_sum.defined() && loss_sum.numel() != 1))
      fail(Kind::Usage,
           "backward() wants the sum of the losses, one element, and their number; got ",
           loss_sum.defined() ? loss_sum.numel() : 0, " elements and ", count);
    weights->check();
    const bool every_pass = options.zero >= 2;
    gradients->begin((reduce || every_pass) && !learning,
                     [this](size_t bucket) { weights->note_reduce(bucket); });
    if (loss_sum.defined()) {
      weights->begin_backward();
      const Autocast off(device.type(), false, compute_type(options.precision, own_type));
      // Not Tensor::backward(): all of the pass would be inside that operation.
      torch::autograd::backward({scale == 1 ? loss_sum : loss_sum * scale}, {});
    } else if (options.zero == 3) {
      weights->follow([this](size_t bucket) { gradients->reduce_up_to(bucket); });
    }
    gradients->end();
    if (loss_sum.defined()) weights->end_backward();
    weights->check();
    if (learning) {
      learn();
      gradients->begin(reduce);
      gradients->end();
    }
    counted += count;
    ready = reduce;
  }

  Model model;
  std::vector<std::shared_ptr<torch::nn::Module>> units;
  const comm::Communicator comm;
  const DataParallelOptions options;
  at::Device device = at::kCPU;
  at::ScalarType own_type = at::kFloat;
  std::vector<at::Tensor> values;  // before they were put into buckets, until the order is learnt
  bool learning = false;
  std::shared_ptr<const plan::Layout> layout;
  std::unique_ptr<Weights> weights;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<Autocast> autocast;
  double counted = 0;  // samples of this rank in this step
  bool ready = false;  // backward() has been called in this step
  int64_t num_steps = 0;
  double scale = 1;
  int num_good = 0;  // steps since the scale has changed
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

DataParallel::~DataParallel() = default;

const std::vector<std::shared_ptr<torch::nn::Module>>& DataParallel::units() const {
  return impl_->units;
}

void DataParallel::backward(const at::Tensor& loss_sum, double count) {
  impl_->pass(loss_sum, count, /*reduce=*/true);
}

void DataParallel::accumulate(const at::Tensor& loss_sum, double count) {
  impl_->pass(loss_sum, count, /*reduce=*/false);
}

void DataParallel::gathered(const std::function<void()>& fn) {
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
double DataParallel::loss_scale() const { return impl_->scale; }

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

DataParallel::Reduced DataParallel::reduced() {
  if (!impl_->ready)
    fail(Kind::Usage,
         "a step without backward(): accumulate() is for all micro-batches but the "
         "last, which wants backward()");
  const at::NoGradGuard no_grad;
  const auto& used = impl_->gradients->used();
  at::Tensor tail = at::empty({int64_t(used.size()) + 1}, at::kDouble);
  auto* numbers = tail.mutable_data_ptr<double>();
  numbers[0] = impl_->counted;
  std::ranges::copy(used, numbers + 1);
  tail = tail.to(impl_->device);
  const auto counting = impl_->comm.all_reduce(tail);
  impl_->gradients->await();
  counting.wait();
  tail = tail.cpu();
  numbers = tail.mutable_data_ptr<double>();
  Reduced reduced{.count = numbers[0]};
  if (reduced.count <= 0)
    fail(Kind::Usage, "a step over no samples: the counts given to backward() add up to ",
         reduced.count, " over all ranks");
  for (size_t p = 0; p < used.size(); ++p) reduced.used.push_back(numbers[p + 1] > 0);
  const auto& layout = *impl_->layout;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    Part part{.weights = impl_->weights->masters(b),
              .gradients = impl_->gradients->owned(b),
              .shard = impl_->gradients->shard(b)};
    if (impl_->options.zero == 0)
      for (const auto& slot : layout.buckets[b].slots)
        part.pieces.push_back({slot.parameter, slot.offset, slot.count, 0});
    else
      part.pieces = layout.pieces(layout.buckets[b], impl_->comm.rank());
    reduced.parts.push_back(std::move(part));
  }
  return reduced;
}

void DataParallel::stepped(bool updated) {
  if (updated) impl_->weights->updated();
  impl_->gradients->clear();
  impl_->counted = 0;
  impl_->ready = false;
  ++impl_->num_steps;
  const int every = impl_->options.check_every;
  if (every > 0 && impl_->num_steps % every == 0) check_replicas();
  if (impl_->options.precision != Precision::Fp16) return;
  constexpr int kGrowAfter = 2000;  // as torch.amp.GradScaler
  if (!updated) impl_->scale /= 2;
  impl_->num_good = updated ? impl_->num_good + 1 : 0;
  if (impl_->num_good == kGrowAfter) {
    impl_->scale *= 2;
    impl_->num_good = 0;
  }
}

void DataParallel::check_replicas() {
  const at::NoGradGuard no_grad;
  const auto& comm = impl_->comm;
  impl_->weights->gather_all();
  const auto kind = at::device(impl_->device).dtype(at::kLong);
  std::vector<at::Tensor> sums;  // of the bits, for each parameter
  const int width = int(c10::elementSize(impl_->weights->full(0).scalar_type()));
  const at::ScalarType bits = width == 8 ? at::kLong : width == 4 ? at::kInt : at::kShort;
  for (const auto& parameter : impl_->model.trainable)
    sums.push_back(parameter.tensor().detach().reshape({-1}).view(bits).sum(at::kLong));
  const at::Tensor mine = at::stack(sums).to(kind);
  const at::Tensor all = at::empty({comm.size() * mine.numel()}, kind);
  comm.all_gather(all, mine).wait();
  impl_->weights->release_all();
  const at::Tensor table = all.view({comm.size(), -1}).cpu();
  for (int64_t p = 0; p < mine.numel(); ++p) {
    const at::Tensor column = table.select(1, p);
    const int64_t usual = std::get<0>(column.mode(0)).item<int64_t>();
    for (int r = 0; r < comm.size(); ++r)
      if (column[r].item<int64_t>() != usual)
        fail(Kind::Internal, "the replicas have diverged: rank ", r, " has another '",
             impl_->model.trainable[size_t(p)].name,
             "' than most; something that differs between ranks (an unsynchronised random number, "
             "a write into a parameter) has changed it");
  }
}

}  // namespace yoke::parallel
