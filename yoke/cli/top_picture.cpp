// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/top_picture.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "yoke/base/error.h"

namespace yoke::cli {
namespace {

using Json = nlohmann::ordered_json;

// One thing in two views.
struct Change {
  const Json& before;
  const Json& now;
  double seconds;

  double grown(const char* key) const {
    const double was = before.value(key, 0.0), is = now.at(key).get<double>();
    return is >= was ? is - was : is;
  }
  double rate(const char* key) const { return seconds > 0 ? grown(key) / seconds : 0; }
  double rows_per_batch() const {
    return grown("batches") > 0 ? grown("rows") / grown("batches") : 0;
  }
};

Json rates_of_replica(const Change& change) {
  Json one = change.now;
  one["rows_per_s"] = change.rate("rows");
  one["batches_per_s"] = change.rate("batches");
  one["rows_per_batch"] = change.rows_per_batch();
  one["busy"] = change.rate("busy_s");
  for (const char* key : {"rows", "batches", "busy_s"}) one.erase(key);
  return one;
}

Json rates_of_model(const Change& change) {
  Json one = change.now;
  one["requests_per_s"] = change.rate("requests");
  one["failed_per_s"] = change.rate("failed");
  one["rows_per_batch"] = change.rows_per_batch();
  for (const char* key : {"rows", "batches", "requests", "failed"}) one.erase(key);
  return one;
}

Json rates_of_tenant(const Change& change, double devices) {
  Json one = change.now;
  one["share"] = change.rate("device_s") / std::max(devices, 1.0);
  one["borrowed"] = change.rate("borrowed_s") / std::max(devices, 1.0);
  one["refused_per_s"] = change.rate("refused");
  for (const char* key : {"device_s", "borrowed_s", "refused"}) one.erase(key);
  return one;
}

constexpr const char *kGreen = "32", *kYellow = "33", *kRed = "31", *kBold = "1", *kNone = "";

struct Piece {
  std::string text = {};
  const char* colour = kNone;
};
using Cell = std::vector<Piece>;

bool begins_letter(char c) { return (c & 0xc0) != 0x80; }  // in UTF-8
size_t width(const std::string& text) { return size_t(std::ranges::count_if(text, begins_letter)); }
size_t width(const Cell& cell) {
  size_t sum = 0;
  for (const auto& piece : cell) sum += width(piece.text);
  return sum;
}

// A control character of a name must not reach the terminal.
std::string first_letters(const std::string& text, size_t most) {
  std::string result;
  for (const char c : text) {
    if (begins_letter(c) && most-- == 0) break;
    result += (c >= 0 && c < ' ') || c == 0x7f ? '?' : c;
  }
  return result;
}

// At most as wide as the screen.
std::string line_of(const Cell& pieces, const TopScreen& screen) {
  std::string line;
  size_t left = screen.columns;
  for (const auto& piece : pieces) {
    const std::string text = first_letters(piece.text, left);
    left -= width(text);
    const bool coloured = screen.colour && *piece.colour != '\0' && !text.empty();
    line += coloured ? cat("\x1b[", piece.colour, "m", text, "\x1b[0m") : text;
  }
  line.resize(line.find_last_not_of(' ') + 1);
  return line;
}

struct Column {
  const char* name;
  bool is_text = false;
  int spare = 0;  // left out on a narrow screen, 1 before 2; 0: never
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<Cell> row) { rows_.push_back(std::move(row)); }
  size_t num_rows() const { return rows_.size(); }

  std::vector<std::string> lines(size_t room, const TopScreen& screen) const {
    const auto widths = fit(screen.columns);
    std::vector<Cell> names;
    for (const auto& column : columns_) names.push_back({{column.name, kBold}});
    std::vector<std::string> result{line_of(spread(names, widths), screen)};
    const size_t shown = rows_.size() <= room ? rows_.size() : std::max<size_t>(room, 1) - 1;
    for (size_t i = 0; i < shown; ++i) result.push_back(line_of(spread(rows_[i], widths), screen));
    if (shown < rows_.size() && room > 0)
      result.push_back(line_of({{cat("… ", rows_.size() - shown, " more")}}, screen));
    return result;
  }

