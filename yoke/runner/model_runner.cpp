// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/model_runner.h"

#include <ATen/Parallel.h>
#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/models/whole.h"
#include "yoke/serve/request.h"

namespace yoke::runner {
namespace {

constexpr int64_t kUsualBatch = 32;
constexpr const char* kPackage = "torch_aoti";

at::ScalarType dtype_named(const std::string& precision) {
  if (precision == "fp32") return at::kFloat;
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  fail(Kind::Config, "precision is '", precision, "'; wanted fp32, bf16 or fp16");
}

// Of a message of TorchScript's what was thrown, without the lines that led there.
std::string short_text(const std::exception& error) {
  std::string text = error.what();
  if (const auto at = text.find("\nException raised from "); at != text.npos) text.resize(at);
  if (!text.starts_with("The following operation failed in the TorchScript")) return text;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
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

bool have_rows(const Values& values, int64_t rows) {
  return std::ranges::all_of(values, [&](const auto& value) {
    const auto shape = shape_of(value);
    return !shape.empty() && shape[0] == rows;
  });
}

}  // namespace

ModelRunner::ModelRunner(const serve::ReplicaSpec& spec) : lane_(at::Device(spec.device)) {
  const auto begun = std::chrono::steady_clock::now();
  at::get_num_threads();  // begins its pool, which else forgets the next line
  at::set_num_threads(int(std::max<int64_t>(spec.threads, 1)));
  open(spec);
  settle_batch(spec);
  if (facts_.declared) {
    examine(spec);
  } else {
    name_outputs();
    facts_.notes.push_back(kDeclareNote);
    if (model_->sets_state() && !spec.stateful)
      serve_alone("it keeps state between calls (forward() sets its own attributes)");
  }
  facts_.load_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

void ModelRunner::open(const serve::ReplicaSpec& spec) {
  const auto wanted = dtype_named(spec.precision);
  models::LoadOptions options{.device = lane_.device(),
                              .inputs = ports(spec.inputs),
                              .outputs = ports(spec.outputs),
                              .dtype = wanted};
  model_ = models::open_loadable(spec.path, options);
  dtype_ = wanted;
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
  facts_.pads = facts_.platform == kPackage || lane_.device().is_cuda();
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
  int64_t most = INT64_MAX;
  for (const auto& input : facts_.inputs) {
    if (!input.has_rows() || input.type == plan::Type::Bytes) {
      facts_.notes.push_back(cat("requests are not batched: '", input.name, "' is ", input.wanted(),
                                 ", of which no rows can be put together"));
      return;
    }
    most = std::min(most, input.shape[0].most);
  }
  if (spec.batch > most)
    fail(Kind::Config, "batch is ", spec.batch, ", and '", spec.path, "' takes ", most, " rows");
  facts_.batch = spec.batch > 0 ? spec.batch : std::min(most, kUsualBatch);
  // A compiled package that checks its inputs refuses a single row, even if it was made for it.
  facts_.buckets = buckets_up_to(facts_.batch, facts_.platform == kPackage ? 2 : 1);
}

int64_t ModelRunner::filled(int64_t rows) const {
  const auto found = std::ranges::lower_bound(facts_.buckets, rows);
  return facts_.pads && found != facts_.buckets.end() ? *found : rows;
}

void ModelRunner::serve_alone(const std::string& why) {
  facts_.pure = false;
  const bool script = facts_.platform == "pytorch_torchscript";
  facts_.notes.push_back(cat(
      facts_.batch > 0 ? "each row is served alone: " : "a request may show in the next one: ", why,
      script ? kStatefulNote : ""));
  if (facts_.batch == 0) return;
  facts_.batch = 1;
  facts_.buckets.resize(1);
}

// Tries it with values of its own, on a copy where there can be one.
void ModelRunner::examine(const serve::ReplicaSpec& spec) {
  const auto copy = model_->copy();
  models::Loadable& tried = copy ? *copy : *model_;
  int64_t words = 0;
  if (const auto known =
          model_->whole() ? models::as_words(model_->whole()->architecture()) : std::nullopt)
    words = std::visit([](const auto& chosen) { return chosen.vocab; }, *known);
  Samples samples(facts_.inputs, words);
  const Compute compute = [&](const Values& inputs) { return this->compute(tried, inputs); };

  Values inputs, reference;
  if (dtype_ != at::kFloat) {
    const auto exact =
        models::open_loadable(spec.path, {.device = lane_.device(), .inputs = ports(spec.inputs)});
    const auto lower = std::exchange(dtype_, at::kFloat);
    const Compute exactly = [&](const Values& given) { return this->compute(*exact, given); };
    const bool can = find_samples(samples, exactly);
    if (can) {
      inputs = samples.draw(std::clamp<int64_t>(facts_.batch, 1, 4));
      for (const auto& part : reference = clone(exactly(clone(inputs))))
        gives_.push_back(part.isTensor() ? part.toTensor().scalar_type() : at::kFloat);
    }
    dtype_ = lower;
    if (!can) return;
  }
  if (!find_samples(samples, compute)) return;
  if (!reference.empty()) facts_.difference = difference(reference, compute(clone(inputs)));

  const Values one = samples.draw(1), kept = clone(one);
  const Values some = clone(compute(one));
  copies_inputs_ = !close(one, kept, 0);
  if (facts_.batch > 0) warm_up(spec, samples, compute);
  const int64_t more = facts_.batch > 0 ? std::min<int64_t>(facts_.batch, 3) : 1;
  const Values others = clone(compute(samples.draw(more)));
  if (facts_.batch > 0 && !(have_rows(some, 1) && have_rows(others, more))) {
    facts_.batch = 0;
    facts_.buckets.clear();
    facts_.notes.push_back(
        "requests are not batched: its outputs do not have a row for each of its "
        "inputs'");
  }
  settle_outputs(some, others);
  if (facts_.stateful) return;
  const bool lower = dtype_ != at::kFloat;
  const double tolerance = lower ? 3e-2 : lane_.device().is_cuda() ? 5e-3 : 1e-4;
  try {
    const auto why = why_impure(tried, compute, samples, facts_.batch, tolerance);
    if (!why.empty()) serve_alone(why);
  } catch (const std::exception& error) {
    serve_alone(cat("a batch throws whose rows do not: ", short_text(error)));
  }
}

// Values that the model does not throw at.
bool ModelRunner::find_samples(Samples& samples, const Compute& compute) {
  for (;;) {
    try {
      compute(samples.draw(1));
      return true;
    } catch (const std::exception& error) {
      if (samples.tame()) continue;
      if (facts_.platform == kPackage)  // whose inputs alone can be wrong
        fail(Kind::Usage, "'", model_->name(),
             "': it throws at what was declared: ", short_text(error));
      name_outputs();
      if (!facts_.stateful)
        serve_alone(cat("it could not be tried, it throws at random numbers, zeros and ones: ",
                        short_text(error)));
      return false;
    }
  }
}

// The profiler of TorchScript optimises what it saw at the second run.
void ModelRunner::warm_up(const serve::ReplicaSpec& spec, Samples& samples,
                          const Compute& compute) {
  for (size_t i = 0; i < facts_.buckets.size(); ++i) {
    const int64_t rows = std::min(facts_.buckets[i], facts_.batch);
    try {
      for (int times = 0; times < 2; ++times) compute(samples.draw(rows));
    } catch (const std::exception& error) {
      const auto text = cat("batches of ", rows, " rows throw: ", short_text(error));
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

void ModelRunner::name_outputs() {
  if (facts_.outputs.empty()) facts_.outputs = {{.name = "y"}};
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

Values ModelRunner::compute(models::Loadable& model, Values inputs) {
  const c10::InferenceMode no_gradients;
  const int64_t rows = facts_.batch > 0 ? inputs[0].toTensor().size(0) : 0;
  const int64_t full = filled(rows);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor()) continue;
    at::Tensor value = lane_.there(i, inputs[i].toTensor(), full);
    if (dtype_ != at::kFloat && at::isFloatingType(value.scalar_type())) value = value.to(dtype_);
    inputs[i] = std::move(value);
  }
  const c10::IValue result = model.call(std::move(inputs));
  if (names_.empty()) names_ = keys_of(result);
  Values parts = flatten(result, names_);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].isTensor()) continue;
    at::Tensor part = parts[i].toTensor();
    if (full != rows && part.dim() > 0 && part.size(0) == full) part = part.narrow(0, 0, rows);
    if (dtype_ != at::kFloat && part.scalar_type() == dtype_)
      part = part.to(i < gives_.size() ? gives_[i] : at::kFloat);
    parts[i] = std::move(part);
  }
  return parts;
}

models::Loadable& ModelRunner::instance_for(const serve::Call& call) {
  if (!facts_.stateful) return *model_;
  if (call.sequence_start) instances_.erase(call.sequence);
  auto found = instances_.find(call.sequence);
  if (found == instances_.end()) {
    if (!call.sequence_start)
      fail(Kind::Usage, "there is no sequence '", call.sequence,
           "': it never began, failed, or gave way to others; wanted sequence_start");
    if (instances_.size() >= kMaxSequences)
      instances_.erase(std::ranges::min_element(instances_, {},
                                                [](const auto& item) { return item.second.used; }));
    found = instances_.emplace(call.sequence, Instance{.model = model_->copy()}).first;
  }
  found->second.used = ++calls_;
  return *found->second.model;
}

// After an error of a kernel every later call fails as well, until the process ends.
void ModelRunner::end_if_lost(const std::string& text) const {
  if (lane_.device().is_cuda() && text.find("CUDA error") != text.npos) throw serve::Fatal{text};
}

void ModelRunner::run(const serve::Call& call, serve::Outputs& outputs) {
  try {
    Values inputs;
    inputs.reserve(call.inputs.size());
    for (const auto& view : call.inputs) inputs.push_back(as_value(view));
    if (copies_inputs_) inputs = clone(inputs);
    give(compute(instance_for(call), std::move(inputs)), outputs);
  } catch (const std::exception& error) {
    instances_.erase(call.sequence);  // half changed
    const std::string text = short_text(error);
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
    end_if_lost(short_text(error));
    throw;
  }
}

}  // namespace yoke::runner
