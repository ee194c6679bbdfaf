// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve resnet`: the server around a model of ResNet-18's sizes, next to a bare loop.
// On a GPU small images, 48 KiB a request, also grow there before the first layer; and replicas
// share it.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/cli/batch_times.h"
#include "yoke/cli/bench_serve.h"
#include "yoke/cli/bench_server.h"

namespace yoke::cli {
namespace {

// A module of ResNet-18's sizes, with what its normalisations would be folded into the weights.
class ResnetMaker {
 public:
  // Images whose sides first become so many times longer.
  torch::jit::Module make(int64_t side, int64_t grows) {
    if (grows > 1)
      add(cat("x = torch.upsample_nearest2d(x, [", side * grows, ", ", side * grows, "])"));
    add("x = torch.relu(" + conv("x", 3, 64, 7, 2) + ")");
    add("x = torch.max_pool2d(x, [3, 3], [2, 2], [1, 1])");
    int64_t from = 64;
    for (const int64_t width : {64, 128, 256, 512})
      for (const int block : {0, 1}) {
        const int stride = block == 0 && width > 64 ? 2 : 1;
        add("y = torch.relu(" + conv("x", from, width, 3, stride) + ")");
        add("y = " + conv("y", width, width, 3, 1));
        if (from != width) add("x = " + conv("x", from, width, 1, stride));
        add("x = torch.relu(x + y)");
        from = width;
      }
    model_.register_parameter("w", at::randn({1000, 512}) * 0.05, false);
    add("return torch.linear(x.mean([2, 3]), self.w)");
    model_.define(source_);
    model_.eval();
    return model_;
  }

 private:
  void add(const std::string& line) { source_ += "  " + line + "\n"; }
  std::string conv(const std::string& x, int64_t from, int64_t to, int64_t size, int stride) {
    const double scale = std::sqrt(2.0 / double(from * size * size)) / 2;
    model_.register_parameter(cat("w", count_), at::randn({to, from, size, size}) * scale, false);
    model_.register_parameter(cat("b", count_), at::zeros({to}), false);
    const std::string number = cat(count_++);
    return cat("torch.conv2d(", x, ", self.w", number, ", self.b", number, ", [", stride, ", ",
               stride, "], [", size / 2, ", ", size / 2, "])");
  }
  torch::jit::Module model_{"resnet"};
  std::string source_ = "def forward(self, x):\n";
  int count_ = 0;
};

double own_cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

struct Bare {
  double images_per_second = 0, cpu_s = 0;  // of an image
};

// There and back by every turn, where that is another device.
Bare run_bare(torch::jit::Module& model, const at::Tensor& images, at::Device device,
              double seconds) {
  const c10::InferenceMode inference;
  const auto turn = [&] {
    model.forward({images.to(device, /*non_blocking=*/true)}).toTensor().to(at::kCPU);
  };
  for (int i = 0; i < 3; ++i) turn();
  const SteadyClock clock;
  const Time begin = clock.now();
  const double cpu = own_cpu_seconds();
  int64_t count = 0;
  double spent = 0;
  for (; spent < seconds; count += images.size(0)) {
    turn();
    spent = std::chrono::duration<double>(clock.now() - begin).count();
  }
  return {double(count) / spent, (own_cpu_seconds() - cpu) / double(count)};
}

struct Setting {
  at::Device device;
  int64_t side, grows, batch;
  int connections, threads;
  double tolerance;  // batches of other sizes are rounded differently
};
const Setting kOnCpu{at::kCPU, 224, 1, 4, 4, 1, 1e-3};
Setting on_gpu(int index, int64_t grows) {  // where products are of TF32
  return {at::Device(at::kCUDA, c10::DeviceIndex(index)), 64, grows, 8, 48, 4, 2e-2};
}

struct Layout {
  std::string name = {}, workers = "processes";
  int replicas = 1;
  bool records = true;
};

struct Turn {
  double ratio = 0, per_second = 0, bare = 0, p50_ms = 0, p99_ms = 0, cpu_s = 0, bare_cpu_s = 0;
};

class ResnetBench {
 public:
  ResnetBench(BenchTable& bench, const Setting& setting) : bench_(bench), setting_(setting) {
    at::manual_seed(1);
    ResnetMaker().make(setting.side, setting.grows).save(file_);
    model_ = torch::jit::load(file_, setting.device);
    model_.eval();
    const c10::InferenceMode inference;
    images_ = at::randn({setting.batch, 3, setting.side, setting.side});
    if (on_gpu()) images_ = images_.pin_memory();
    answers_ = model_.forward({images_.to(setting.device)}).toTensor().to(at::kCPU).contiguous();
  }

