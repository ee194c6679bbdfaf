// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/stand_in.h"

#include <sys/prctl.h>

#include <charconv>
#include <csignal>
#include <cstring>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/base/text.h"

namespace yoke::serve {
namespace {

constexpr std::string_view kPrefix = "stand-in:";

class StandIn final : public Runner {
 public:
  explicit StandIn(const ReplicaSpec& spec) {
    for (const auto& word : split(spec.path.substr(kPrefix.size()), ',')) {
      if (word.empty()) continue;
      const size_t at = word.find('=');
      double value = 0;
      const auto* end = word.data() + word.size();
      const bool good =
          at != word.npos && std::from_chars(word.data() + at + 1, end, value).ptr == end;
      const std::string key = word.substr(0, at);
      double* slot = key == "ms"            ? &ms_
                     : key == "row_ms"      ? &row_ms_
                     : key == "jitter_ms"   ? &jitter_ms_
                     : key == "value_ms"    ? &value_ms_
                     : key == "first_times" ? &first_times_
                     : key == "pure"        ? &pure_
                                            : nullptr;
      if (!good || !slot)
        fail(Kind::Usage, "'", spec.path,
             "': wanted stand-in:ms=10,row_ms=1,jitter_ms=5,value_ms=0.1,first_times=2,pure=0");
      *slot = value;
    }
    if (spec.number > 0) first_times_ = 1;
    facts_.platform = "yoke_stand_in";
    for (const auto& text : spec.inputs) facts_.inputs.push_back(plan::parse_port(text));
    if (facts_.inputs.empty()) facts_.inputs = {plan::parse_port("x:FP32[-1,4]")};
    facts_.outputs = facts_.inputs;
    for (auto& output : facts_.outputs) output.name = "y" + output.name.substr(1);
    for (const auto& input : facts_.inputs)
      if (input.type != plan::Type::Fp32) fail(Kind::Usage, "a stand-in takes FP32 alone");
    const bool rows = facts_.inputs[0].has_rows();
    facts_.batch = rows ? (spec.batch > 0 ? spec.batch : 8) : 0;
    facts_.stateful = spec.stateful;
    facts_.pure = pure_ != 0;
    ::prctl(PR_SET_TIMERSLACK, 1);
  }

  const Facts& facts() const override { return facts_; }

  void run(const Call& call, Outputs& outputs) override {
    const auto begun = std::chrono::steady_clock::now();
    const int64_t rows = call.inputs[0].shape.empty() ? 1 : call.inputs[0].shape[0];
    double values = 0;  // of the rows, the first ones together
    for (const auto& input : call.inputs) {
      const auto* from = reinterpret_cast<const float*>(input.data);
      const size_t count = input.bytes / sizeof(float),
                   width = count / size_t(std::max<int64_t>(rows, 1));
      for (size_t at = 0; at < count; at += std::max<size_t>(width, 1)) {
        obey(from[at]);
        values += double(from[at]);
      }
      auto* to = reinterpret_cast<float*>(outputs.add(input.type, input.shape).data());
      for (size_t i = 0; i < count; ++i) to[i] = 2 * from[i];
    }
    const double chance = rng_.uniform(calls_++);
    const double ms =
        first_times_ * (ms_ + row_ms_ * double(rows) + jitter_ms_ * chance + value_ms_ * values);
    if (ms > 0) std::this_thread::sleep_until(begun + std::chrono::nanoseconds(int64_t(ms * 1e6)));
  }

 private:
  static void obey(float value) {
    if (value == -1) fail(Kind::Usage, "a row begins with -1");
    if (value == -2) ::raise(SIGKILL);
    while (value == -3) std::this_thread::sleep_for(std::chrono::seconds(1));
  }

  double ms_ = 0, row_ms_ = 0, jitter_ms_ = 0, value_ms_ = 0, first_times_ = 1, pure_ = 1;
  Facts facts_;
  const Rng rng_{1, "stand-in"};
  uint64_t calls_ = 0;
};

}  // namespace

bool is_stand_in(const std::string& path) { return path.starts_with(kPrefix); }

std::unique_ptr<Runner> open_stand_in(const ReplicaSpec& spec) {
  return std::make_unique<StandIn>(spec);
}

}  // namespace yoke::serve
