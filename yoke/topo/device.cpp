// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/device.h"

#include <algorithm>
#include <utility>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/topo/host.h"

namespace yoke::topo {
namespace {

constexpr auto kForms = "write cpu:4, cuda:0-3, cuda:0,2, cuda:0x4 or auto";

// Reads one device text; the members are what its errors quote.
struct Parser {
  std::string_view text;
  const Host* host;
  std::vector<Device> devices = {};

  template <typename... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(Kind::Usage, "devices '", text, "': ", parts...);
  }

  int number(std::string_view digits, std::string_view what) const {
    const auto value = parse_int(digits);
    if (!value || *value < 0 || *value > 1'000'000'000 || digits.front() == '-')
      refuse("got '", digits, "' for ", what, ", wanted a whole number; ", kForms);
    return int(*value);
  }

  int count(std::string_view digits) const {
    const int value = number(digits, "the number of ranks");
    if (value == 0) refuse("got 0 ranks, wanted at least 1; ", kForms);
    return value;
  }

  void add(Device device, int ranks) {
    const auto total = int64_t(devices.size()) + ranks;
    if (total > kMaxRanksPerHost)
      refuse("got ", total, " ranks, wanted at most ", kMaxRanksPerHost,
             " on one host; name fewer");
    devices.insert(devices.end(), size_t(ranks), device);
  }

  void add_gpus(int first, int last, int ranks) {
    if (host && last >= int(host->gpus.size())) {
      if (host->gpus.empty())
        refuse("this host has no usable GPU (", host->no_gpus,
               "); use cpu:N, or see 'yoke doctor'");
      refuse("got GPU ", last, ", but this host has ", host->gpus.size(), ": wanted 0 to ",
             host->gpus.size() - 1);
    }
    for (int index = first; index <= last; ++index) add({DeviceKind::Cuda, index}, ranks);
  }

  void add_every_gpu() {
    if (!host) refuse("the host's GPUs are not known here; write them out, as in cuda:0-3");
    add_gpus(0, std::max(0, int(host->gpus.size()) - 1), 1);
  }

  // "1", "0-3" or "0x4"
  void add_item(std::string_view item) {
    const size_t dash = item.find('-'), times = item.find('x');
    if (dash != item.npos && times != item.npos)
      refuse("got both a range and a count in '", item, "'; write 0x2,1x2 for two ranks on each");
    if (dash != item.npos) {
      const int first = number(item.substr(0, dash), "the first GPU");
      const int last = number(item.substr(dash + 1), "the last GPU");
      if (first > last) refuse("the range runs backwards; write ", last, "-", first);
      if (last - first >= kMaxRanksPerHost)
        refuse("got ", int64_t(last) - first + 1, " GPUs, wanted at most ", kMaxRanksPerHost);
      add_gpus(first, last, 1);
    } else {
      const int gpu = number(item.substr(0, times), "a GPU");
      add_gpus(gpu, gpu, times == item.npos ? 1 : count(item.substr(times + 1)));
    }
  }

  std::vector<Device> parse() {
    const size_t colon = text.find(':');
    const std::string_view word = text.substr(0, colon);
    const bool bare = colon == text.npos;
    const std::string_view rest = bare ? "" : text.substr(colon + 1);
    if (word == "cpu") {
      add({DeviceKind::Cpu, 0}, bare ? 1 : count(rest));
    } else if (word == "cuda" && bare) {
      add_every_gpu();
    } else if (word == "cuda") {
      for (const auto& item : split(rest, ',')) add_item(item);
    } else if (text == "auto") {
      if (host && host->gpus.empty())
        add({DeviceKind::Cpu, 0}, 1);
      else
        add_every_gpu();
    } else {
      // Whoever writes gpu means cuda, though cpu is spelled nearer.
      const auto near =
          word == "gpu" ? std::vector<std::string>{"cuda"} : nearest(word, {"auto", "cpu", "cuda"});
      refuse("unknown device '", word, "'",
             near.empty() ? "" : cat(" (did you mean ", join(near, " or "), "?)"), "; ", kForms);
    }
    return std::move(devices);
  }
};

// "0-3", "0x4", "0,2" for a run of GPUs
std::string gpu_items(std::span<const Device> gpus) {
  std::vector<std::string> items;
  for (size_t i = 0; i < gpus.size();) {
    size_t same = i + 1, next = i + 1;
    while (same < gpus.size() && gpus[same].index == gpus[i].index) ++same;
    while (next < gpus.size() && gpus[next].index == gpus[next - 1].index + 1) ++next;
    // The last of a range that is then repeated belongs to the repetition: 0,1,1 is 0,1x2.
    if (next < gpus.size() && next - i > 1 && gpus[next].index == gpus[next - 1].index) --next;
    if (same - i > 1) {
      items.push_back(cat(gpus[i].index, "x", same - i));
      i = same;
    } else {
      items.push_back(next - i > 1 ? cat(gpus[i].index, "-", gpus[next - 1].index)
                                   : cat(gpus[i].index));
      i = next;
    }
  }
  return join(items, ",");
}

}  // namespace

std::vector<Device> parse_devices(std::string_view text, const Host* host) {
  return Parser{.text = text, .host = host}.parse();
}

std::string to_text(const Device& device) {
  return device.kind == DeviceKind::Cpu ? "cpu" : cat("cuda:", device.index);
}

std::string to_text(std::span<const Device> devices) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < devices.size();) {
    size_t end = i;
    while (end < devices.size() && devices[end].kind == devices[i].kind) ++end;
    const auto run = devices.subspan(i, end - i);
    parts.push_back(run[0].kind == DeviceKind::Cpu ? cat("cpu:", run.size())
                                                   : "cuda:" + gpu_items(run));
    i = end;
  }
  return parts.empty() ? "none" : join(parts, " + ");
}

}  // namespace yoke::topo
