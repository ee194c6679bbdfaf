// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/queue_run.h"

namespace yoke::flow {
namespace {

double busy(const Report::OfNode& node) { return node.compute_s + node.back_s + node.step_s; }

std::string line(const char* format, const auto&... values) {
  std::array<char, 256> text;
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

std::string padded(const std::string& text, size_t width) {
  return text.size() >= width ? text : text + std::string(width - text.size(), ' ');
}

}  // namespace

Report Run::report() const {
  Report report{
      .rounds = *std::ranges::min_element(done, {}, [](const auto& n) { return n.load(); }),
      .seconds = seconds};
  for (const auto& node : nodes) report.nodes.push_back(node.figures);
  for (const auto* states : {&edges, &gradients})
    for (const auto& edge : *states)
      if (edge.figures.values > 0) report.edges.push_back(edge.figures);
  // Who comes last to a trade waits for nobody, so the shortest time is that of the trade.
  const size_t queues = wakes.size();
  for (size_t i = 0; i < compiled.graph.exchanges().size(); ++i) {
    Report::OfEdge row{.name = compiled.graph.exchanges()[i].name};
    double longest = 0;
    for (size_t queue = 0; queue < queues; ++queue) {
      const auto& part = trades[i * queues + queue];
      if (part.values == 0) continue;
      row.move_s = row.values == 0 ? part.move_s : std::min(row.move_s, part.move_s);
      longest = std::max(longest, part.move_s);
      row.values = part.values;
      row.bytes += part.bytes;
    }
    row.wait_s = longest - row.move_s;
    if (row.values > 0) report.edges.push_back(row);
  }
  const auto& regions = compiled.graph.regions();
  for (size_t i = 0; i <= regions.size(); ++i) {
    Report::OfEdge row{.name = "phases"};
    if (i < regions.size())
      row.name = cat(regions[i].kind == Region::Kind::Loop ? "loop " : "branch ", regions[i].name);
    for (size_t queue = 0; queue < queues; ++queue) {
      const auto& part = meetings[i * queues + queue];
      row.values = std::max(row.values, part.values);
      row.wait_s = std::max(row.wait_s, part.wait_s);
    }
    if (row.values > 0) report.edges.push_back(row);
  }
  const auto& channels = compiled.program.channels;
  for (size_t i = 0; i < channels.size(); ++i)
    for (auto& edge : report.edges)
      if (pipes.loose[i] && channels[i].name == edge.name) edge.lost = pipes.loose[i]->lost();
  return report;
}

std::string Report::bottleneck() const {
  std::map<std::string, double> time;  // by queue
  for (const auto& node : nodes) time[node.queue] += busy(node);
  for (const auto& edge : edges)
    if (!edge.queue.empty()) time[edge.queue] += edge.move_s;
  if (time.empty() || seconds <= 0) return "nothing has run";
  const auto& [queue, sum] =
      *std::ranges::max_element(time, {}, [](const auto& t) { return t.second; });
  const OfNode* node = nullptr;
  for (const auto& each : nodes)
    if (each.queue == queue && (!node || busy(each) > busy(*node))) node = &each;
  const OfEdge* edge = nullptr;
  for (const auto& each : edges)
    if ((each.queue == queue || each.queue.empty()) && (!edge || each.move_s > edge->move_s))
      edge = &each;
  const auto percent = [&](double part) { return line("%.0f %%", 100 * part / seconds); };
  if (edge && edge->values > 0 && (!node || edge->move_s > busy(*node)))
    return cat("edge '", edge->name, "': ", percent(edge->move_s),
               " of the time its values are moved, ",
               bytes_text(edge->bytes / uint64_t(edge->values)), " each");
  return cat(
      node->loads ? "loader '" : "node '", node->name, "' on ", queue, ": it computes ",
      percent(busy(*node)), " of the time",
      busy(*node) < 0.9 * sum ? cat(", and all that is there ", percent(sum)) : "",
      sum < 0.5 * seconds ? ", less than half: the flow waits for hand-overs or is short" : "");
}

std::string Report::table() const {
  size_t width = 8;
  for (const auto& node : nodes) width = std::max(width, node.name.size());
  for (const auto& edge : edges) width = std::max(width, edge.name.size());
  std::string text = cat(padded("node", width), "  ", padded("queue", 8),
                         "  firings   compute ms   back ms   step ms   wait ms\n");
  for (const auto& node : nodes)
    text +=
        cat(padded(node.name, width), "  ", padded(node.queue, 8),
            line("  %7lld   %10.1f   %7.1f   %7.1f   %7.1f\n", static_cast<long long>(node.firings),
                 node.compute_s * 1e3, node.back_s * 1e3, node.step_s * 1e3, node.wait_s * 1e3));
  text += cat(padded("edge", width), "  ", padded("bytes", 8),
              "   values      move ms   wait ms   room ms      lost\n");
  for (const auto& edge : edges)
    text += cat(padded(edge.name, width), "  ", padded(bytes_text(edge.bytes), 8),
                line("  %7lld   %10.1f   %7.1f   %7.1f   %7llu\n",
                     static_cast<long long>(edge.values), edge.move_s * 1e3, edge.wait_s * 1e3,
                     edge.room_s * 1e3, static_cast<unsigned long long>(edge.lost)));
  return text + cat("bottleneck: ", bottleneck(), "\n");
}

std::string Report::json() const {
  nlohmann::ordered_json json{
      {"rounds", rounds}, {"seconds", seconds}, {"bottleneck", bottleneck()}};
  for (const auto& node : nodes)
    json["nodes"].push_back({{"name", node.name},
                             {"queue", node.queue},
                             {"firings", node.firings},
                             {"compute_s", node.compute_s},
                             {"back_s", node.back_s},
                             {"step_s", node.step_s},
                             {"wait_s", node.wait_s},
                             {"loads", node.loads}});
  for (const auto& edge : edges)
    json["edges"].push_back({{"name", edge.name},
                             {"queue", edge.queue},
                             {"values", edge.values},
                             {"bytes", edge.bytes},
                             {"lost", edge.lost},
                             {"wait_s", edge.wait_s},
                             {"room_s", edge.room_s},
                             {"move_s", edge.move_s}});
  return json.dump();
}

Report parse_report(const std::string& text) {
  try {
    const auto json = nlohmann::json::parse(text);
    Report report{.rounds = json.at("rounds"), .seconds = json.at("seconds")};
    for (const auto& node : json.value("nodes", nlohmann::json::array()))
      report.nodes.push_back({node.at("name"), node.at("queue"), node.at("firings"),
                              node.at("compute_s"), node.at("back_s"), node.at("step_s"),
                              node.at("wait_s"), node.at("loads")});
    for (const auto& edge : json.value("edges", nlohmann::json::array()))
      report.edges.push_back({edge.at("name"), edge.at("queue"), edge.at("values"),
                              edge.at("bytes"), edge.at("lost"), edge.at("wait_s"),
                              edge.at("room_s"), edge.at("move_s")});
    return report;
  } catch (const nlohmann::json::exception& error) {
    fail(Kind::Io, "this is no report of a flow: ", error.what());
  }
}

}  // namespace yoke::flow
