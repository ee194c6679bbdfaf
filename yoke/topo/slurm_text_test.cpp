// SPDX-License-Identifier: Apache-2.0
#include "yoke/topo/slurm_text.h"

#include <gtest/gtest.h>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

using namespace yoke;
using namespace yoke::topo;

TEST(SlurmText, NodeListExpandsRangesPaddingAndSeveralBrackets) {
  const auto expand = [](const char* text) { return join(expand_nodelist(text), " "); };
  EXPECT_EQ(expand("n[1-2,7],login"), "n1 n2 n7 login");
  EXPECT_EQ(expand("n1"), "n1");
  EXPECT_EQ(expand("node[08-11]"), "node08 node09 node10 node11");
  EXPECT_EQ(expand("r[1-2]n[1-2]-ib"), "r1n1-ib r1n2-ib r2n1-ib r2n2-ib");
  EXPECT_EQ(expand("a-b,c-[3]"), "a-b c-3");
}

TEST(SlurmText, MalformedNodeListsAreRefused) {
  for (const char* text : {"", "n[1-2", "n1-2]", "n[2-1]", "n[a]", "n[]", "n[1-]", "n[1,,2]",
                           "a,,b", "n[1-999999999999]", "n[1-1000]m[1-1000]k[1-1000]", "n]1["})
    EXPECT_THROW(expand_nodelist(text), Error) << text;
}

TEST(SlurmText, TasksPerNodeExpandRepeats) {
  EXPECT_EQ(expand_tasks_per_node("1(x2),3"), (std::vector{1, 1, 3}));
  EXPECT_EQ(expand_tasks_per_node("4"), (std::vector{4}));
  for (const char* text : {"", "x", "2(x", "2(x2", "2(x0)", "(x2)", "0", "2(x2)3", "-1"})
    EXPECT_THROW(expand_tasks_per_node(text), Error) << text;
}

TEST(SlurmText, ErrorSaysWhatWasGotAndWhatToDo) {
  try {
    expand_nodelist("n[1-");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Usage);
    EXPECT_STREQ(error.what(),
                 "Slurm node list 'n[1-' cannot be read: wanted a form like n[1-2,7],login of at "
                 "most a million nodes; set YOKE_RANK, YOKE_WORLD_SIZE and YOKE_ADDRESS to do "
                 "without it");
  }
}
