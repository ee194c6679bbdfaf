// SPDX-License-Identifier: Apache-2.0
// `yoke flow bench FLOW.toml`: a flow on its own devices, in turn with all of it on the first.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/bench_turns.h"
#include "yoke/cli/flow_bench.h"

namespace yoke::cli {
namespace {

constexpr int kFirst = 3;      // rounds, of which the last gives what is compared
constexpr int kUnderWay = 12;  // rounds of a flow with inputs at once

class FileRounds final : public Trainer {
 public:
  FileRounds(const FlowFile& file, const flow::FlowConfig& config, flow::Compiled compiled)
      : executor_(std::move(compiled), {.timeout = std::chrono::duration_cast<Duration>(
                                            std::chrono::duration<double>(config.timeout_s)),
                                        .threads_per_queue = int(config.threads)}) {
    if (executor_.inputs().empty() && !file.inputs.empty())
      fail(Kind::Usage, "the flow takes no inputs, got --input ", file.inputs[0]);
    if (!executor_.inputs().empty()) inputs_ = parse_inputs(file.inputs, executor_);
    at::manual_seed(uint64_t(config.seed));  // of models that draw themselves
    round(kFirst);
  }
  double round(int steps) override {
    const SteadyClock clock;
    const Time begin = clock.now();
    if (inputs_.empty()) executor_.run(steps);
    for (int i = 0, sent = 0; !inputs_.empty() && i < steps; ++i) {
      for (; sent < std::min(steps, i + kUnderWay); ++sent) executor_.submit(inputs_);
      outputs_ = executor_.collect();
    }
    if (inputs_.empty()) outputs_ = executor_.last();
    for (auto& output : outputs_) output = output.cpu();  // what is under way on a GPU counts
    return std::chrono::duration<double>(clock.now() - begin).count();
  }
  const flow::Tensors& outputs() const { return outputs_; }
  const flow::Executor& executor() const { return executor_; }

 private:
  flow::Tensors inputs_ = {}, outputs_ = {};
  flow::Executor executor_;
};

// Values from one queue to another in a round, bodies and arms once.
double hand_overs(const plan::Program& program) {
  std::vector<int> takers(program.channels.size(), -1);
  for (size_t q = 0; q < program.rows.size(); ++q)
    for (const auto& operation : program.rows[q])
      for (const auto& access : operation.takes) takers[size_t(access.channel)] = int(q);
  double sum = 0;
  for (size_t q = 0; q < program.rows.size(); ++q)
    for (const auto& operation : program.rows[q]) {
      sum += operation.kind == plan::Operation::Kind::Send;
      for (const auto& access : operation.gives) {
        const int taker = takers[size_t(access.channel)];
        if (taker >= 0 && taker != int(q)) sum += double(access.count);
      }
    }
  for (const auto& part : program.parts) sum += hand_overs(part);
  return sum;
}

// A GPU sums in another order, and so do other numbers of threads.
bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a.to(at::kDouble), b.to(at::kDouble), 1e-4, 1e-4,
                                                /*equal_nan=*/true);
}

}  // namespace

void bench_flow_file(BenchTable& bench, const FlowFile& file) {
  auto config = read_flow(file);
  const size_t places = config.graph.options().devices.size();
  // A part of the CPU has the same share of it when it is alone.
  if (config.flow.threads == 0)
    config.flow.threads = std::max(1, at::get_num_threads() / int(places));
  auto compiled = compile_flow(file, config.graph);
  const double operations = double(compiled.program.num_operations());
  const double handed = hand_overs(compiled.program);
  const auto& nodes = compiled.graph.nodes();
  const bool compares =
      !plan::hangs_on_timing(compiled.program) && std::ranges::none_of(nodes, [](const auto& node) {
        return node.options.role == flow::Role::Train;
      });
  std::vector<std::string> names{"its devices"};
  std::optional<flow::Compiled> together;
  if (places < 2) {
    bench.skip(file.path, "all on one device", "the flow has one place");
  } else {
    try {
      together = flow::compile(config.graph.on_first_device());
      names.emplace_back("one device");
    } catch (const Error& error) {
      bench.skip(file.path, "all on one device", error.what());
    }
  }
  flow::Tensors wanted;
  const Turns turns(
      names,
      [&](const std::string& name) {
        const bool own = name == names[0];
        auto rounds =
            std::make_unique<FileRounds>(file, config.flow, std::move(own ? compiled : *together));
        const auto& outputs = rounds->outputs();
        if (own) wanted = outputs;
        for (size_t i = 0; compares && i < outputs.size(); ++i)
          if (!is_same(outputs[i], wanted[i]))
            fail(Kind::Internal, file.path, ": output '", rounds->executor().outputs()[i],
                 "' is another in round ", kFirst - 1,
                 " when all is on one device; wanted the same ",
                 "to 1e-4, does a model draw or keep something that others have too?");
        return rounds;
      },
      num_turns(bench), 0, file.path);
  const auto& own = static_cast<FileRounds&>(turns.trainer(0)).executor();
  Figure figure{.bench = "flow",
                .what = config.flow.name,
                .unit = "rounds/s",
                .got = 1e3 / turns.ms(0),
                .more = {{"operations", operations}, {"hand_overs", handed}},
                .bottleneck = own.report().bottleneck()};
  if (together) {
    figure.more.insert(figure.more.begin(), {"of_one_device", turns.ratio(0, 1)});
    figure.more.insert(figure.more.begin(), {"one_device_per_s", 1e3 / turns.ms(1)});
  }
  bench.report(figure);
}

}  // namespace yoke::cli
