// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/model_runner.h"

#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/error_text.h"
#include "yoke/flow/config.h"
#include "yoke/models/whole.h"
#include "yoke/serve/request.h"

namespace yoke::runner {
namespace {

constexpr int64_t kUsualBatch = 32;
constexpr const char* kPackage = "torch_aoti";
constexpr const char* kSetsState =
    "it may keep state between calls (forward() sets its own attributes, or writes into them)";

at::ScalarType dtype_named(const std::string& precision) {
  if (precision == "fp32") return at::kFloat;
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  fail(Kind::Config, "precision is '", precision, "'; wanted fp32, bf16 or fp16");
}

std::vector<plan::Port> ports(const std::vector<std::string>& texts) {
  std::vector<plan::Port> result;
  for (const auto& text : texts) result.push_back(plan::parse_port(text));
  return result;
}

// Powers of two up to `batch`, and itself.
std::vector<int64_t> buckets_up_to(int64_t batch, int64_t least) {
  std::vector<int64_t> buckets;
  for (int64_t rows = least; rows < batch; rows *= 2) buckets.push_back(rows);
  buckets.push_back(std::max(batch, least));
  return buckets;
}

double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Of what is recorded for inputs of such sizes, with `rows` in place of their own.
std::vector<int64_t> sizes_of(const Values& inputs, int64_t rows) {
  std::vector<int64_t> sizes;
  for (const auto& input : inputs) {
    auto shape = shape_of(input);
    if (!shape.empty()) shape[0] = rows;
    sizes.push_back(int64_t(shape.size()));
    sizes.insert(sizes.end(), shape.begin(), shape.end());
  }
  return sizes;
}

bool have_rows(const Values& values, int64_t rows) {
  return std::ranges::all_of(values, [&](const auto& value) {
    const auto shape = shape_of(value);
    return !shape.empty() && shape[0] == rows;
  });
}

}  // namespace

ModelRunner::ModelRunner(const serve::ReplicaSpec& spec, const ReadHost& read_host)
    : lane_(at::Device(spec.device), spec.timed) {
  const auto begun = std::chrono::steady_clock::now();
  at::get_num_threads();  // begins its pool, which else forgets the next line
  at::set_num_threads(int(std::max<int64_t>(spec.threads, 1)));
  open(spec, read_host);
  const bool sets_state = model_->sets_state();
  copies_inputs_ =
      facts_.stateful || sets_state;  // it may keep them, and their memory is used again
  settle_batch(spec);
  if (facts_.declared) {
    examine(spec);
  } else {
    facts_.notes.emplace_back(kDeclareNote);
    if (dtype_ != at::kFloat)
      facts_.notes.push_back(cat("how far ", spec.precision,
                                 " is from fp32 was not measured: the file does not tell what it "
                                 "takes"));
    if (sets_state && !spec.stateful) serve_alone(kSetsState);
  }
  facts_.load_s = seconds_since(begun);
}

void ModelRunner::open(const serve::ReplicaSpec& spec, const ReadHost& read_host) {
  const auto wanted = dtype_named(spec.precision);
  models::LoadOptions options{.device = lane_.device(),
                              .inputs = ports(spec.inputs),
                              .outputs = ports(spec.outputs),
                              .dtype = wanted};
  if (flow::is_flow(spec.path)) {
    if (wanted != at::kFloat)
      fail(Kind::Config, "'", spec.path,
           "' is a flow: its models have the precision of their files");
    const FlowModel::Where where{lane_.device(), int(spec.threads), spec.number};
    auto flow = std::make_unique<FlowModel>(spec.path, where, read_host());
    flow_ = flow.get();
    model_ = std::move(flow);
  } else {
    model_ = models::open_loadable(spec.path, options);
  }
  dtype_ = wanted;
  is_package_ = model_->platform() == kPackage || (flow_ && flow_->has_package());
  facts_.platform = model_->platform();
  facts_.inputs = model_->inputs();
  facts_.outputs = model_->outputs();
  facts_.declared = model_->declared();
  facts_.bytes = model_->bytes();
  facts_.precision = spec.precision;
  for (const auto& output : model_->outputs()) names_.push_back(output.name);
  if (spec.stateful) {
    if (!model_->copy())
      fail(Kind::Config, "'", spec.path,
           "' is to be stateful, and instances are made of TorchScript alone");
    facts_.stateful = true;
    facts_.pure = false;
  }
  open_words(spec.tokenizer);
  facts_.pads = is_package_ || lane_.device().is_cuda();
}

void ModelRunner::open_words(const std::string& tokenizer) {
  const auto words =
      model_->whole() ? models::as_words(model_->whole()->architecture()) : std::nullopt;
  if (!words) return;
  const int64_t seq = std::visit([](const auto& chosen) { return chosen.seq; }, *words);
  facts_.inputs[0].shape[1] = {1, seq};
  try {
    words_ = train::words_of(models::open_model(model_->name()), tokenizer);
    facts_.has_words = true;
  } catch (const Error& error) {
    facts_.notes.push_back(cat("it takes no prompts: ", error.what()));
  }
}

void ModelRunner::settle_batch(const serve::ReplicaSpec& spec) {
  if (!facts_.declared || facts_.stateful) return;
  int64_t least = 1, most = INT64_MAX;
  for (const auto& input : facts_.inputs) {
    if (!input.has_rows() || input.type == plan::Type::Bytes) {
      facts_.notes.push_back(cat("requests are not batched: '", input.name, "' is ", input.wanted(),
                                 ", of which no rows can be put together"));
      return;
    }
    least = std::max(least, input.shape[0].least);
    most = std::min(most, input.shape[0].most);
  }
  if (spec.batch > most)
    fail(Kind::Config, "batch is ", spec.batch, ", and '", spec.path, "' takes ", most, " rows");
  least_ = least;
  facts_.batch = spec.batch > 0 ? spec.batch : std::max(least, std::min(most, kUsualBatch));
  // A compiled package that checks its inputs refuses a single row, even if it was made for it.
  facts_.buckets = buckets_up_to(facts_.batch, std::max<int64_t>(least, is_package_ ? 2 : 1));
}

int64_t ModelRunner::filled(int64_t rows) const {
  const auto found = std::ranges::lower_bound(facts_.buckets, rows);
  if (facts_.pads && found != facts_.buckets.end()) return *found;
  return facts_.batch > 0 ? std::max(rows, least_) : rows;
}

void ModelRunner::serve_alone(const std::string& why) {
  facts_.pure = false;
  const bool script = facts_.platform == "pytorch_torchscript";
  // What takes several rows at least cannot have one filled up: it may look at all of them.
  facts_.notes.push_back(cat(facts_.batch == 0 ? "a request may show in the next one: "
                             : least_ > 1      ? "each request is served alone: "
                                               : "each row is served alone: ",
                             why, script ? kStatefulNote : ""));
  if (facts_.batch == 0) return;
  facts_.batch = least_ > 1 ? 0 : 1;
  facts_.buckets.resize(size_t(facts_.batch));
}

// Tries it with values of its own, on a copy where there can be one.
void ModelRunner::examine(const serve::ReplicaSpec& spec) {
  const auto copy = model_->copy();
  models::Loadable& tried = copy ? *copy : *model_;
  int64_t words = 0;
  if (const auto known =
          model_->whole() ? models::as_words(model_->whole()->architecture()) : std::nullopt)
    words = std::visit([](const auto& chosen) { return chosen.vocab; }, *known);
  const Samples samples(facts_.inputs, words);
  const Compute compute = [&](const Values& inputs) { return try_out(tried, inputs, dtype_); };
  Values one;
  try {
    one = tamed(samples, [&](Samples& some) {
      const Values inputs = some.draw(1), before = clone(inputs);
      const Values outputs = clone(compute(inputs));
      copies_inputs_ |= !close(inputs, before, 0);
      return outputs;
    });
  } catch (const Threw& threw) {
    if (is_package_)  // which has no opinion on values
      fail(Kind::Usage, "'", model_->name(), "' throws at what was declared: ", threw.text);
    if (!facts_.stateful)
      serve_alone(
          "it could not be tried, it throws at random numbers, zeros and ones; see whether what it "
          "takes and gives is what was declared: " +
          threw.text);
    return;
  }
  if (dtype_ != at::kFloat) {
    measure(spec, samples, compute);
    one = tamed(samples, [&](Samples& some) { return clone(compute(some.draw(1))); });
  }
  warm_up(spec, samples, compute);
  const int64_t more = std::clamp(facts_.batch, least_, least_ + 2);
  const Values others =
      tamed(samples, [&](Samples& some) { return clone(compute(some.draw(more))); });
  if (facts_.batch > 0 && !(have_rows(one, least_) && have_rows(others, more))) {
    facts_.batch = 0;
    facts_.buckets.clear();
    facts_.notes.push_back(
        "requests are not batched: its outputs do not have a row for each of its inputs'");
  }
  settle_outputs(one, others);
  if (!facts_.stateful) find_impurity(tried, samples, compute);
  if (spec.record) record(samples);
}

Values ModelRunner::try_out(models::Loadable& model, const Values& inputs, at::ScalarType dtype) {
  try {
    return compute(model, inputs, dtype);
  } catch (const std::exception& error) {
    throw Threw{comm::text_of(error)};
  }
}

// How far its outputs are from those in fp32, and what types they have there.
void ModelRunner::measure(const serve::ReplicaSpec& spec, const Samples& samples,
                          const Compute& compute) {
  const auto exact =
      models::open_loadable(spec.path, {.device = lane_.device(), .inputs = ports(spec.inputs)});
  const int64_t rows = std::clamp<int64_t>(facts_.batch, 1, 4);
  facts_.difference = tamed(samples, [&](Samples& some) {
    const Values inputs = some.draw(rows);
    const Values wanted = clone(try_out(*exact, inputs, at::kFloat));
    gives_.clear();
    for (const auto& part : wanted)
      gives_.push_back(part.isTensor() ? part.toTensor().scalar_type() : at::kFloat);
    return difference(wanted, compute(clone(inputs)));
  });
}

// The profiler of TorchScript optimises what it saw at the second run.
void ModelRunner::warm_up(const serve::ReplicaSpec& spec, const Samples& samples,
                          const Compute& compute) {
  const auto twice = [&](int64_t rows) {
    tamed(samples, [&](Samples& some) {
      compute(some.draw(rows));
      const auto begun = std::chrono::steady_clock::now();
      const Values last = compute(some.draw(rows));
      facts_.longest_s = std::max(facts_.longest_s, seconds_since(begun));
      return last;
    });
  };
  if (facts_.batch == 0) twice(1);
  for (size_t i = 0; i < facts_.buckets.size(); ++i) {
    const int64_t rows = std::min(facts_.buckets[i], facts_.batch);
    try {
      twice(rows);
    } catch (const Threw& threw) {
      const auto text = cat("batches of ", rows, " rows throw: ", threw.text);
      if (i == 0 || spec.batch > 0)
        fail(Kind::Config, "'", spec.path, "': ", text,
             i == 0 ? "" : cat("; set batch = ", facts_.buckets[i - 1]));
      facts_.batch = facts_.buckets[i - 1];
      facts_.buckets.resize(i);
      facts_.notes.push_back(cat("batch is ", facts_.batch, ": ", text));
      return;
    }
  }
}

double ModelRunner::tolerance() const {
  return dtype_ != at::kFloat ? 3e-2 : lane_.device().is_cuda() ? 5e-3 : 1e-4;
}

void ModelRunner::find_impurity(const models::Loadable& tried, const Samples& samples,
                                const Compute& compute) {
  bool told = true;
  try {
    auto why = tamed(samples, [&](Samples& some) {
      told = some.differ();
      return why_impure(tried, compute, some, facts_.batch, tolerance());
    });
    // Though nothing of this shows it.
    if (why.empty() && tried.sets_state()) why = kSetsState;
    if (why.empty() && flow_ && !flow_->decider().empty())
      why = cat("'", flow_->decider(), "' of the flow decides for all rows of a batch");
    if (!why.empty())
      serve_alone(why);
    else if (!told)
      facts_.notes.emplace_back("its rows were compared by equal ones alone: it throws at others");
  } catch (const Threw& threw) {
    serve_alone("a batch throws whose rows do not: " + threw.text);
  }
}

// A batch of each size, where that gives what the model gives. A compiled package asks the GPU
// between its runs whether it is done, which cannot be recorded.
void ModelRunner::record(const Samples& samples) {
  if (!lane_.device().is_cuda() || flow_ || is_package_ || facts_.batch == 0 || !facts_.pure ||
      facts_.stateful)
    return;
  const c10::InferenceMode no_gradients;
  const auto work = [&](const Values& inputs) { return forward(*model_, inputs, dtype_); };
  std::string why;
  try {
    for (const int64_t rows : facts_.buckets) {
      const bool same = tamed(samples, [&](Samples& some) {
        const int64_t asked = std::min(rows, facts_.batch);
        const Values first = some.draw(asked), second = some.draw(asked);
        const Values wanted = clone(try_out(*model_, second, dtype_));
        auto recording = Recording::make(work, sent(first, rows, nullptr));
        if (!recording) return false;
        recordings_[sizes_of(first, rows)] = std::move(recording);
        const auto agrees = [&] {
          return close(wanted, try_out(*model_, second, dtype_), tolerance());
        };
        return agrees() && agrees();
      });
      if (same) continue;
      why = "what was recorded does not give what the model gives";
      break;
    }
  } catch (const Threw& threw) {
    why = threw.text;
  } catch (const std::exception& error) {
    why = comm::text_of(error);
  }
  if (why.empty()) return;
  recordings_.clear();
  facts_.notes.push_back("its kernels are sent to the GPU one by one: " + why);
}

// `some` and `more` are answers to two numbers of rows.
void ModelRunner::settle_outputs(const Values& some, const Values& more) {
  if (!facts_.outputs.empty()) {
    if (some.size() != facts_.outputs.size())
      fail(Kind::Usage, "'", model_->name(), "' gives ", some.size(), " outputs, and ",
           facts_.outputs.size(), " were declared");
    for (size_t i = 0; i < some.size(); ++i)
      if (!facts_.outputs[i].holds(type_of(some[i]), shape_of(some[i])))
        fail(Kind::Usage, "'", model_->name(), "': output '", facts_.outputs[i].name,
             "' was declared as ", facts_.outputs[i].wanted(), ", and is ",
             plan::to_text(type_of(some[i]), shape_of(some[i])));
    return;
  }
  bool free = false;  // sizes of inputs beside the rows, or where there are none
  for (const auto& input : facts_.inputs)
    for (size_t d = facts_.batch > 0 ? 1 : 0; d < input.shape.size(); ++d)
      free |= !input.shape[d].fixed();
  for (size_t i = 0; i < some.size(); ++i) {
    auto sizes = shape_of(some[i]);
    const auto other = shape_of(more[i]);
    for (size_t d = 0; d < sizes.size(); ++d)
      if (free || (facts_.batch > 0 && d == 0) || d >= other.size() || sizes[d] != other[d])
        sizes[d] = -1;
    const auto name = !names_.empty()    ? names_[i]
                      : some.size() == 1 ? std::string("y")
                                         : cat("output", i);
    facts_.outputs.push_back(models::port(name, type_of(some[i]), sizes));
  }
}

// On the device, with so many rows; where they are recorded, into their places.
Values ModelRunner::sent(Values inputs, int64_t rows, const Recording* recording) {
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].isTensor())
      inputs[i] = lane_.there(i, inputs[i].toTensor(), rows,
                              recording ? recording->input(i) : at::Tensor());
  return inputs;
}

