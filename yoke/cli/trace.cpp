// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/trace.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/checkpoint/files.h"
#include "yoke/flow/executor.h"
#include "yoke/observe/json_lines.h"

namespace yoke::cli {
namespace {

enum Kind : size_t { Compute, Comm, Wait, Data, Idle, kKinds };
constexpr std::array<char, kKinds> kLetters{'#', '=', '.', 'd', ' '};

struct Event {
  Kind kind;
  double begin, end;  // seconds
};

// Pieces of time of one kind each, in order, from events that nest.
std::vector<Event> flatten(std::vector<Event> events) {
  std::ranges::sort(events, [](const Event& a, const Event& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  std::vector<Event> pieces, open;
  double now = 0;
  const auto advance = [&](double to) {
    if (!open.empty() && to > now) pieces.push_back({open.back().kind, now, to});
    now = std::max(now, to);
  };
  const auto close_until = [&](double time) {
    while (!open.empty() && open.back().end <= time) {
      advance(open.back().end);
      open.pop_back();
    }
    advance(time);
  };
  for (const auto& event : events) {
    close_until(event.begin);
    now = std::max(now, event.begin);
    open.push_back(event);
  }
  close_until(std::numeric_limits<double>::max());
  return pieces;
}

struct Options {
  std::string path = {};
  bool json = false;
};

void show(const Options& options) {
  std::vector<std::string> texts;
  const std::filesystem::path path = options.path;
  if (std::filesystem::is_directory(path)) {
    for (int process = 0; std::filesystem::exists(path / trace_name(process)); ++process)
      texts.push_back(checkpoint::read_text(path / trace_name(process)));
    if (texts.empty())
      fail(yoke::Kind::Usage, "'", options.path, "' has no trace.json: train with ",
           "run.trace_steps=5,8 to have steps 5 to 8 traced, or yoke flow run FLOW --trace ",
           options.path);
  } else {
    texts.push_back(checkpoint::read_text(path));
  }
  constexpr int kColumns = 64;
  const auto ranks = analyse_trace(texts, kColumns);
  if (!options.json)
    std::printf("%-6s %10s %8s %8s %8s %8s %8s\n", "rank", "total", "compute", "comm", "bubble",
                "data", "idle");
  const RankTime* slowest = nullptr;
  for (const auto& rank : ranks) {
    const double total = rank.compute + rank.comm + rank.bubble + rank.data + rank.idle;
    if (slowest == nullptr || rank.compute > slowest->compute) slowest = &rank;
    if (options.json) {
      observe::JsonLines(std::cout).write({{"rank", rank.rank},
                                           {"seconds", total},
                                           {"compute", rank.compute},
                                           {"comm", rank.comm},
                                           {"bubble", rank.bubble},
                                           {"data", rank.data},
                                           {"idle", rank.idle}});
      continue;
    }
    const auto part = [&](double seconds) { return 100 * seconds / total; };
    std::printf("%-6d %7.1f ms %6.1f %% %6.1f %% %6.1f %% %6.1f %% %6.1f %%\n", rank.rank,
                total * 1e3, part(rank.compute), part(rank.comm), part(rank.bubble),
                part(rank.data), part(rank.idle));
  }
  const auto flow_figures = path / "flow.json";
  if (std::filesystem::exists(flow_figures)) {
    const auto report = flow::parse_report(checkpoint::read_text(flow_figures));
    std::cout << std::flush;
    std::cout << (options.json ? report.json() + "\n" : "\n" + report.table()) << std::flush;
  }
  if (options.json || slowest == nullptr) return;
  std::printf("\nrank %d computes longest, %.1f ms\n\n", slowest->rank, slowest->compute * 1e3);
  for (const auto& rank : ranks) std::printf("%4d |%s|\n", rank.rank, rank.picture.c_str());
  std::printf("     # computes   = communicates   . waits for a message   d reads data\n");
}

}  // namespace

std::string trace_name(int process) {
  return process == 0 ? "trace.json" : cat("trace-", process, ".json");
}

std::vector<RankTime> analyse_trace(const std::vector<std::string>& texts, int columns) {
  static const std::map<std::string, Kind> kinds{
      {"compute", Compute}, {"comm", Comm}, {"wait", Wait}, {"data", Data}};
  std::map<int, std::vector<Event>> events;
  double first = std::numeric_limits<double>::max(), last = 0;
  try {
    for (const auto& text : texts) {
      const auto trace = nlohmann::json::parse(text);
      for (const auto& event : trace.at("traceEvents")) {
        if (event.at("ph") != "X") continue;
        const double begin = event.at("ts").get<double>() * 1e-6;
        const double end = begin + event.at("dur").get<double>() * 1e-6;
        const int rank = event.at("pid").get<int>() - 2;  // as the tracer numbers them
        if (rank < 0) continue;
        events[rank].push_back({kinds.at(event.at("cat").get<std::string>()), begin, end});
        first = std::min(first, begin);
        last = std::max(last, end);
      }
    }
  } catch (const std::exception& error) {
    fail(yoke::Kind::Io, "this is no trace of ours: ", error.what());
  }
  std::vector<RankTime> result;
  for (auto& [rank, list] : events) {
    std::array<double, kKinds> sums{};
    std::vector<std::array<double, kKinds>> shares(static_cast<size_t>(columns));
    const double width = (last - first) / columns;
    double busy = 0;
    for (const auto& [kind, begin, end] : flatten(std::move(list))) {
      sums[kind] += end - begin;
      busy += end - begin;
      for (auto c = size_t((begin - first) / width); c < shares.size(); ++c) {
        const double from = first + double(c) * width;
        if (from >= end) break;
        shares[c][kind] += std::min(end, from + width) - std::max(begin, from);
      }
    }
    RankTime time{.rank = rank,
                  .compute = sums[Compute],
                  .comm = sums[Comm],
                  .bubble = sums[Wait],
                  .data = sums[Data],
                  .idle = last - first - busy};
    for (auto& share : shares) {
      share[Idle] = width - share[Compute] - share[Comm] - share[Wait] - share[Data];
      time.picture += kLetters[size_t(std::ranges::max_element(share) - share.begin())];
    }
    result.push_back(std::move(time));
  }
  return result;
}

void add_trace(CLI::App& app) {
  auto* verb = app.add_subcommand("trace", "Show where the time of a run's traced steps went");
  auto options = std::make_shared<Options>();
  verb->add_option(
          "RUN", options->path,
          "The folder of a run with run.trace_steps=FIRST,LAST or of yoke flow run --trace, or a "
          "trace.json")
      ->required();
  verb->add_flag("--json", options->json, "One JSON object for each rank");
  verb->footer("ui.perfetto.dev opens trace.json and shows every span.");
  verb->callback([options] { show(*options); });
}

}  // namespace yoke::cli
