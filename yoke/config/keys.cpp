// SPDX-License-Identifier: Apache-2.0
#include "yoke/config/keys.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <sstream>

namespace yoke::config {
namespace {

constexpr const char* kWanted[] = {
    "an integer",         "a number, as 0.5 or 3e-4", "true or false",    "a string",
    "a list of integers", "a list of strings",        "a list of numbers"};

// As TOML has them.
std::string text_of(const toml::node& node) {
  std::ostringstream out;
  out << toml::toml_formatter(node, toml::format_flags::allow_unicode_strings);
  return out.str();
}
std::string text_of(const std::string& value) { return text_of(toml::value<std::string>(value)); }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return cat(value); }
std::string text_of(double value) {
  char text[32];
  const auto general = std::chars_format::general;  // the shortest that is read back the same
  std::string result(text, std::to_chars(text, std::end(text), value, general).ptr);
  return result.find_first_of(".ein") == result.npos ? result + ".0" : result;
}
template <typename Item>
std::string text_of(const std::vector<Item>& value) {
  Words words;
  for (const auto& word : value) words.push_back(text_of(word));
  return cat("[", join(words, ", "), "]");
}

std::string trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

// False where the value is of another kind. 3 is a number, and 3.0 an integer.
bool assign(const Slot& slot, const toml::node& node) {
  const auto put = [&](auto* to) {
    using To = std::remove_pointer_t<decltype(to)>;
    if constexpr (std::is_same_v<To, List> || std::is_same_v<To, Words> ||
                  std::is_same_v<To, Numbers>) {
      To list;
      if (!node.is_array()) return false;
      for (const auto& part : *node.as_array())
        if (!assign(&list.emplace_back(), part)) return false;
      *to = list;
      return true;
    } else {
      constexpr bool whole = std::is_same_v<To, int64_t>,
                     number = whole || std::is_same_v<To, double>;
      // toml++ casts a number that does not fit.
      if (whole && std::abs(node.value_exact<double>().value_or(0)) >= 0x1p63) return false;
      const auto value = number && node.is_number() ? node.value<To>() : node.value_exact<To>();
      if (value) *to = *value;
      return value.has_value();
    }
  };
  return std::visit(put, slot);
}

// A key "v" with what a text means for a kind of key, or the text itself where it means nothing.
toml::table read(const Slot& slot, std::string text) {
  const auto within = [&](char open, char close) {
    return text.size() >= 2 && text.front() == open && text.back() == close;
  };
  if (std::holds_alternative<std::string*>(slot)) {
    if (within('"', '"') || within('\'', '\'')) text = text.substr(1, text.size() - 2);
    return toml::table{{"v", text}};
  }
  text = trim(text);
  if (std::holds_alternative<bool*>(slot) && (text == "yes" || text == "no"))
    return toml::table{{"v", text == "yes"}};
  if (slot.index() >= 4 && !within('[', ']')) text = cat("[", text, "]");
  try {
    return toml::parse(cat("v = ", text));
  } catch (const toml::parse_error&) {
    return toml::table{{"v", text}};
  }
}

Field& find(Fields& fields, const std::string& from, const std::string& key) {
  const auto found = std::ranges::find(fields, key, &Field::key);
  if (found != fields.end()) return *found;
  const std::string section = key.substr(0, key.find('.')), name = key.substr(key.find('.') + 1);
  Words sections, names, mine, close;
  for (const auto& field : fields) {
    if (sections.empty() || sections.back() != field.section) sections.push_back(field.section);
    if (!std::ranges::count(names, field.name)) names.push_back(field.name);
    if (field.section == section) mine.push_back(field.name);
  }
  if (mine.empty())
    for (const auto& near : nearest(section, sections)) close.push_back(cat("[", near, "]"));
  for (const auto& near : nearest(name, names))
    for (const auto& field : fields)
      if (field.name == near) close.push_back(field.key());
  std::stable_partition(close.begin(), close.end(),
                        [&](const auto& near) { return near.starts_with(section + "."); });
  if (mine.empty())
    fail(Kind::Config, from, key, ": no such section", meant(close), " There are ",
         join(sections, ", "));
  fail(Kind::Config, from, key, ": no such key", meant(close), " [", section, "] has ",
       join(mine, ", "));
}

void set(Field& field, const std::string& from, const toml::node& node, const std::string& got) {
  if (!assign(field.slot, node))
    fail(Kind::Config, from, field.key(), ": got ", got, ", wanted ", kWanted[field.slot.index()]);
  field.from = from;
}

std::string line(const std::string& start, const std::string& mark, size_t column,
                 const Field& field) {
  std::string result = start;
  result.resize(std::max(column, start.size() + 2), ' ');
  result += mark + field.about;
  return result + (field.words.empty() ? "" : ": " + join(field.words, ", ")) + "\n";
}

std::string place(const std::string& where, const toml::key& key) {
  return cat(where, ":", key.source().begin.line, ": ");
}

std::string got(const toml::node& node) {
  return node.is_table() ? "a table" : cat("the ", node.type(), " ", text_of(node));
}

// Reads the keys of one section's table.
void read_keys(Fields& fields, const std::string& section, const toml::table& keys,
               const std::string& where) {
  for (const auto& [name, node] : keys)
    set(find(fields, place(where, name), cat(section, ".", name)), place(where, name), node,
        got(node));
}

}  // namespace