Values ModelRunner::forward(models::Loadable& model, Values inputs, at::ScalarType dtype) {
  for (auto& input : inputs)
    if (dtype != at::kFloat && input.isTensor() &&
        at::isFloatingType(input.toTensor().scalar_type()))
      input = input.toTensor().to(dtype);
  const c10::IValue result = model.call(std::move(inputs));
  if (names_.empty()) names_ = keys_of(result);
  Values parts = flatten(result, names_);
  for (size_t i = 0; i < parts.size() && dtype != at::kFloat; ++i)
    if (parts[i].isTensor() && parts[i].toTensor().scalar_type() == dtype)
      parts[i] = parts[i].toTensor().to(i < gives_.size() ? gives_[i] : at::kFloat);
  return parts;
}

Values ModelRunner::compute(models::Loadable& model, Values inputs, at::ScalarType dtype) {
  const c10::InferenceMode no_gradients;
  const int64_t rows = facts_.batch > 0 ? inputs[0].toTensor().size(0) : 0;
  const int64_t full = filled(rows);
  Recording* recording = nullptr;
  if (!recordings_.empty() && &model == model_.get())
    if (const auto found = recordings_.find(sizes_of(inputs, full)); found != recordings_.end())
      recording = found->second.get();
  inputs = sent(std::move(inputs), full, recording);
  Values parts = recording ? recording->replay() : forward(model, std::move(inputs), dtype);
  for (auto& part : parts) {
    if (full == rows || !part.isTensor()) continue;
    const at::Tensor& whole = part.toTensor();
    if (whole.dim() > 0 && whole.size(0) == full) part = whole.narrow(0, 0, rows);
  }
  return parts;
}

