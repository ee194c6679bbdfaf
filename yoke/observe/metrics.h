// SPDX-License-Identifier: Apache-2.0
// Counters, gauges and histograms, and the registry that writes them in the text format of
// Prometheus (version 0.0.4). Ask the registry once and keep the reference: updates are atomic
// operations, asking takes a lock. References live as long as the registry, or until remove().
// Threads: any.
//
//   Counter& steps = registry.counter("yoke_steps_total", "Optimizer steps done.");
//   steps.add();
#pragma once

#include <atomic>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "yoke/base/mutex.h"

namespace yoke::observe {

// Only grows.
class Counter {
 public:
  void add(double amount = 1);
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

class Gauge {
 public:
  void set(double value) { value_.store(value, std::memory_order_relaxed); }
  void add(double amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0};
};

class Histogram {
 public:
  // Upper bounds of the buckets, growing; a bucket without a bound follows them.
  explicit Histogram(std::vector<double> bounds);
  void observe(double value);

  const std::vector<double>& bounds() const { return bounds_; }
  std::vector<uint64_t> counts() const;  // of each bucket alone, one more than there are bounds
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  const std::vector<double> bounds_;
  std::vector<std::atomic<uint64_t>> counts_;
  std::atomic<double> sum_{0};
};

// first, first × factor, first × factor², …
std::vector<double> exponential_bounds(double first, double factor, int count);

using Labels = std::vector<std::pair<std::string, std::string>>;

class Registry {
 public:
  static constexpr const char* kContentType = "text/plain; version=0.0.4; charset=utf-8";

  // The same name and labels, in any order, give the same metric; the first help text stays. All
  // metrics of one name are of one type.
  Counter& counter(const std::string& name, const std::string& help, Labels labels = {});
  Gauge& gauge(const std::string& name, const std::string& help, Labels labels = {});
  Histogram& histogram(const std::string& name, const std::string& help, std::vector<double> bounds,
                       Labels labels = {});

  // All metrics with just these labels; nobody may have a reference to them.
  void remove(Labels labels);

  void write_prometheus(std::ostream& out) const;

 private:
  using Metric = std::variant<Counter, Gauge, Histogram>;
  struct Family {
    std::string help;
    std::map<Labels, Metric> metrics;
  };

  template <typename T, typename... Arguments>
  T& find_or_make(const std::string& name, const std::string& help, Labels labels,
                  const Arguments&... arguments);

  mutable Mutex mutex_;
  std::map<std::string, Family> families_ YOKE_GUARDED_BY(mutex_);
};

}  // namespace yoke::observe
