// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/program.h"

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

std::string text_of(const Program& program, const Operation& operation) {
  std::vector<std::string> parts;
  for (const int part : operation.parts) parts.push_back(program.parts[size_t(part)].name);
  const auto group = [&] { return program.groups[size_t(operation.group)].name; };
  switch (operation.kind) {
    case Operation::Kind::Compute:
      return operation.name;
    case Operation::Kind::Copy:
      return cat(operation.name, " COPY");
    case Operation::Kind::Send:
      return cat(operation.name, " SEND ", operation.peer);
    case Operation::Kind::Recv:
      return cat(operation.name, " RECV ", operation.peer);
    case Operation::Kind::Collective:
      return cat(operation.name, " COLLECTIVE ", group());
    case Operation::Kind::Loop:
      return cat(operation.name, " LOOP ", group(), " of ", join(parts, " | "));
    case Operation::Kind::Branch:
      return cat(operation.name, " BRANCH ", group(), " of ", join(parts, " | "));
  }
  return operation.name;
}

void write(const Program& program, const std::string& indent, std::string& text) {
  for (size_t q = 0; q < program.rows.size(); ++q) {
    if (program.rows[q].empty() && !indent.empty()) continue;  // a part is not of every queue
    std::vector<std::string> row;
    for (const auto& operation : program.rows[q]) row.push_back(text_of(program, operation));
    text += cat(indent, program.queues[q], ":", row.empty() ? "" : " ", join(row, ", "), "\n");
  }
  for (const auto& part : program.parts) {
    text += cat(indent, "  ", part.name, ":\n");
    write(part, indent + "    ", text);
  }
}

}  // namespace

size_t Program::num_operations() const {
  size_t sum = 0;
  for (const auto& row : rows) sum += row.size();
  for (const auto& part : parts) sum += part.num_operations();
  return sum;
}

std::vector<const Program*> with_parts(const Program& program) {
  std::vector<const Program*> all{&program};
  for (size_t i = 0; i < all.size(); ++i)
    for (const auto& part : all[i]->parts) all.push_back(&part);
  return all;
}

const Program& part_of(const Program& program, const std::vector<int>& parts) {
  const Program* at = &program;
  for (const int part : parts) at = &at->parts[size_t(part)];
  return *at;
}

std::string to_text(const Program& program) {
  std::string text;
  write(program, "", text);
  return text;
}

}  // namespace yoke::plan
