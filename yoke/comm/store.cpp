// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/store.h"

#include <map>

#include "yoke/base/error.h"
#include "yoke/base/mutex.h"
#include "yoke/base/text.h"

namespace yoke::comm {
namespace {

class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    {
      MutexLock lock(mutex_);
      values_[key] = value;
    }
    changed_.notify_all();
  }

  std::string get(const std::string& key, Duration timeout) override {
    MutexLock lock(mutex_);
    if (!changed_.wait_for(mutex_, timeout,
                           [&]() YOKE_REQUIRES(mutex_) { return values_.contains(key); }))
      fail(Kind::Timeout, "nobody set '", key, "' in the store within ", duration_text(timeout));
    return values_[key];
  }

  int64_t add(const std::string& key, int64_t by) override {
    int64_t sum = by;
    {
      MutexLock lock(mutex_);
      std::string& value = values_[key];
      const auto old = value.empty() ? std::optional<int64_t>(0) : parse_int(value);
      if (!old)
        fail(Kind::Usage, "cannot add to '", key, "' in the store: '", value, "' is not a number");
      sum += *old;
      value = std::to_string(sum);
    }
    changed_.notify_all();
    return sum;
  }

  bool has(const std::string& key) override {
    MutexLock lock(mutex_);
    return values_.contains(key);
  }

 private:
  Mutex mutex_;
  Condition changed_;
  std::map<std::string, std::string> values_ YOKE_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Store> make_memory_store() { return std::make_shared<MemoryStore>(); }

}  // namespace yoke::comm
