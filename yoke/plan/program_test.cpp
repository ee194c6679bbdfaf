// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/program.h"

#include <gtest/gtest.h>

namespace yoke::plan {
namespace {

using Kind = Operation::Kind;

Program sample() {
  const std::vector<std::string> queues{"cpu:0", "cpu:1", "cpu:2"};
  const Program inner{.name = "inner", .queues = queues, .rows = {{{.name = "f"}}, {}, {}}};
  Program body{.name = "body",
               .queues = queues,
               .groups = {{"alone", {0}}},
               .rows = {{{.name = "more", .kind = Kind::Loop, .group = 0, .parts = {0}}},
                        {{.name = "g"}, {.name = "h"}},
                        {}},
               .parts = {inner}};
  const Program other{.name = "other", .queues = queues, .rows = {{}, {{.name = "k"}}, {}}};
  const Operation branch{.name = "which", .kind = Kind::Branch, .group = 0, .parts = {0, 1}};
  return {.name = "sample",
          .queues = queues,
          .channels = {{.name = "a.y -> b.x"}},
          .groups = {{"pair", {0, 1}}},
          .rows = {{{.name = "a", .gives = {{0}}},
                    {.name = "a.y->c.x", .kind = Kind::Send, .peer = 1},
                    branch},
                   {{.name = "a.y->c.x", .kind = Kind::Recv, .peer = 0},
                    {.name = "b.x", .kind = Kind::Copy, .takes = {{0}}},
                    branch,
                    {.name = "grads", .kind = Kind::Collective, .group = 0}},
                   {}},
          .parts = {body, other}};
}

TEST(Program, TextHasALineForEachQueueAndPartsBelow) {
  EXPECT_EQ(to_text(sample()),
            "cpu:0: a, a.y->c.x SEND 1, which BRANCH pair of body | other\n"
            "cpu:1: a.y->c.x RECV 0, b.x COPY, which BRANCH pair of body | other, "
            "grads COLLECTIVE pair\n"
            "cpu:2:\n"
            "  body:\n"
            "    cpu:0: more LOOP alone of inner\n"
            "    cpu:1: g, h\n"
            "      inner:\n"
            "        cpu:0: f\n"
            "  other:\n"
            "    cpu:1: k\n");
  EXPECT_EQ(to_text(Program{}), "");
}

TEST(Program, OperationsOfPartsCount) {
  EXPECT_EQ(sample().num_operations(), 7u + 3 + 1 + 1);
  EXPECT_EQ(Program{}.num_operations(), 0u);
}

TEST(Program, PartsAreCalledByTheirPlace) {
  const Program program = sample();
  std::vector<std::string> names;
  for (const Program* it : with_parts(program)) names.push_back(it->name);
  EXPECT_EQ(names, (std::vector<std::string>{"sample", "body", "other", "inner"}));
}

}  // namespace
}  // namespace yoke::plan