std::string text_of(const Slot& slot) {
  return std::visit([](const auto* value) { return text_of(*value); }, slot);
}

std::string meant(const Words& close) {
  return close.empty() ? "." : cat("; did you mean ", join(close, " or "), "?");
}

void check(const Fields& fields) {
  for (const auto& field : fields) {
    const auto* word = std::get_if<std::string*>(&field.slot);
    const auto* whole = std::get_if<int64_t*>(&field.slot);
    const auto* real = std::get_if<double*>(&field.slot);
    const auto* list = std::get_if<List*>(&field.slot);
    if (word && !field.words.empty() && !std::ranges::count(field.words, **word))
      refuse(field, "one of ", join(field.words, ", "), meant(nearest(**word, field.words)));
    const auto low = [&](auto number) { return !(double(number) >= field.least); };
    const auto high = [&](int64_t number) { return double(number) > field.most; };
    if (real && !std::isfinite(**real)) refuse(field, "a finite number");
    if ((whole && low(**whole)) || (real && low(**real))) refuse(field, "at least ", field.least);
    if ((whole && high(**whole)) || (list && std::ranges::any_of(**list, high)))
      refuse(field, "at most ", int64_t(field.most));
    if (list && std::ranges::any_of(**list, low))
      refuse(field, "at least ", field.least, " in each");
  }
}

void read_toml(Fields& fields, const std::string& text, const std::string& where,
               const std::vector<Repeated>& repeated) {
  toml::table sections;
  try {
    sections = toml::parse(std::string_view(text));
  } catch (const toml::parse_error& error) {
    const std::string what(error.description());
    const bool in_value = what.find("key") == what.npos && what.find("table") == what.npos;
    fail(Kind::Config, where, ":", error.source().begin.line, ":", error.source().begin.column,
         ": ", what, in_value ? "; words stand in quotes, true and false do not" : "");
  }
  for (const auto& [section, keys] : sections) {
    const auto several = std::ranges::find(repeated, section.str(), &Repeated::section);
    if (several != repeated.end()) {
      const auto* tables = keys.as_array();
      if (!tables || !tables->is_homogeneous(toml::node_type::table))
        fail(Kind::Config, place(where, section), section, ": got ", got(keys),
             ", wanted sections: say [[", section, "]] and the keys of one below");
      several->resize(tables->size());
      for (size_t i = 0; i < tables->size(); ++i) {
        auto own = several->fields(i);
        read_keys(own, several->section, *tables->get_as<toml::table>(i), where);
        check(own);
      }
      continue;
    }
    if (!std::ranges::count(fields, section.str(), &Field::section)) {
      Fields all = fields;
      for (const auto& one : repeated) all.emplace_back(one.section.c_str(), "", Slot(), "");
      find(all, place(where, section), std::string(section));
    }
    if (!keys.is_table())
      fail(Kind::Config, place(where, section), section, ": got ", got(keys),
           ", wanted a section: say [", section, "] and its keys below");
    read_keys(fields, std::string(section), *keys.as_table(), where);
  }
}

void read_override(Fields& fields, const std::string& text) {
  const size_t at = text.find('=');
  const std::string key = trim(text.substr(0, at));
  if (at == text.npos || key.empty())
    fail(Kind::Config, "override '", text, "': wanted section.key=value, as train.steps=100");
  Field& field = find(fields, "override ", key);
  const std::string value = text.substr(at + 1);
  set(field, "override ", *read(field.slot, value).get("v"), cat("'", value, "'"));
  const auto* word = std::get_if<std::string*>(&field.slot);
  if (word && toml::parse("v = " + text_of(**word))["v"].value<std::string>() != **word)
    refuse(field, "text in UTF-8");
}

std::string to_toml(const Fields& fields) {
  std::string result, section;
  for (const auto& field : fields) {
    if (field.section != section)
      result += cat(section.empty() ? "" : "\n", "[", field.section, "]\n");
    section = field.section;
    result += line(cat(field.name, " = ", text_of(field.slot)), "# ", 28, field);
  }
  return result;
}

std::string describe(const Fields& fields) {
  std::string result;
  for (const auto& field : fields)
    result += line(cat(field.key(), " = ", text_of(field.slot)), "", 33, field);
  return result;
}

}  // namespace yoke::config
