// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/errands.h"

#include <gtest/gtest.h>

#include <future>
#include <latch>

#include "yoke/serve/status.h"

namespace yoke::serve {
namespace {

Status refusal_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Refused& why) {
    return why.outcome.status;
  }
  return Status::Ok;
}

TEST(Errands, AreDoneOneAfterTheOtherWhoeverAsked) {
  Errands errands;
  Errands::Client one(errands), other(errands);
  std::vector<int> done;  // by one thread alone
  std::latch last(1);
  for (int i = 0; i < 20; ++i) (i % 2 ? one : other).add([&done, i] { done.push_back(i); });
  one.add([&] { last.count_down(); });
  last.wait();
  ASSERT_EQ(done.size(), 20u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(done[size_t(i)], i);
}

TEST(Errands, AreRefusedWhereTooManyWait) {
  Errands errands;
  Errands::Client client(errands);
  std::latch begun(1), go_on(1);
  client.add([&] {
    begun.count_down();
    go_on.wait();
  });
  begun.wait();
  for (size_t i = 0; i < Errands::kMost; ++i) client.add([] {});
  EXPECT_EQ(refusal_of([&] { client.add([] {}); }), Status::Exhausted);
  go_on.count_down();
}

TEST(Errands, OfAClientThatClosesAreOverAndOthersGoOn) {
  Errands errands;
  Errands::Client leaves(errands), stays(errands);
  std::latch begun(1), go_on(1), last(1);
  bool over = false, forgotten = true;
  leaves.add([&] {
    begun.count_down();
    go_on.wait();
    over = true;
  });
  begun.wait();
  const auto held = std::make_shared<int>();
  leaves.add([&forgotten, held] { forgotten = false; });
  stays.add([&last] { last.count_down(); });
  auto closing = std::async(std::launch::async, [&] {
    leaves.close();
    return over;
  });
  while (refusal_of([&] { leaves.add([] {}); }) != Status::Unavailable) std::this_thread::yield();
  go_on.count_down();
  EXPECT_TRUE(closing.get()) << "close() did not wait for the one that ran";
  last.wait();
  EXPECT_TRUE(forgotten);
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace yoke::serve
