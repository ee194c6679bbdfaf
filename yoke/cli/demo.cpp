// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/demo.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>

#include "yoke/base/rng.h"
#include "yoke/base/text.h"
#include "yoke/cli/environment.h"
#include "yoke/cli/flight_watch.h"
#include "yoke/net/http.h"
#include "yoke/observe/json_lines.h"
#include "yoke/observe/metrics.h"
#include "yoke/topo/mesh.h"

namespace yoke::cli {
namespace {

constexpr int64_t kBatch = 256, kHidden = 64;
constexpr float kLearningRate = 0.05f;

// Element i of a stream, whichever rank asks: the same weights and data under every number of
// ranks.
at::Tensor normal(const Rng& rng, int64_t first, std::vector<int64_t> sizes, double scale) {
  at::Tensor values = at::empty(sizes, at::kFloat);
  float* data = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i)
    data[i] = float(scale * rng.normal(uint64_t(first + i)));
  return values;
}

// A network with one hidden layer that learns sin(x0) * cos(x1).
class Network {
 public:
  explicit Network(at::Device device) {
    auto add = [&](const char* name, std::vector<int64_t> sizes, double scale) {
      parameters_.push_back(
          normal(Rng(1, name), 0, std::move(sizes), scale).to(device).requires_grad_(true));
    };
    add("hidden.weight", {kHidden, 2}, 1);
    add("hidden.bias", {kHidden}, 1);
    add("output.weight", {1, kHidden}, 0.1);
  }

