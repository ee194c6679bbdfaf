// SPDX-License-Identifier: Apache-2.0
#include "yoke/data/utf8.h"

#include <cstdint>
#include <cstring>

namespace yoke::data {

int character_bytes(std::string_view text) {
  const auto byte = [&](int i) { return uint8_t(text[size_t(i)]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return -1;
  const int count = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  // Too long a form, a surrogate, and what is above U+10FFFF show in the second byte.
  int low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  int high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  for (int i = 1; i < count; ++i, low = 0x80, high = 0xbf)
    if (size_t(i) == text.size() || byte(i) < low || byte(i) > high) return -i;
  return count;
}

std::string_view valid_utf8(std::string_view text, std::string& storage) {
  bool is_valid = true;
  storage.clear();
  size_t kept = 0;  // up to there it is in the storage, once something is
  for (size_t i = 0; i < text.size();) {
    uint64_t eight = 0;
    if (i + 8 <= text.size()) {
      std::memcpy(&eight, text.data() + i, 8);
      if ((eight & 0x8080808080808080) == 0) {
        i += 8;
        continue;
      }
    }
    const int count = character_bytes(text.substr(i));
    if (count < 0) {
      is_valid = false;
      storage.append(text.substr(kept, i - kept)).append("\xef\xbf\xbd");
      kept = i + size_t(-count);
    }
    i += size_t(count < 0 ? -count : count);
  }
  if (is_valid) return text;
  return storage.append(text.substr(kept));
}

}  // namespace yoke::data
