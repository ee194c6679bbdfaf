// SPDX-License-Identifier: Apache-2.0
// The runner of any model file. What it finds out by trying is in facts(); what it tries it with
// runs on a copy, so that the first request finds the state of the file.
// Threads: one, that which makes it.
#pragma once

#include <map>
#include <optional>

#include "yoke/models/loadable.h"
#include "yoke/runner/flow_model.h"
#include "yoke/runner/lane.h"
#include "yoke/runner/open_runner.h"
#include "yoke/runner/probe.h"
#include "yoke/runner/recording.h"
#include "yoke/serve/worker.h"
#include "yoke/train/words.h"

namespace yoke::runner {

inline constexpr const char* kDeclareNote =
    "requests are not batched: the file does not tell what it takes; to batch them, declare every "
    "input as --input 'x:FP32[-1,3,224,224]' or input = [...] in the config";
inline constexpr const char* kStatefulNote =
    "; with stateful = true each sequence_id has an instance of its own";
inline constexpr size_t kMaxSequences = 1024;

class ModelRunner final : public serve::Runner {
 public:
  ModelRunner(const serve::ReplicaSpec& spec, const ReadHost& read_host);
  const serve::Facts& facts() const override { return facts_; }
  void run(const serve::Call& call, serve::Outputs& outputs) override;
  void generate(const std::string& prompt, const std::string& how,
                const std::function<bool(std::string_view)>& on_text) override;
  Copies copies() const override { return lane_.copies(); }
  std::string breakdown() const override { return flow_ ? flow_->breakdown() : std::string(); }

 private:
  void open(const serve::ReplicaSpec& spec, const ReadHost& read_host);
  void open_words(const std::string& tokenizer);
  void settle_batch(const serve::ReplicaSpec& spec);
  void examine(const serve::ReplicaSpec& spec);
  void measure(const serve::ReplicaSpec& spec, const Samples& samples, const Compute& compute);
  void warm_up(const serve::ReplicaSpec& spec, const Samples& samples, const Compute& compute);
  void find_impurity(const models::Loadable& tried, const Samples& samples, const Compute& compute);
  void record(const Samples& samples);
  double tolerance() const;
  void settle_outputs(const Values& some, const Values& more);
  void serve_alone(const std::string& why);

  models::Loadable& instance_for(const serve::Call& call);
  int64_t filled(int64_t rows) const;
  Values sent(Values inputs, int64_t rows, const Recording* recording);
  Values forward(models::Loadable& model, Values inputs, at::ScalarType dtype);
  Values compute(models::Loadable& model, Values inputs, at::ScalarType dtype);
  Values try_out(models::Loadable& model, const Values& inputs, at::ScalarType dtype);
  void end_if_lost(const std::string& text) const;
  void give(const Values& parts, serve::Outputs& outputs);

  Lane lane_;
  std::unique_ptr<models::Loadable> model_;
  const FlowModel* flow_ = nullptr;         // the same, if it is one
  bool is_package_ = false;                 // compiled, or has a part that is
  at::ScalarType dtype_ = at::kFloat;       // of floating weights and inputs
  std::vector<at::ScalarType> gives_ = {};  // dtypes in fp32, where it computes in another
  std::vector<std::string> names_ = {};     // of a dictionary
  bool copies_inputs_ = false;              // it writes into them, or may keep them
  std::optional<train::Words> words_ = {};
  serve::Facts facts_;
  int64_t least_ = 1;  // rows that it takes at once: fewer are filled up
  std::map<std::vector<int64_t>, std::unique_ptr<Recording>> recordings_ = {};  // by inputs' sizes
  struct Instance {
    std::unique_ptr<models::Loadable> model = nullptr;
    uint64_t used = 0;
  };
  std::map<std::string, Instance> instances_ = {};  // by sequence
  uint64_t calls_ = 0;
};

}  // namespace yoke::runner