  at::Tensor forward(const at::Tensor& x) const {
    const auto& [w, b, v] = std::tie(parameters_[0], parameters_[1], parameters_[2]);
    return at::linear(at::tanh(at::linear(x, w, b)), v).squeeze(1);
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  std::vector<at::Tensor> parameters_;
};

// This rank's part of the samples, which every step sees again.
std::pair<at::Tensor, at::Tensor> batch(int rank, int size, at::Device device) {
  const int64_t first = kBatch * rank / size, last = kBatch * (rank + 1) / size;
  const at::Tensor x = normal(Rng(2, "data"), first * 2, {last - first, 2}, 1);
  return {x.to(device), (x.select(1, 0).sin() * x.select(1, 1).cos()).to(device)};
}

void train(comm::Communicator& comm, const DemoRun& run, std::vector<double>& losses) {
  const topo::Device mine = run.devices[size_t(comm.rank())];
  const at::Device device = mine.kind == topo::DeviceKind::Cuda
                                ? at::Device(at::kCUDA, c10::DeviceIndex(mine.index))
                                : at::Device(at::kCPU);
  if (run.tracer) run.tracer->name_thread(comm.rank(), "train");
  Network network(device);
  for (int step = 0; step < run.steps; ++step) {
    at::Tensor x, y, loss;
    {
      const observe::Span span(run.tracer, "data", observe::Category::Data);
      std::tie(x, y) = batch(comm.rank(), comm.size(), device);
    }
    std::vector<at::Tensor> gradients;
    {
      const observe::Span span(run.tracer, "forward and backward");
      loss = (network.forward(x) - y).square().sum() / kBatch;
      gradients = torch::autograd::grad({loss}, network.parameters());
    }
    at::Tensor total = loss.detach().to(at::kDouble);
    {
      const observe::Span span(run.tracer, "all_reduce", observe::Category::Comm);
      std::vector<comm::Work> works{comm.all_reduce(total)};
      for (const auto& gradient : gradients) works.push_back(comm.all_reduce(gradient));
      for (const auto& work : works) work.wait();
    }
    const at::NoGradGuard no_grad;
    double squares = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      squares += gradients[i].to(at::kDouble).square().sum().item<double>();
      network.parameters()[i].sub_(gradients[i], kLearningRate);
    }
    if (comm.rank() == 0) {
      losses.push_back(total.item<double>());
      if (run.on_step) run.on_step(step, losses.back(), std::sqrt(squares));
    }
  }
}

struct Options {
  std::string devices = "cpu:2", mesh, trace, metrics;
  int steps = 100;
  double timeout_s = 60;
  bool json = false;
};

// Fails now if it will fail later; what the file holds stays until the new trace is there.
void check_writable(const std::string& path) {
  if (!std::ofstream(path, std::ios::app))
    fail(Kind::Usage, "cannot write '", path, "': ", std::strerror(errno), "; choose another file");
}

void write_trace(const observe::Tracer& tracer, const std::string& path) {
  std::ofstream file(path);
  tracer.write_chrome_trace(file);
  if (!file.flush())
    fail(Kind::Io, "cannot write the trace to '", path, "': ", std::strerror(errno));
}

// A port that is taken is the user's to mend.
std::unique_ptr<net::HttpServer> serve_metrics(const std::string& where,
                                               const observe::Registry& registry) {
  auto answer = [&registry](const net::HttpRequest&) {
    std::ostringstream text;
    registry.write_prometheus(text);
    return net::HttpResponse{.content_type = "text/plain; version=0.0.4", .body = text.str()};
  };
  try {
    auto server = std::make_unique<net::HttpServer>(
        net::Listener(net::parse_address(where)),
        std::map<std::string, net::HttpHandler>{{"/metrics", answer}});
    std::cerr << "metrics at http://" << net::to_text(server->address()) << "/metrics\n";
    return server;
  } catch (const Error& error) {
    if (error.kind() != Kind::Io) throw;
    fail(Kind::Usage, error.what());
  }
}

void show_step(bool json, int step, double loss, double grad_norm) {
  if (json)
    return observe::JsonLines(std::cout).write(
        {{"step", step}, {"loss", loss}, {"grad_norm", grad_norm}});
  std::printf("step %5d   loss %.6f   grad norm %.6f\n", step, loss, grad_norm);
  std::fflush(stdout);
}

void demo(const Options& options) {
  if (options.steps < 10) fail(Kind::Usage, "--steps wants at least 10, got ", options.steps);
  if (!(options.timeout_s > 0 && options.timeout_s <= 86400))
    fail(Kind::Usage, "--timeout wants more than 0 seconds and at most a day (86400), got ",
         options.timeout_s);
  const topo::Host host = read_visible_host(read_environment());
  DemoRun run{.devices = topo::parse_devices(options.devices, &host), .steps = options.steps};
  const int num_ranks = int(run.devices.size());
  if (!options.mesh.empty()) {
    const auto mesh = topo::Mesh::parse(options.mesh, num_ranks);
    if (mesh.axes().size() != 1 || mesh.axes()[0].name != "dp")
      fail(Kind::Usage, "the demo trains by data parallelism alone: --mesh wants dp=", num_ranks,
           ", got ", options.mesh);
  }
  const SteadyClock clock;
  observe::Tracer tracer(clock);
  observe::Registry registry;
  auto& steps_done = registry.counter("yoke_steps_total", "Optimizer steps done.");
  auto& last_loss = registry.gauge("yoke_loss", "Loss of the last step.");
  const auto server = options.metrics.empty() ? nullptr : serve_metrics(options.metrics, registry);
  if (!options.trace.empty()) {
    check_writable(options.trace);
    run.tracer = &tracer;
  }

  run.on_step = [&](int step, double loss, double grad_norm) {
    steps_done.add();
    last_loss.set(loss);
    const auto tenths = [&](int64_t steps) { return steps * 10 / options.steps; };
    if (tenths(step + 1) != tenths(step))  // ten lines, the last step's among them
      show_step(options.json, step + 1, loss, grad_norm);
  };
  FlightWatch watch;
  run.ranks.world.timeout = Duration(int64_t(options.timeout_s * 1e9));
  run.ranks.on_world = watch.on_world();
  if (!options.json)
    std::printf("a network of %ld parameters on %s: dp=%d\n", long(kHidden * 4),
                topo::to_text(run.devices).c_str(), num_ranks);
  std::vector<double> losses;
  try {
    losses = train_demo(run);
  } catch (const Error&) {
    watch.dump();
    throw;
  }
  if (!options.trace.empty()) write_trace(tracer, options.trace);

  DemoRun alone{.devices = {run.devices[0]}, .steps = options.steps};
  const auto reference = train_demo(alone);
  double difference = 0;
  for (size_t i = 0; i < losses.size(); ++i)
    difference = std::max(difference, std::abs(losses[i] - reference[i]));
  if (options.json)
    observe::JsonLines(std::cout).write({{"ranks", num_ranks}, {"max_difference", difference}});
  else
    std::printf("same loss on 1 rank: max difference %.1e\n", difference);
  if (difference > 1e-4)
    fail(Kind::Internal, "the loss on ", num_ranks, " ranks is not the loss on 1 rank");
}

}  // namespace

std::vector<double> train_demo(const DemoRun& run) {
  std::vector<double> losses;
  comm::RunOptions ranks = run.ranks;
  ranks.devices = run.devices;
  comm::run_ranks(
      int(run.devices.size()), [&](comm::Communicator& comm) { train(comm, run, losses); }, ranks);
  return losses;
}

void add_demo(CLI::App& app) {
  auto* verb =
      app.add_subcommand("demo", "Train a small network on several ranks, and compare with one");
  auto options = std::make_shared<Options>();
  verb->add_option("--devices", options->devices,
                   "cpu:2, cuda:0-1, cuda:0x4 (four ranks on one GPU), auto")
      ->capture_default_str();
  verb->add_option("--steps", options->steps, "Optimizer steps, at least 10")
      ->capture_default_str();
  verb->add_option("--mesh", options->mesh, "Must name the ranks along dp, as dp=2");
  verb->add_option("--timeout", options->timeout_s,
                   "Seconds after which a missing rank ends the run")
      ->capture_default_str();
  verb->add_option("--trace", options->trace,
                   "Write a timeline to this file; ui.perfetto.dev opens it");
  verb->add_option("--metrics", options->metrics,
                   "Serve Prometheus metrics at HOST:PORT while training");
  verb->add_flag("--json", options->json, "One JSON object per line");
  verb->callback([options] { demo(*options); });
}

}  // namespace yoke::cli