models::Loadable& ModelRunner::instance_for(const serve::Call& call) {
  if (!facts_.stateful) return *model_;
  if (call.sequence_start) instances_.erase(call.sequence);
  auto found = instances_.find(call.sequence);
  if (found == instances_.end()) {
    if (!call.sequence_start)
      fail(Kind::Usage,
           "there is no such sequence: it never began, failed, or gave way to others; wanted "
           "sequence_start");
    if (instances_.size() >= kMaxSequences)
      instances_.erase(std::ranges::min_element(instances_, {},
                                                [](const auto& item) { return item.second.used; }));
    found = instances_.emplace(call.sequence, Instance{.model = model_->copy()}).first;
  }
  found->second.used = ++calls_;
  return *found->second.model;
}

// After an error of a kernel every later call fails as well, until the process ends; so it does
// after a node of a flow that has not come back. Libraries of the GPU and compiled packages say it
// in words of their own, as they say of rows that they do not take: so the device is asked.
void ModelRunner::end_if_lost(const std::string& text) const {
  if (text.find("CUDA error") != text.npos || (flow_ && flow_->lost()) || lane_.lost())
    throw serve::Fatal{text};
}

void ModelRunner::run(const serve::Call& call, serve::Outputs& outputs) {
  try {
    Values inputs;
    inputs.reserve(call.inputs.size());
    for (const auto& view : call.inputs) inputs.push_back(as_value(view));
    if (copies_inputs_) inputs = clone(inputs);
    give(compute(instance_for(call), std::move(inputs), dtype_), outputs);
  } catch (const std::exception& error) {
    instances_.erase(call.sequence);  // half changed
    const std::string text = comm::text_of(error);
    end_if_lost(text);
    fail(Kind::Usage, text);
  }
  if (call.sequence_end) instances_.erase(call.sequence);
}

void ModelRunner::give(const Values& parts, serve::Outputs& outputs) {
  std::vector<at::Tensor> tensors;
  std::vector<std::span<std::byte>> rooms;
  for (const auto& part : parts) {
    if (is_strings(part)) {
      give_strings(part, outputs);
      continue;
    }
    tensors.push_back(part.toTensor());
    rooms.push_back(outputs.add(type_of(part), shape_of(part)));
  }
  lane_.back(tensors, rooms);
}

void ModelRunner::generate(const std::string& prompt, const std::string& how,
                           const std::function<bool(std::string_view)>& on_text) {
  if (!words_) fail(Kind::Usage, "the model takes no prompts");
  const auto asked = serve::parse_prompt(prompt, how);
  const models::GenerateOptions options{.tokens = asked.tokens,
                                        .sampling = {.temperature = asked.temperature,
                                                     .top_k = asked.top_k,
                                                     .top_p = asked.top_p,
                                                     .seed = asked.seed}};
  try {
    train::write_text(*model_->whole(), *words_, asked.text, options, on_text);
  } catch (const c10::Error& error) {
    end_if_lost(comm::text_of(error));
    throw;
  }
}

}  // namespace yoke::runner
