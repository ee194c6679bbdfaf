// SPDX-License-Identifier: Apache-2.0
// Values as bytes, for what ranks of different processes tell each other. Both ends are the same
// program on the same kind of machine, so numbers go as they lie in memory. A Reader that runs out
// of bytes throws Kind::Comm.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "yoke/base/error.h"

namespace yoke::comm {

class Writer {
 public:
  template <typename T>
  requires std::is_trivially_copyable_v<T> &&(!std::is_pointer_v<T>)Writer& put(const T& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& put(std::string_view text) {
    put(uint32_t(text.size()));
    bytes_.append(text);
    return *this;
  }
  Writer& put(const std::string& text) { return put(std::string_view(text)); }
  Writer& raw(std::string_view bytes) {
    bytes_.append(bytes);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <typename T>
  T get() {
    if constexpr (std::is_same_v<T, std::string>) {
      return std::string(take(get<uint32_t>()));
    } else {
      T value;
      std::memcpy(&value, take(sizeof value).data(), sizeof value);
      return value;
    }
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view take(size_t count) {
    if (count > rest_.size()) fail(Kind::Comm, "a message of another process is cut short");
    const auto head = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return head;
  }
  std::string_view rest_;
};

}  // namespace yoke::comm
