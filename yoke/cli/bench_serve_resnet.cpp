// SPDX-License-Identifier: Apache-2.0
// `yoke bench serve resnet`: the server around a model of ResNet-18's sizes, next to a bare loop.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/cli/bench_serve.h"
#include "yoke/cli/bench_server.h"

namespace yoke::cli {
namespace {

// A module of ResNet-18's sizes, with what its normalisations would be folded into the weights.
class ResnetMaker {
 public:
  torch::jit::Module make() {
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

Bare run_bare(torch::jit::Module& model, const at::Tensor& images, double seconds) {
  const c10::InferenceMode inference;
  for (int i = 0; i < 3; ++i) model.forward({images});
  const SteadyClock clock;
  const Time begin = clock.now();
  const double cpu = own_cpu_seconds();
  int64_t count = 0;
  double spent = 0;
  for (; spent < seconds; count += images.size(0)) {
    model.forward({images});
    spent = std::chrono::duration<double>(clock.now() - begin).count();
  }
  return {double(count) / spent, (own_cpu_seconds() - cpu) / double(count)};
}

}  // namespace

void bench_resnet(BenchTable& bench) {
  constexpr int kImages = 8, kConnections = 4, kRounds = 3;
  constexpr int64_t kValues = 3 * 224 * 224;
  const Scratch scratch;
  at::manual_seed(1);
  const std::string file = (scratch.path() / "resnet.pt").string();
  ResnetMaker().make().save(file);
  auto model = torch::jit::load(file);
  model.eval();
  const at::Tensor images = at::randn({kImages, 3, 224, 224});
  const at::Tensor answers = [&] {
    const c10::InferenceMode inference;
    return model.forward({images}).toTensor().contiguous();
  }();

  serve::LoadUser user{.connections = kConnections};
  user.make = [&](uint64_t number, serve::LoadRequest& request) {
    serve::Question question{.model = "resnet", .shape = {1, 3, 224, 224}};
    const float* from = images.data_ptr<float>() + int64_t(number % kImages) * kValues;
    question.values.assign(from, from + kValues);
    serve::write_question(question, serve::Wire::Binary, request);
  };
  user.check = [&](uint64_t number, const serve::LoadAnswer& answer) {
    std::vector<float> values(1000);
    if (answer.status != 200 || !serve::read_values(answer.body, serve::Wire::Binary, values))
      return false;
    const float* wanted = answers.data_ptr<float>() + int64_t(number % kImages) * 1000;
    for (size_t i = 0; i < values.size(); ++i)  // batches of other sizes are rounded differently
      if (std::abs(values[i] - wanted[i]) > 1e-3 * (1 + std::abs(wanted[i]))) return false;
    return true;
  };
  YokeServer yoke(cat("\n[[model]]\nname = \"resnet\"\npath = \"", file,
                      "\"\ndevices = \"cpu\"\nbatch = 4\ninput = [\"x:FP32[-1,3,224,224]\"]\n"
                      "output = [\"y:FP32[-1,1000]\"]\n"));
  const auto run = [&](Duration length) {
    return serve::run_load({.to = yoke->http(), .warm_up = {}, .length = length}, {user})[0];
  };
  run(std::chrono::seconds(1));
  // In turns, so that what disturbs the machine disturbs both.
  struct Turn {
    double ratio = 0, per_second = 0, bare = 0, p50_ms = 0, p99_ms = 0, cpu_s = 0, bare_cpu_s = 0;
  };
  std::vector<Turn> turns;
  double batch = 1;
  int64_t rows = 1;
  for (int i = 0; i < kRounds; ++i) {
    const double before = yoke->cpu_seconds();
    const auto report = run(bench.length() / kRounds);
    const double cpu = yoke->cpu_seconds() - before;
    bench.wrong += report.wrong;
    if (report.failed() > 0 || report.requests == 0)
      fail(Kind::Internal, "in place of answers came: ", serve::others_text(report));
    const auto stats = nlohmann::json::parse(yoke.get("/v2/models/resnet/stats"))["model_stats"][0];
    batch =
        stats.value("inference_count", 1.0) / std::max(1.0, stats.value("execution_count", 1.0));
    rows = std::clamp<int64_t>(std::llround(batch), 1, kConnections);
    yoke->pause();
    const Bare bare = run_bare(model, images.narrow(0, 0, rows), bench.seconds / kRounds);
    yoke->resume();
    turns.push_back({report.per_second() / bare.images_per_second, report.per_second(),
                     bare.images_per_second, report.percentile_ms(0.5), report.percentile_ms(0.99),
                     cpu / double(report.requests), bare.cpu_s});
  }
  std::ranges::sort(turns, {}, &Turn::ratio);
  const Turn& middle = turns[kRounds / 2];
  bench.report({.bench = "resnet",
                .what = cat("throughput of a bare loop's, batch ", rows),
                .got = middle.ratio,
                .least = 0.95,
                .more = {{"lowest", turns.front().ratio},
                         {"highest", turns.back().ratio},
                         {"images_per_s", middle.per_second},
                         {"bare_images_per_s", middle.bare},
                         {"mean_batch", batch},
                         {"p50_ms", middle.p50_ms},
                         {"p99_ms", middle.p99_ms}}});
  bench.report(
      {.bench = "resnet",
       .what = "CPU outside the model, of all",
       .unit = "%",
       .got = 100 * (1 - middle.bare_cpu_s / middle.cpu_s),  // below 0: by chance
       .most = 5,
       .more = {{"cpu_ms", middle.cpu_s * 1e3}, {"bare_cpu_ms", middle.bare_cpu_s * 1e3}}});
}

}  // namespace yoke::cli