 private:
  // Of each column; 0 where it is empty or there is no room for it.
  std::vector<size_t> fit(size_t room) const {
    std::vector<size_t> widths;
    for (size_t i = 0; i < columns_.size(); ++i) {
      size_t widest = 0;
      for (const auto& row : rows_) widest = std::max(widest, width(row[i]));
      widths.push_back(widest > 0 || rows_.empty() ? std::max(widest, width(columns_[i].name)) : 0);
    }
    for (int spare = 1; spare <= 4; ++spare) {
      size_t sum = 0;
      for (const size_t one : widths) sum += one > 0 ? one + kGap : 0;
      for (size_t i = 0; i < widths.size() && sum - kGap > room; ++i)
        if (columns_[i].spare == spare) widths[i] = 0;
    }
    return widths;
  }

  Cell spread(const std::vector<Cell>& row, const std::vector<size_t>& widths) const {
    Cell line;
    for (size_t i = 0; i < row.size(); ++i) {
      if (widths[i] == 0) continue;
      if (!line.empty()) line.push_back({std::string(kGap, ' ')});
      const Piece blanks{std::string(widths[i] - width(row[i]), ' ')};
      if (!columns_[i].is_text) line.push_back(blanks);
      line.insert(line.end(), row[i].begin(), row[i].end());
      if (columns_[i].is_text) line.push_back(blanks);
    }
    return line;
  }

