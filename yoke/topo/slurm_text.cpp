// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/slurm_text.h"

#include <algorithm>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::topo {
namespace {

constexpr int64_t kMaxNodes = 1'000'000;

[[noreturn]] void refuse(std::string_view what, std::string_view text, std::string_view wanted) {
  fail(Kind::Usage, what, " '", text, "' cannot be read: wanted ", wanted,
       "; set YOKE_RANK, YOKE_WORLD_SIZE and YOKE_ADDRESS to do without it");
}

[[noreturn]] void refuse_nodes(std::string_view text) {
  refuse("Slurm node list", text, "a form like n[1-2,7],login of at most a million nodes");
}

std::optional<int64_t> digits(std::string_view text) {
  const bool plain = std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  return plain ? parse_int(text) : std::nullopt;
}

// Splits at the commas that are outside brackets.
std::vector<std::string_view> top_level(std::string_view text) {
  std::vector<std::string_view> parts;
  size_t start = 0;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    depth += (text[i] == '[') - (text[i] == ']');
    if (text[i] != ',' || depth != 0) continue;
    parts.push_back(text.substr(start, i - start));
    start = i + 1;
  }
  parts.push_back(text.substr(start));
  return parts;
}

// "1-3" or "07" inside brackets; the width of the first number is kept, zeros in front.
void add_numbers(std::string_view range, std::string_view text, std::vector<std::string>& numbers) {
  const size_t dash = range.find('-');
  const auto first = digits(range.substr(0, dash));
  const auto last = dash == range.npos ? first : digits(range.substr(dash + 1));
  if (!first || !last || *last < *first || *last - *first >= kMaxNodes) refuse_nodes(text);
  const size_t width = range.substr(0, dash).size();
  for (int64_t number = *first; number <= *last; ++number) {
    const std::string plain = std::to_string(number);
    numbers.push_back(std::string(width > plain.size() ? width - plain.size() : 0, '0') + plain);
  }
}

// One entry, with any number of brackets: "r[1-2]n[1-3]" is six nodes.
std::vector<std::string> expand_entry(std::string_view entry, std::string_view text) {
  std::vector<std::string> names{""};
  while (!entry.empty()) {
    const size_t open = std::min(entry.find('['), entry.size());
    for (auto& name : names) name += entry.substr(0, open);
    if (open == entry.size()) break;
    const size_t close = entry.find(']', open);
    if (close == entry.npos) refuse_nodes(text);
    std::vector<std::string> numbers, longer;
    for (const auto& range : split(entry.substr(open + 1, close - open - 1), ','))
      add_numbers(range, text, numbers);
    if (int64_t(names.size() * numbers.size()) > kMaxNodes) refuse_nodes(text);
    for (const auto& name : names)
      for (const auto& number : numbers) longer.push_back(name + number);
    names = std::move(longer);
    entry.remove_prefix(close + 1);
  }
  return names;
}

}  // namespace

std::vector<std::string> expand_nodelist(std::string_view text) {
  std::vector<std::string> nodes;
  for (const auto entry : top_level(text)) {
    if (entry.empty() || std::ranges::count(entry, '[') != std::ranges::count(entry, ']'))
      refuse_nodes(text);
    for (auto& name : expand_entry(entry, text)) nodes.push_back(std::move(name));
  }
  return nodes;
}

std::vector<int> expand_tasks_per_node(std::string_view text) {
  std::vector<int> tasks;
  for (const auto& part : split(text, ',')) {
    const size_t open = part.find("(x");
    const auto count = digits(part.substr(0, open));
    const bool closed = open == part.npos || part.back() == ')';
    const auto nodes = open == part.npos ? std::optional<int64_t>(1)
                       : closed          ? digits(part.substr(open + 2, part.size() - open - 3))
                                         : std::nullopt;
    if (!count || !nodes || *count < 1 || *count > kMaxNodes || *nodes < 1 || *nodes > kMaxNodes)
      refuse("Slurm tasks per node", text, "a form like 1(x2),3");
    tasks.insert(tasks.end(), size_t(*nodes), int(*count));
  }
  return tasks;
}

}  // namespace yoke::topo
