// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/metrics.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <sstream>
#include <string_view>

#include "yoke/base/error.h"
#include "yoke/observe/json_lines.h"

namespace yoke::observe {
namespace {

bool is_name(std::string_view name, bool colons) {
  auto good = [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           (colons && c == ':');
  };
  return !name.empty() && !(name[0] >= '0' && name[0] <= '9') && std::ranges::all_of(name, good);
}

std::string escape(std::string_view text, bool quotes) {
  std::string out;
  for (char c : text) {
    if (c == '\\' || (quotes && c == '"')) out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  const bool whole = std::trunc(value) == value && std::abs(value) < 0x1p53;
  return whole ? std::to_string(int64_t(value)) : json_number(value);
}

std::string label_text(const Labels& labels) {
  std::string text;
  for (const auto& [name, value] : labels)
    text += cat(text.empty() ? "" : ",", name, "=\"", escape(value, true), "\"");
  return text.empty() ? "" : "{" + text + "}";
}

constexpr const char* kTypeNames[] = {"counter", "gauge", "histogram"};  // as in Registry::Metric

struct SampleWriter {
  std::ostream& out;
  const std::string& name;
  const Labels& labels;

  void operator()(const Counter& counter) const { sample("", labels, counter.value()); }
  void operator()(const Gauge& gauge) const { sample("", labels, gauge.value()); }
  void operator()(const Histogram& histogram) const {
    uint64_t total = 0;
    const auto counts = histogram.counts();
    for (size_t i = 0; i < counts.size(); ++i) {
      total += counts[i];
      Labels with_bound = labels;
      with_bound.emplace_back(
          "le", i < histogram.bounds().size() ? number(histogram.bounds()[i]) : "+Inf");
      sample("_bucket", with_bound, double(total));
    }
    sample("_sum", labels, histogram.sum());
    sample("_count", labels, double(total));
  }
  void sample(const char* suffix, const Labels& all, double value) const {
    out << name << suffix << label_text(all) << ' ' << number(value) << '\n';
  }
};

}  // namespace

void Counter::add(double amount) {
  YOKE_CHECK(amount >= 0, "a counter only grows, got ", amount);
  value_.fetch_add(amount, std::memory_order_relaxed);
}

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {
  for (size_t i = 0; i < bounds_.size(); ++i)
    YOKE_CHECK(std::isfinite(bounds_[i]) && (i == 0 || bounds_[i] > bounds_[i - 1]), "bound ", i);
}

void Histogram::observe(double value) {
  // The first bucket whose bound holds the value. No bound holds a NaN: it lands in the last one.
  const auto at = std::ranges::partition_point(bounds_, [&](double b) { return !(value <= b); });
  counts_[size_t(at - bounds_.begin())].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

std::vector<uint64_t> Histogram::counts() const {
  std::vector<uint64_t> counts;
  for (const auto& count : counts_) counts.push_back(count.load(std::memory_order_relaxed));
  return counts;
}

std::vector<double> exponential_bounds(double first, double factor, int count) {
  std::vector<double> bounds;
  for (double bound = first; int(bounds.size()) < count; bound *= factor) bounds.push_back(bound);
  return bounds;
}

template <typename T, typename... Arguments>
T& Registry::find_or_make(const std::string& name, const std::string& help, Labels labels,
                          const Arguments&... arguments) {
  YOKE_CHECK(is_name(name, true), "'", name, "' cannot be the name of a metric");
  std::ranges::sort(labels);
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto& label = labels[i].first;
    YOKE_CHECK(is_name(label, false) && label != "le" && !label.starts_with("__"), "'", label,
               "' cannot be the name of a label");
    YOKE_CHECK(i == 0 || label != labels[i - 1].first, "label ", label, " is given twice");
  }
  MutexLock lock(mutex_);
  Family& family = families_.try_emplace(name, Family{.help = help, .metrics = {}}).first->second;
  if (!family.metrics.empty())
    YOKE_CHECK(std::holds_alternative<T>(family.metrics.begin()->second), name, " is a ",
               kTypeNames[family.metrics.begin()->second.index()]);
  return std::get<T>(
      family.metrics.try_emplace(std::move(labels), std::in_place_type<T>, arguments...)
          .first->second);
}

Counter& Registry::counter(const std::string& name, const std::string& help, Labels labels) {
  return find_or_make<Counter>(name, help, std::move(labels));
}

Gauge& Registry::gauge(const std::string& name, const std::string& help, Labels labels) {
  return find_or_make<Gauge>(name, help, std::move(labels));
}

Histogram& Registry::histogram(const std::string& name, const std::string& help,
                               std::vector<double> bounds, Labels labels) {
  auto& histogram = find_or_make<Histogram>(name, help, std::move(labels), bounds);
  YOKE_CHECK(histogram.bounds() == bounds, name, " has other bounds");
  return histogram;
}

void Registry::remove(Labels labels) {
  std::ranges::sort(labels);
  MutexLock lock(mutex_);
  for (auto& [name, family] : families_) family.metrics.erase(labels);
}

void Registry::write_prometheus(std::ostream& out) const {
  std::ostringstream text;  // so that the lock is not held while a slow reader takes it
  {
    MutexLock lock(mutex_);
    for (const auto& [name, family] : families_) {
      if (family.metrics.empty()) continue;  // its only metric was refused
      text << "# HELP " << name << ' ' << escape(family.help, false) << '\n';
      text << "# TYPE " << name << ' ' << kTypeNames[family.metrics.begin()->second.index()]
           << '\n';
      for (const auto& [labels, metric] : family.metrics)
        std::visit(SampleWriter{text, name, labels}, metric);
    }
  }
  out << text.str();
}

}  // namespace yoke::observe
