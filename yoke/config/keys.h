// SPDX-License-Identifier: Apache-2.0
// The keys of a config: a table of fields, each tied to its place in a plain struct, from which
// TOML and overrides are read, errors made (file, line, key, got, wanted, nearest names) and help
// written. All errors are Kind::Config.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::config {

using List = std::vector<int64_t>;
using Words = std::vector<std::string>;
using Numbers = std::vector<double>;
using Slot = std::variant<int64_t*, double*, bool*, std::string*, List*, Words*, Numbers*>;
inline constexpr double kAny = -INFINITY;

// One key.
struct Field {
  Field(const char* section, const char* name, Slot slot, const char* about, double least = kAny)
      : section(section), name(name), slot(slot), about(about), least(least) {}
  Field(const char* section, const char* name, Slot slot, const char* about, std::string_view words)
      : section(section), name(name), slot(slot), about(about), words(split(words, ' ')) {}
  std::string key() const { return cat(section, ".", name); }

  std::string section, name;
  Slot slot;
  std::string about;
  double least = kAny;      // of a number, or of each in a list
  double most = INT32_MAX;  // likewise of integers: what is counted is small
  Words words = {};         // that a string may be; none: any
  std::string from = {};    // who said the value, as errors begin
};
using Fields = std::vector<Field>;

// Sections that may come several times: how many there are is told first.
struct Repeated {
  std::string section;
  std::function<void(size_t count)> resize;
  std::function<Fields(size_t index)> fields;
};

// `where` is the text's name in errors.
void read_toml(Fields& fields, const std::string& text, const std::string& where,
               const std::vector<Repeated>& repeated = {});
// "section.key=value".
void read_override(Fields& fields, const std::string& text);
// Words and bounds of each.
void check(const Fields& fields);

std::string text_of(const Slot& slot);  // as TOML has it
std::string to_toml(const Fields& fields);
// One key a line: "train.lr = 0.001   the highest learning rate".
std::string describe(const Fields& fields);
// "; did you mean a or b?", or a full stop.
std::string meant(const Words& close);

[[noreturn]] void refuse(const Field& field, const auto&... wanted) {
  fail(Kind::Config, field.from, field.key(), ": got ", text_of(field.slot), ", wanted ",
       wanted...);
}

}  // namespace yoke::config