  void run(const Layout& layout) {
    const std::string trace = (scratch_.path() / "trace.json").string();
    YokeServer yoke(
        cat("\n[[model]]\nname = \"resnet\"\npath = \"", file_, "\"\ndevices = \"",
            setting_.device.str(), on_gpu() ? cat("x", layout.replicas) : "", "\"\nbatch = ",
            setting_.batch, "\ninput = [\"x:FP32[-1,3,", setting_.side, ",", setting_.side,
            "]\"]\noutput = [\"y:FP32[-1,1000]\"]\nrecord = ", layout.records ? "true" : "false",
            "\n"),
        cat("workers = \"", layout.workers, "\"\n", on_gpu() ? "trace = \"" + trace + "\"\n" : ""));
    const auto user = make_user();
    const auto load = [&](Duration length) {
      const serve::LoadOptions options{
          .to = yoke->http(), .warm_up = {}, .length = length, .threads = setting_.threads};
      return serve::run_load(options, {user})[0];
    };
    load(std::chrono::seconds(1));
    // In turns, so that what disturbs the machine disturbs both.
    constexpr int kRounds = 3;
    std::vector<Turn> turns;
    double batch = 1;
    int64_t rows = 1;
    for (int i = 0; i < kRounds; ++i) {
      const double before = yoke->cpu_seconds();
      const auto report = load(bench_.length() / kRounds);
      const double cpu = yoke->cpu_seconds() - before;
      bench_.wrong += report.wrong;
      if (report.failed() > 0 || report.requests == 0)
        fail(Kind::Internal, "in place of answers came: ", serve::others_text(report));
      const auto stats =
          nlohmann::json::parse(yoke.get("/v2/models/resnet/stats"))["model_stats"][0];
      batch =
          stats.value("inference_count", 1.0) / std::max(1.0, stats.value("execution_count", 1.0));
      rows = std::clamp<int64_t>(std::llround(batch), 1, setting_.batch);
      yoke->pause();
      const Bare bare =
          run_bare(model_, images_.narrow(0, 0, rows), setting_.device, bench_.seconds / kRounds);
      yoke->resume();
      turns.push_back({report.per_second() / bare.images_per_second, report.per_second(),
                       bare.images_per_second, report.percentile_ms(0.5),
                       report.percentile_ms(0.99), cpu / double(report.requests), bare.cpu_s});
    }
    std::ranges::sort(turns, {}, &Turn::ratio);
    const Turn& middle = turns[kRounds / 2];
    bench_.report({.bench = "resnet",
                   .what = cat(on_gpu() ? layout.name + ", " : "",
                               "throughput of a bare loop's, batch ", rows),
                   .got = middle.ratio,
                   .least = 0.95,
                   .more = {{"lowest", turns.front().ratio},
                            {"highest", turns.back().ratio},
                            {"images_per_s", middle.per_second},
                            {"bare_images_per_s", middle.bare},
                            {"mean_batch", batch},
                            {"p50_ms", middle.p50_ms},
                            {"p99_ms", middle.p99_ms}}});
    if (on_gpu()) return report_trace(yoke, trace, layout.name);
    bench_.report(
        {.bench = "resnet",
         .what = "CPU outside the model, of all",
         .unit = "%",
         .got = 100 * (1 - middle.bare_cpu_s / middle.cpu_s),  // below 0: by chance
         .most = 5,
         .more = {{"cpu_ms", middle.cpu_s * 1e3}, {"bare_cpu_ms", middle.bare_cpu_s * 1e3}}});
  }

 private:
  bool on_gpu() const { return setting_.device.is_cuda(); }

  serve::LoadUser make_user() const {
    const int64_t values = 3 * setting_.side * setting_.side;
    serve::LoadUser user{.connections = setting_.connections};
    user.make = [this, values](uint64_t number, serve::LoadRequest& request) {
      serve::Question question{.model = "resnet", .shape = {1, 3, setting_.side, setting_.side}};
      const float* from = images_.data_ptr<float>() + int64_t(number % batch()) * values;
      question.values.assign(from, from + values);
      serve::write_question(question, serve::Wire::Binary, request);
    };
    user.check = [this](uint64_t number, const serve::LoadAnswer& answer) {
      std::vector<float> got(1000);
      if (answer.status != 200 || !serve::read_values(answer.body, serve::Wire::Binary, got))
        return false;
      const float* wanted = answers_.data_ptr<float>() + int64_t(number % batch()) * 1000;
      for (size_t i = 0; i < got.size(); ++i)
        if (std::abs(got[i] - wanted[i]) > setting_.tolerance * (1 + std::abs(wanted[i])))
          return false;
      return true;
    };
    return user;
  }
  uint64_t batch() const { return uint64_t(setting_.batch); }

  // Written when the server ends.
  void report_trace(YokeServer& yoke, const std::string& file, const std::string& who) {
    yoke->signal(SIGTERM);
    if (const auto code = yoke->wait(std::chrono::seconds(30)); code != 0)
      fail(Kind::Internal, "the server ended with ", code.value_or(-1), ": ", yoke->last_words());
    std::ifstream in(file);
    const auto times = read_batch_times({std::istreambuf_iterator<char>(in), {}});
    bench_.report({.bench = "resnet",
                   .what = who + ", idle between batches",
                   .unit = "us",
                   .got = times.idle_us,
                   .most = 30,
                   .more = {{"batches", double(times.batches)},
                            {"model_us", times.model_us},
                            {"inputs_us", times.inputs_us},
                            {"outputs_us", times.outputs_us}}});
    bench_.report({.bench = "resnet",
                   .what = who + ", copies beside another's kernels",
                   .unit = "%",
                   .got = 100 * times.beside,
                   .more = {{"copy_in_us", times.copy_in_us}, {"copy_out_us", times.copy_out_us}}});
  }

  BenchTable& bench_;
  const Setting setting_;
  const Scratch scratch_ = {};
  const std::string file_ = (scratch_.path() / "resnet.pt").string();
  torch::jit::Module model_ = {};
  at::Tensor images_ = {}, answers_ = {};
};

}  // namespace

void bench_resnet(BenchTable& bench) {
  const bool gpu = bench.device.kind == topo::DeviceKind::Cuda;
  if (!gpu) return ResnetBench(bench, kOnCpu).run({});
  ResnetBench small(bench, on_gpu(bench.device.index, 1));
  small.run({.name = "64 px, 1 process"});
  small.run({.name = "64 px, 1 process, not recorded", .records = false});
  ResnetBench large(bench, on_gpu(bench.device.index, 7));
  large.run({.name = "448 px, 1 process"});
  large.run({.name = "448 px, 2 processes", .replicas = 2});
  large.run({.name = "448 px, 2 threads", .workers = "threads", .replicas = 2});
}

}  // namespace yoke::cli
