// SPDX-License-Identifier: Apache-2.0
// What tenants of a pool are charged, what they are kept from, and what is theirs alone.
#include "yoke/base/error.h"
#include "yoke/serve/pool_test.h"

namespace yoke::serve {
namespace {

TenantView tenant_of(const Pool& pool, const std::string& name) {
  for (auto& tenant : pool.view().tenants)
    if (tenant.name == name) return tenant;
  return {};
}

// Rows of two tenants that are computed behind a third one's.
struct Charged {
  explicit Charged(bool exclusive)
      : bench(watched(
                  [this](const ReplicaSpec&, const std::vector<float>& rows) { gate.pass(rows); }),
              {.name = "m", .path = "stand-in:ms=20", .devices = "cpu:1", .batch = 16},
              {{.name = "a", .exclusive_batch = exclusive}, {.name = "b"}, {.name = "first"}}) {
    Answers answers;
    bench.pool.submit(row_of(kHeld), bench.pool.tenant("first"), answers.next());
    wait_until([&] { return gate.num_held() == 1; });
    bench.pool.submit(row_of(1), bench.pool.tenant("a"), answers.next());
    bench.pool.submit(request_of(std::vector<std::array<float, 4>>(7)), bench.pool.tenant("b"),
                      answers.next());
    gate.open();
    EXPECT_EQ(answers.count(Status::Ok), 3u);
    const auto view = bench.pool.view();
    batches = view.replicas[0].batches - 1;
    busy = std::chrono::duration<double>(view.replicas[0].busy).count() - of("first");
  }
  double of(const std::string& tenant) const { return tenant_of(bench.pool, tenant).device_s; }
  Gate gate;
  Bench bench;
  uint64_t batches = 0;
  double busy = 0;
};

TEST(PoolTenants, PayForABatchByTheirRowsInIt) {
  const Charged mixed(false);
  EXPECT_EQ(mixed.batches, 1u);
  EXPECT_NEAR(mixed.of("b"), 7 * mixed.of("a"), 1e-6);
  EXPECT_NEAR(mixed.of("a") + mixed.of("b"), mixed.busy, 1e-6) << "rows that are empty are paid";
  EXPECT_GE(mixed.busy, 0.02);
}

TEST(PoolTenants, PayForTheWholeOfABatchThatIsTheirsAlone) {
  const Charged apart(true);
  EXPECT_EQ(apart.batches, 2u);
  EXPECT_GE(apart.of("a"), 0.02);
  EXPECT_GE(apart.of("b"), 0.02);
  EXPECT_NEAR(apart.of("a") + apart.of("b"), apart.busy, 1e-6);
}

TEST(PoolTenants, AreKeptNoDeviceThatNobodyServesOn) {
  Bench bench("stand-in:", "cpu:1", 1, false,
              {{.name = "kept", .guaranteed = 0.5, .lendable = 0}, {.name = "b"}});
  bench.pool.load_and_wait({.name = "n", .path = "stand-in:", .devices = "cpu:2"}, seconds(60));
  const auto ask = [&](const char* tenant, Duration timeout = seconds(5)) {
    Answers answers;
    bench.pool.submit(row_of(1, {.timeout = timeout}), bench.pool.tenant(tenant), answers.next());
    return answers.wait()[0][0].outcome.status;
  };
  EXPECT_EQ(ask("b"), Status::Ok);
  bench.pool.unload("n");
  wait_until([&] { return bench.pool.view().replicas.size() == 1; });
  EXPECT_EQ(ask("b"), Status::Ok) << "half of the only device is lent";
  bench.pool.set_tenants({{.name = "kept", .guaranteed = 1, .lendable = 0}, {.name = "b"}});
  EXPECT_EQ(ask("b", milliseconds(400)), Status::Deadline) << "the only device is kept for another";
  EXPECT_EQ(ask("kept"), Status::Ok);
}

TEST(PoolTenants, KeepTheirDevicesThoughOneComputesManyOfTheirRequests) {
  Gate gate;
  Bench bench(held_at(gate), {.name = "m", .path = "stand-in:", .devices = "cpu:4", .batch = 8},
              {{.name = "kept", .guaranteed = 0.5, .lendable = 0}, {.name = "b"}});
  Answers answers;
  const std::vector<std::array<float, 4>> eight(8, {kHeld, 1, 2, 3});
  for (int i = 0; i < 8; ++i)
    bench.pool.submit(row_of(kHeld), bench.pool.tenant("kept"), answers.next(), {},
                      Pool::When::Later);
  bench.pool.dispatch();
  wait_until([&] { return gate.num_held() == 1; });
  for (int i = 0; i < 4; ++i)
    bench.pool.submit(request_of(eight), bench.pool.tenant("b"), answers.next());
  const auto computing = [&] {
    return std::ranges::count_if(bench.pool.view().replicas,
                                 [](const auto& replica) { return replica.computing > 0; });
  };
  EXPECT_EQ(computing(), 3) << "one more of four is its";
  bench.pool.submit(row_of(kHeld), bench.pool.tenant("kept"), answers.next());
  EXPECT_EQ(computing(), 4);
  gate.open();
  EXPECT_EQ(answers.count(Status::Ok), 13u);
}

TEST(PoolTenants, BorrowAsSoonAsThereIsTimeOfADeviceAgain) {
  expect_within(seconds(3), [] {  // with a look each second it would be four
    Bench bench("stand-in:ms=20", "cpu:1", 1, false,
                {{.name = "kept", .guaranteed = 0.5, .lendable = 0}, {.name = "b"}});
    Answers answers;
    const Time begun = SteadyClock().now();
    for (int i = 0; i < 50; ++i)  // a second, of which a tenth is saved up
      bench.pool.submit(row_of(1), bench.pool.tenant("b"), answers.next());
    EXPECT_EQ(answers.count(Status::Ok), 50u);
    const Duration took = SteadyClock().now() - begun;
    EXPECT_GE(took, milliseconds(1700));
    return took;
  });
}

TEST(PoolTenants, KeepNothingBackOfWhatIsSharedBesideDevicesOfTheirOwn) {
  Bench bench("stand-in:", "cpu:2", 1, false,
              {{.name = "own", .guaranteed = 1, .lendable = 0, .devices = "cpu"}, {.name = "b"}});
  Answers answers;
  bench.pool.submit(row_of(1, {.timeout = seconds(2)}), bench.pool.tenant("b"), answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 1u);
}

TEST(PoolTenants, AreRefusedDevicesThatAreNotThere) {
  Bench bench("stand-in:", "cpu:2", 1, false, {{.name = "a", .devices = "cpu"}});
  try {
    bench.pool.set_tenants({{.name = "b", .devices = "cpu"}, {.name = "c", .devices = "cpu:2"}});
    FAIL() << "there are two";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Config);
    EXPECT_STREQ(error.what(),
                 "tenant 'c': devices 'cpu:2' cannot be its own: with those of tenants before it "
                 "that is 3 x cpu, and the models are on 2; name fewer, or put the models on more "
                 "by model.devices");
  }
  EXPECT_NO_THROW(bench.pool.tenant("a")) << "they stay as they were";
  bench.pool.set_tenants({{.name = "b", .devices = "cpu:2"}});
}

TEST(PoolTenants, AreToldOfAModelThatIsOnOthersDevicesAlone) {
  Bench bench("stand-in:", "cpu:2", 1, false, {{.name = "a", .devices = "cpu"}, {.name = "b"}});
  bench.pool.load_and_wait({.name = "n", .path = "stand-in:", .devices = "cpu:1"}, seconds(60));
  const auto ask = [&](const char* tenant, const char* model) {
    Answers answers;
    auto request = row_of(1);
    request.model = model;
    bench.pool.submit(std::move(request), bench.pool.tenant(tenant), answers.next());
    return answers.wait()[0][0].outcome;
  };
  EXPECT_TRUE(ask("a", "n").ok());
  EXPECT_TRUE(ask("b", "m").ok());
  const auto refused = ask("b", "n");
  EXPECT_EQ(refused.status, Status::Forbidden);
  EXPECT_EQ(refused.text,
            "model 'n' is on cpu#0 of tenant 'a' alone, which tenant 'b' may not use; put it on "
            "more by model.devices");
}

TEST(PoolTenants, LeavePlacesForSequencesOfOthers) {
  Bench bench(Bench::options(),
              {.name = "m", .path = "stand-in:", .devices = "cpu:1", .stateful = true},
              {{.name = "a", .max_queue = 2000}, {.name = "b"}});
  const auto begin = [&](const char* tenant, int count) {
    Answers answers;
    for (int i = 0; i < count; ++i)
      bench.pool.submit(row_of(1, {.sequence = cat(i), .sequence_start = true}),
                        bench.pool.tenant(tenant), answers.next());
    const auto& all = answers.wait();
    return all.back()[0].outcome;
  };
  EXPECT_TRUE(begin("a", 512).ok());
  const auto refused = begin("a", 513);
  EXPECT_EQ(refused.status, Status::Exhausted);
  EXPECT_EQ(refused.text,
            "tenant 'a' has 512 sequences of model 'm', and may have no more than are left for "
            "others, 512; end some by sequence_end");
  EXPECT_TRUE(begin("b", 1).ok());
  bench.pool.set_tenants({{.name = "a", .max_queue = 2000}});
  EXPECT_TRUE(begin("a", 600).ok()) << "nobody else is there";
}

TEST(PoolTenants, LoseSequencesOnADeviceThatIsAnothersNow) {
  Gate gate;
  Bench bench(held_at(gate),
              {.name = "m", .path = "stand-in:", .devices = "cpu:2", .stateful = true},
              {{.name = "a"}, {.name = "b"}});
  Answers answers;
  const auto ask = [&](float value, const char* sequence, bool start = false) {
    bench.pool.submit(row_of(value, {.sequence = sequence, .sequence_start = start}),
                      bench.pool.tenant("a"), answers.next());
  };
  ask(kHeld, "first", true), ask(1, "first"), ask(1, "first");  // the last one waits for a batch
  ask(1, "second", true);
  wait_until([&] { return gate.num_held() == 1; });
  bench.pool.set_tenants({{.name = "a"}, {.name = "b", .devices = "cpu"}});
  gate.open();
  EXPECT_EQ(answers.wait()[2][0].outcome.text,
            "the device of its sequence is another tenant's now; begin it anew");
  ask(1, "second"), ask(1, "first");
  EXPECT_TRUE(answers.wait()[4][0].outcome.ok());
  EXPECT_EQ(answers.wait()[5][0].outcome.status, Status::Invalid);
  ask(1, "first", true);
  EXPECT_TRUE(answers.wait()[6][0].outcome.ok());
}

TEST(PoolTenants, AreListedWithWhatTheyUsedWhenTheyAreGone) {
  Bench bench("stand-in:ms=1", "cpu:1", 1, false, {{.name = "a"}, {.name = "idle"}});
  Answers answers;
  bench.pool.submit(row_of(1), bench.pool.tenant("a"), answers.next());
  EXPECT_EQ(answers.count(Status::Ok), 1u);
  bench.pool.set_tenants({{.name = "b"}});
  const auto tenants = bench.pool.view().tenants;
  ASSERT_EQ(tenants.size(), 2u);
  EXPECT_EQ(tenants[0].name, "a");
  EXPECT_FALSE(tenants[0].active);
  EXPECT_EQ(tenants[0].by_model.at("m").rows, 1u);
  EXPECT_TRUE(tenants[1].active);
}

}  // namespace
}  // namespace yoke::serve
