// SPDX-License-Identifier: Apache-2.0
// Numbers as people read and write them, and the nearest name to a mistyped one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/base/clock.h"

namespace yoke {

std::string bytes_text(uint64_t bytes);  // "64 B", "1.5 KiB", "64 MiB"
std::string duration_text(
    Duration duration);  // "850 ns", "1.5 ms", "42 s", "3 min 20 s", "2 h 5 min"

// "64", "1k", "4M", "1.5GiB": powers of 1024 with or without the i and the B. Nothing if malformed.
std::optional<uint64_t> parse_bytes(std::string_view text);
// "90", "90s", "1.5h", "250ms", "2min"; a bare number is seconds. Nothing if malformed or negative.
std::optional<Duration> parse_duration(std::string_view text);
// The whole text must be a decimal number that fits.
std::optional<int64_t> parse_int(std::string_view text);

std::vector<std::string> split(std::string_view text, char separator);
std::string join(const std::vector<std::string>& parts, std::string_view separator);

// The candidates that a typist may have meant by `name`, best first, at most three.
std::vector<std::string> nearest(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace yoke
