// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/executor.h"

#include <algorithm>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/flow/queue_run.h"

namespace yoke::flow {

struct Executor::Impl {
  Impl(Compiled compiled, RunOptions given) : run(std::move(compiled), std::move(given)) {}

  void start() {
    if (lost) fail(Kind::Timeout, "a node of this flow has not come back; make another Executor");
    if (run.finished && collected < run.target) raise();  // of a round that nobody collected
    if (const auto why = run.stopped()) {
      run.forget_stop();
      fail(Kind::Cancelled, "the flow was stopped: ", *why);
    }
    if (owner.joinable() && !run.finished) return;
    if (owner.joinable()) owner.join();
    run.reset();
    owner = std::jthread([this] {
      try {
        const auto& devices = run.compiled.graph.options().devices;
        comm::run_ranks(int(devices.size()), [&](comm::Communicator& world) { run.queue(world); },
                        {.world = {.timeout = run.options.timeout,
                                   .timeout_key = "flow.timeout_s",
                                   .on_its_way = [this](int queue) { return run.moves(queue); }},
                         .devices = devices,
                         .threads_per_rank = run.options.threads_per_queue,
                         .pin = run.options.pin,
                         .on_world = [&](auto world) { run.set_world(std::move(world)); }});
      } catch (...) {
        run.error = std::current_exception();
        run.broken = true;
      }
      run.set_world(nullptr);
      run.finished = true;
      run.wake_all();
    });
  }

  // What has begun may come to its end, for as long as any wait of this flow; nothing else begins.
  // False: a thread is in a model's code, perhaps for ever.
  bool end() {
    if (lost || !owner.joinable()) return !lost;
    if (!run.all_done()) run.stop("nobody collects its rounds any more");
    run.ending = true;
    run.wake_all();
    const Time patience = SteadyClock().now() + run.options.timeout;
    for (auto seen = run.progress.key(); !run.finished; seen = run.progress.key()) {
      if (SteadyClock().now() >= patience) return false;
      run.progress.wait(seen, patience);
    }
    owner.join();
    return true;
  }

  // Of rounds that were submitted: who calls run() does not collect them.
  void forget_results() {
    if (collected >= run.target) return;
    wait_done();
    for (auto& results : run.results)
      while (results->pop(Duration(0))) continue;
    run.add_time();
    collected = run.target;
  }

  // The failure, once all threads have ended.
  [[noreturn]] void raise() {
    if (owner.joinable()) owner.join();
    collected = run.target;
    run.forget_stop();
    const auto error = std::exchange(run.error, nullptr);
    if (!error) fail(Kind::Internal, "the flow has ended");
    std::rethrow_exception(error);
  }

  void wait(EventCount& event, const std::function<bool()>& ready) {
    constexpr Duration kLook = std::chrono::milliseconds(500);  // between looks at who is stuck
    for (Time look = SteadyClock().now() + kLook;;) {
      const auto seen = event.key();
      if (ready()) return;
      if (run.finished) raise();
      event.wait(seen, look);
      if (run.finished || SteadyClock().now() < look) continue;
      look += kLook;
      if (const auto why = run.stuck()) {
        lost = true;
        run.stop("a node does not come back");
        fail(Kind::Timeout, *why);
      }
    }
  }

  void wait_done() {
    wait(run.progress, [&] { return run.all_done(); });
  }

  Run run;
  std::jthread owner = {};
  int64_t collected = 0;
  bool lost = false;  // a thread is in a model's code, for ever
};

Executor::Executor(Compiled compiled, RunOptions options) {
  check(compiled);
  impl_ = std::make_unique<Impl>(std::move(compiled), std::move(options));
}
Executor::~Executor() {
  if (!impl_->end()) (void)impl_.release();  // its thread cannot be joined
}

int64_t Executor::run(int64_t rounds) {
  if (!impl_->run.feeds.empty())
    fail(Kind::Usage, "this flow has inputs (", join(inputs(), ", "), "); use step()");
  impl_->start();
  impl_->forget_results();
  impl_->run.keeps_last = true;
  const int64_t before = impl_->run.target;
  impl_->run.add_rounds(rounds);
  impl_->wait_done();
  impl_->run.add_time();
  impl_->collected = impl_->run.target;
  return impl_->collected - before;
}

void Executor::halt() { impl_->run.halt(); }

void Executor::submit(const Tensors& inputs) {
  auto& run = impl_->run;
  if (inputs.size() != run.feeds.size())
    fail(Kind::Usage, "the flow takes ", run.feeds.size(), " inputs (", join(this->inputs(), ", "),
         "), got ", inputs.size());
  impl_->start();  // which tells of a failure before anything else
  if (run.target - impl_->collected >= int64_t(kMostUnderWay))
    fail(Kind::Usage, kMostUnderWay, " rounds were submitted and not collected; collect() first");
  run.keeps_last = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Value value = leave(inputs[i]);
    if (!run.feeds[i]->push(value, Duration(0)))
      fail(Kind::Internal, "there is no room for an input of the flow");
  }
  run.add_rounds(1);
}

Tensors Executor::collect() {
  auto& run = impl_->run;
  if (impl_->collected >= run.target) fail(Kind::Usage, "collect() without a submit()");
  Tensors outputs;
  for (auto& results : run.results) {
    std::optional<Value> value;
    impl_->wait(run.given, [&] { return bool(value = results->pop(Duration(0))); });
    run.arrive(*value);
    outputs.push_back(std::move(value->tensor));
  }
  if (run.results.empty()) impl_->wait_done();
  if (++impl_->collected == run.target) run.add_time();
  return outputs;
}

Tensors Executor::step(const Tensors& inputs) {
  submit(inputs);
  return collect();
}

Tensors Executor::last() const {
  Tensors outputs;
  for (auto value : impl_->run.last_results) {
    impl_->run.arrive(value);
    outputs.push_back(value.tensor);
  }
  return outputs;
}

void Executor::stop(const std::string& why) { impl_->run.stop(why); }

void Executor::wait() const {
  if (impl_->owner.joinable()) impl_->wait_done();
}

int64_t Executor::rounds() const {
  const auto& done = impl_->run.done;
  return std::ranges::min_element(done, {}, [](const auto& n) { return n.load(); })->load();
}

bool Executor::lost() const { return impl_->lost; }
bool Executor::done() const { return impl_->run.all_done(); }

std::vector<double> Executor::losses(const std::string& node) const {
  wait();
  return impl_->run.losses(compiled().graph.find(node));
}
const std::vector<std::string>& Executor::inputs() const { return impl_->run.input_names; }
const std::vector<std::string>& Executor::outputs() const { return impl_->run.output_names; }
const Compiled& Executor::compiled() const { return impl_->run.compiled; }
const Body& Executor::body(const std::string& node) const {
  impl_->run.synchronize();
  return compiled().bodies[size_t(compiled().graph.find(node))];
}
const std::vector<at::Tensor>& Executor::weights(const std::string& node) const {
  return body(node).weights;
}
Report Executor::report() const {
  wait();  // an output may be there before the last of the queues is done
  return impl_->run.report();
}

std::vector<plan::Port> Executor::input_ports() const { return impl_->run.ports(true); }
std::vector<plan::Port> Executor::output_ports() const { return impl_->run.ports(false); }

}  // namespace yoke::flow