  static constexpr size_t kGap = 2;
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

Cell words(const Json& value, const char* colour = kNone) {
  return {{value.is_string() ? value.get<std::string>() : value.dump(), colour}};
}

Cell number(const Json& value, const char* colour = kNone) {
  const double number = value;
  char text[32];
  std::snprintf(text, sizeof text, number == 0 || number >= 100 ? "%.0f" : "%.1f", number);
  return {{text, number > 0 ? colour : kNone}};
}

Cell percent(const Json& part) { return {{cat(std::lround(100 * part.get<double>()), " %")}}; }

Cell state_cell(const Json& state) {
  const bool good = state == "ready" || state == "READY";
  const bool bad = state == "dead" || state == "UNAVAILABLE";
  return words(state, good ? kGreen : bad ? kRed : kYellow);
}

std::string cells_of(double from, double to, size_t length, char letter) {
  const auto at = [&](double part) {
    return std::lround(std::clamp(part, 0.0, 1.0) * double(length));
  };
  return std::string(size_t(std::max(at(to) - at(from), 0l)), letter);
}

Cell busy_bar(double busy) {
  const std::string done = cells_of(0, busy, 10, '#');
  return {{"["}, {done, kGreen}, {std::string(10 - done.size(), ' ')}, {"]"}};
}

Cell share_bar(const Json& tenant) {
  constexpr size_t kLength = 20;
  const double share = tenant.at("share"), borrowed = tenant.at("borrowed");
  const double guaranteed = tenant.at("guaranteed"), ceiling = tenant.at("ceiling");
  const std::string own = cells_of(0, share - borrowed, kLength, '#');
  const std::string lent = cells_of(share - borrowed, share, kLength, '+');
  std::string rest = cells_of(share, guaranteed, kLength, '.');
  rest.resize(kLength - own.size() - lent.size(), ' ');
  const auto mark = size_t(std::lround(ceiling * kLength)), used = own.size() + lent.size();
  if (mark >= used && mark < kLength) rest[mark - used] = '|';
  return {{"["}, {own, kGreen}, {lent, kYellow}, {rest}, {"]"}};
}

Table replica_table(const Json& replicas) {
  Table table({{"replica"},
               {"model", true},
               {"device", true},
               {"state", true},
               {"restarts"},
               {"rows/s"},
               {"batches/s", false, 2},
               {"rows/batch"},
               {"busy"},
               {"", true, 1},
               {"computing"},
               {"staged", false, 3}});
  for (const auto& one : replicas)
    table.add({words(one.at("replica")), words(one.at("model")), words(one.at("device")),
               state_cell(one.at("state")),
               words(one.at("restarts"), one.at("restarts") == 0 ? kNone : kYellow),
               number(one.at("rows_per_s")), number(one.at("batches_per_s")),
               number(one.at("rows_per_batch")), percent(one.at("busy")), busy_bar(one.at("busy")),
               words(one.at("computing")), words(one.at("staged"))});
  return table;
}

Table model_table(const Json& models) {
  Table table({{"model", true},
               {"version"},
               {"state", true},
               {"waiting"},
               {"requests/s"},
               {"failed/s"},
               {"rows/batch"},
               {"reason", true}});
  for (const auto& one : models)
    table.add({words(one.at("name")), words(one.at("version")), state_cell(one.at("state")),
               words(one.at("waiting")), number(one.at("requests_per_s")),
               number(one.at("failed_per_s"), kRed), number(one.at("rows_per_batch")),
               words(one.at("reason"))});
  return table;
}

// What the bar shows is left out before it.
Table tenant_table(const Json& tenants) {
  Table table({{"tenant", true},
               {"share"},
               {"", true, 4},
               {"guaranteed", false, 2},
               {"ceiling", false, 1},
               {"borrowed", false, 3},
               {"waiting"},
               {"refused/s"},
               {"p50 ms"},
               {"p99 ms"}});
  for (const auto& one : tenants)
    table.add({words(one.at("name")), percent(one.at("share")), share_bar(one),
               percent(one.at("guaranteed")), percent(one.at("ceiling")),
               percent(one.at("borrowed")), words(one.at("waiting")),
               number(one.at("refused_per_s"), kYellow), number(one.at("p50_ms")),
               number(one.at("p99_ms"))});
  return table;
}

// One row after the other to each table that has more, until there is no room.
std::vector<size_t> allot(const std::vector<Table>& tables, size_t room) {
  std::vector<size_t> rows(tables.size());
  for (bool more = true; more;) {
    more = false;
    for (size_t i = 0; i < tables.size(); ++i) {
      if (room == 0 || rows[i] == tables[i].num_rows()) continue;
      ++rows[i];
      --room;
      more = true;
    }
  }
  return rows;
}

}  // namespace

std::string rates_between(const std::string& before, const std::string& now) try {
  const Json first = Json::parse(before), last = Json::parse(now), none = Json::object();
  const double seconds = last.at("time_s").get<double>() - first.at("time_s").get<double>();
  const double devices = last.at("devices");
  // Of each thing in the list, beside the one before whose names are the same.
  const auto each = [&](const char* list, const std::vector<const char*>& names, auto rates_of) {
    Json result = Json::array();
    for (const auto& one : last.at(list)) {
      const Json* earlier = &none;
      for (const auto& other : first.at(list))
        if (std::ranges::all_of(names, [&](auto* name) { return one.at(name) == other.at(name); }))
          earlier = &other;
      result.push_back(rates_of(Change{*earlier, one, seconds}));
    }
    return result;
  };
  return Json{
      {"ready", last.at("ready")},
      {"draining", last.at("draining")},
      {"devices", last.at("devices")},
      {"time_s", last.at("time_s")},
      {"seconds", seconds},
      {"replicas", each("replicas", {"replica"}, rates_of_replica)},
      {"models", each("models", {"name", "version"}, rates_of_model)},
      {"tenants", each("tenants", {"name"},
                       [&](const Change& change) { return rates_of_tenant(change, devices); })}}
      .dump();
} catch (const nlohmann::json::exception& error) {
  fail(Kind::Io, "this is no view of a yoke serve: ", error.what(), "; check the URL");
}

std::vector<std::string> draw_top(const std::string& url, const std::string& rates,
                                  const TopScreen& screen) {
  const Json all = Json::parse(rates);
  const bool draining = all.at("draining"), ready = all.at("ready");
  const double seconds = all.at("seconds");
  Cell head{{url, kBold}, {"  "}};
  if (!screen.trouble.empty()) {
    head.push_back({"no answer, retrying: " + screen.trouble, kRed});
  } else {
    head.push_back({draining ? "draining"
                    : ready  ? "ready"
                             : "not ready",
                    ready && !draining ? kGreen : kYellow});
    head.push_back({cat(", devices: ", all.at("devices").dump())});
    if (seconds > 0) head.push_back({", in the last " + number(seconds)[0].text + " s"});
  }
  std::vector<std::string> lines{line_of(head, screen)};
  const std::vector<Table> tables{replica_table(all.at("replicas")), model_table(all.at("models")),
                                  tenant_table(all.at("tenants"))};
  const size_t others = 2 + 2 * tables.size();  // the first line, the last, and above each table
  const auto rows = allot(tables, screen.rows - std::min(others, screen.rows));
  for (size_t i = 0; i < tables.size(); ++i) {
    lines.emplace_back();
    const auto more = tables[i].lines(rows[i], screen);
    lines.insert(lines.end(), more.begin(), more.end());
  }
  lines.push_back(line_of({{"#", kGreen},
                           {" its own share  "},
                           {"+", kYellow},
                           {" borrowed  . guaranteed, not used  | ceiling"}},
                          screen));
  if (lines.size() > screen.rows) lines.resize(screen.rows);
  return lines;
}

}  // namespace yoke::cli
