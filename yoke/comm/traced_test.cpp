// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/traced.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <sstream>

#include "yoke/comm/run_ranks.h"

namespace yoke::comm {

TEST(Traced, NotesWhatItsRankWaitsForAndChangesNothing) {
  const SteadyClock clock;
  observe::Tracer tracer(clock);
  run_ranks(4, [&](Communicator& plain) {
    const Communicator world = traced(plain, tracer);
    tracer.name_thread(world.rank(), "test");
    const at::Tensor ones = at::ones({3});
    world.all_reduce(ones).wait();
    EXPECT_TRUE(at::equal(ones, at::full({3}, 4.0)));
    const Communicator half = world.split(world.rank() % 2, world.rank());
    EXPECT_EQ(half.size(), 2);
    EXPECT_FALSE(world.split(-1, 0));
    const at::Tensor message = at::full({1}, double(world.rank()));
    if (half.rank() == 0)
      half.send(message, 1).wait();
    else
      half.recv(message, 0).wait();
    EXPECT_EQ(message.item<float>(), float(world.rank() % 2));
    world.barrier();
  });
  std::ostringstream text;
  tracer.write_chrome_trace(text);
  for (const char* span : {R"("name":"all_reduce","cat":"comm")", R"("name":"send","cat":"comm")",
                           R"("name":"recv","cat":"wait")", R"("name":"rank 3")"})
    EXPECT_NE(text.str().find(span), std::string::npos) << span;
}

}  // namespace yoke::comm
