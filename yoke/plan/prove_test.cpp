// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/prove.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <set>

#include "yoke/base/error.h"
#include "yoke/plan/prove_oracle_test.h"

namespace yoke::plan {
namespace {

using Kind = Operation::Kind;

// a on one queue and b on another, each with what the other gives.
Program ring(int64_t initial) {
  return {.name = "ring",
          .queues = {"cpu:0", "cpu:1"},
          .channels = {{.name = "a.y -> b.x"}, {.name = "b.y -> a.x", .initial = initial}},
          .rows = {{{.name = "a", .takes = {{1}}, .gives = {{0}}}},
                   {{.name = "b", .takes = {{0}}, .gives = {{1}}}}}};
}
// a gives to b and then to c; on the other queue they are in that order or the other.
Program fork(bool crossed, int64_t capacity = 1) {
  Program program{
      .name = "fork",
      .queues = {"cpu:0", "cpu:1"},
      .channels = {{.name = "a.y -> b.x", .capacity = capacity}, {.name = "a.z -> c.x"}},
      .rows = {{{.name = "a", .gives = {{0}}}, {.name = "a2", .gives = {{1}}}},
               {{.name = "b", .takes = {{0}}}, {.name = "c", .takes = {{1}}}}}};
  if (crossed) std::swap(program.rows[1][0], program.rows[1][1]);
  return program;
}
Operation message(Kind kind, int peer, const std::string& what) {
  return {.name = cat(kind == Kind::Send ? "send " : "recv ", what),
          .kind = kind,
          .peer = peer,
          .what = what};
}
Operation meeting(const std::string& what, Kind kind = Kind::Collective) {
  return {.name = what, .kind = kind, .group = 0, .what = what};
}
Program members(std::vector<std::vector<Operation>> rows) {
  return {.name = "members",
          .queues = {"cpu:0", "cpu:1"},
          .groups = {{"dp", {0, 1}}},
          .rows = std::move(rows)};
}
std::string text_of(const Program& program) {
  const auto knot = find_knot(program);
  return knot ? knot->text(program) : "";
}
// A suggestion that is there and passes.
void expect_undone(const Program& program, Rule rule, const std::string& suggestion) {
  const auto knot = find_knot(program);
  ASSERT_TRUE(knot);
  EXPECT_EQ(knot->rule, rule) << knot->text(program);
  EXPECT_EQ(knot->suggestion.text, suggestion) << knot->text(program);
  EXPECT_NE(knot->suggestion.kind, Suggestion::Kind::None);
  EXPECT_FALSE(find_knot(apply(program, knot->suggestion)));
  EXPECT_FALSE(find_knot(program, {.without = {rule}})) << "nothing else is wrong";
}

TEST(Prove, AProgramWithoutCirclesPasses) {
  EXPECT_EQ(text_of({}), "");
  EXPECT_EQ(text_of(ring(1)), "");
  EXPECT_EQ(text_of(fork(false)), "");
  EXPECT_EQ(text_of(members({{meeting("grads")}, {meeting("grads")}})), "");
}

TEST(Prove, ValuesThatWaitForEachOtherAreACircle) {
  EXPECT_EQ(
      text_of(ring(0)),
      "program 'ring', rule data: a on cpu:0 and 1 other wait for each other, in every round: "
      "nobody can begin\n"
      "  cpu:0  a  waits for a value of 'b.y -> a.x' from\n"
      "  cpu:1  b  waits for a value of 'a.y -> b.x' from\n"
      "  cpu:0  a\n"
      "suggestion: let 'b.y -> a.x' hold 1 value before the first round\n");
  expect_undone(ring(0), Rule::Data, "let 'b.y -> a.x' hold 1 value before the first round");
}

TEST(Prove, AnOperationThatTakesWhatItGivesWaitsForItself) {
  Program self{.name = "self",
               .queues = {"cpu:0"},
               .channels = {{.name = "a.h -> a.h"}},
               .rows = {{{.name = "a", .takes = {{0}}, .gives = {{0}}}}}};
  EXPECT_EQ(
      text_of(self),
      "program 'self', rule data: a on cpu:0 waits for itself, in every round: nobody can begin\n"
      "  cpu:0  a  waits for a value of 'a.h -> a.h' from\n"
      "  cpu:0  a\n"
      "suggestion: let 'a.h -> a.h' hold 1 value before the first round\n");
  self.channels[0].initial = 1;
  EXPECT_EQ(text_of(self), "");
}

TEST(Prove, RoomThatIsMadeTooLateIsACircle) {
  Program late{.name = "late",
               .queues = {"cpu:0", "cpu:1"},
               .channels = {{.name = "a.y -> b.x"}, {.name = "go"}},
               .rows = {{{.name = "a", .gives = {{0}}},
                         {.name = "a.1", .gives = {{0}}},
                         {.name = "then", .gives = {{1}}}},
                        {{.name = "first", .takes = {{1}}},
                         {.name = "b", .takes = {{0, 1}}},
                         {.name = "b.1", .takes = {{0, 1}}}}}};
  EXPECT_EQ(
      text_of(late),
      "program 'late', rule capacity: a.1 on cpu:0 and 3 others wait for each other, in every "
      "round: nobody can begin\n"
      "  cpu:0  a.1    waits for room in 'a.y -> b.x', made by\n"
      "  cpu:1  b      comes after\n"
      "  cpu:1  first  waits for a value of 'go' from\n"
      "  cpu:0  then   comes after\n"
      "  cpu:0  a.1\n"
      "suggestion: on cpu:1, swap first and b\n");
  // Where the order is given by other values, room is what helps.
  late.channels.push_back({.name = "order"});
  late.rows[1][0].gives = {{2}};
  late.rows[1][1].takes.push_back({2});
  late.channels.push_back({.name = "done"});
  late.rows[0][1].gives.push_back({3});
  late.rows[0][2].takes.push_back({3});
  expect_undone(late, Rule::Capacity, "give 'a.y -> b.x' a capacity of 2");
}

TEST(Prove, ValuesThatAreTakenInAnotherOrderNeedASwap) {
  Program crossed = fork(true);
  EXPECT_EQ(text_of(crossed), "") << "each has room for one";
  crossed.rows[0].push_back({.name = "a3", .gives = {{0}}});
  crossed.rows[0][0].gives = {{0}};
  std::swap(crossed.rows[0][1], crossed.rows[0][2]);
  crossed.rows[1].push_back({.name = "b2", .takes = {{0}}});
  expect_undone(crossed, Rule::Capacity, "on cpu:1, swap c and b");
}

TEST(Prove, SeveralValuesAtOnceNeedRoomForAll) {
  Program rates{.name = "rates",
                .queues = {"cpu:0", "cpu:1"},
                .channels = {{.name = "a.y -> b.x", .capacity = 2}},
                .rows = {{{.name = "a", .gives = {{0, 2}}}, {.name = "a.1", .gives = {{0, 1}}}},
                         {{.name = "b", .takes = {{0, 1}}}, {.name = "b.1", .takes = {{0, 2}}}}}};
  EXPECT_EQ(text_of(rates), "");
  rates.channels[0].initial = 2;
  // One is left after b: b.1 waits for one of a's, a for room for two.
  expect_undone(rates, Rule::Capacity, "give 'a.y -> b.x' a capacity of 3");
  rates.channels[0].initial = 0;
  rates.rows[1].erase(rates.rows[1].begin());
  rates.rows[1][0].takes = {{0, 3}};
  EXPECT_EQ(text_of(rates),
            "program 'rates', rule balance: b.1 on cpu:1 takes 3 values of 'a.y -> b.x' at once: "
            "with its capacity that can be 1 to 2\n"
            "suggestion: give 'a.y -> b.x' a capacity of 3\n");
}

TEST(Prove, WhatIsGivenInARoundIsWhatIsTaken) {
  Program program = fork(false, 4);
  program.rows[0][0].gives = {{0, 2}};
  EXPECT_EQ(text_of(program),
            "program 'fork', rule balance: in a round 2 values are given to 'a.y -> b.x' (by a on "
            "cpu:0) and 1 is taken (by b on cpu:1)\n"
            "suggestion: let a give 1 of 'a.y -> b.x'\n");
  program = ring(3);
  expect_undone(program, Rule::Balance, "give 'b.y -> a.x' a capacity of 3");
  program = ring(1);
  program.channels[0].capacity = 0;
  EXPECT_NE(text_of(program).find("give 'a.y -> b.x' a capacity of 1"), std::string::npos);
  program = ring(1);
  program.rows[0][0].gives.clear();
  EXPECT_NE(
      text_of(program).find("0 values are given to 'a.y -> b.x' and 1 is taken (by b on cpu:1)"),
      std::string::npos)
      << text_of(program);
}

TEST(Prove, MessagesWaitForTheirOtherEnd) {
  Program program{.name = "swap",
                  .queues = {"cpu:0", "cpu:1"},
                  .rows = {{message(Kind::Send, 1, "x"), message(Kind::Recv, 1, "y")},
                           {message(Kind::Send, 0, "y"), message(Kind::Recv, 0, "x")}}};
  EXPECT_EQ(
      text_of(program),
      "program 'swap', rule messages: send x on cpu:0 and 3 others wait for each other, in every "
      "round: nobody can begin\n"
      "  cpu:0  send x  waits to send 'x' to\n"
      "  cpu:1  recv x  comes after\n"
      "  cpu:1  send y  waits to send 'y' to\n"
      "  cpu:0  recv y  comes after\n"
      "  cpu:0  send x\n"
      "suggestion: on cpu:1, swap send y and recv x\n");
  expect_undone(program, Rule::Messages, "on cpu:1, swap send y and recv x");
}

TEST(Prove, MembersOfGroupsWaitForEachOther) {
  Program program = members({{meeting("a"), meeting("b")}, {meeting("b"), meeting("a")}});
  program.groups.push_back({"tp", {0, 1}});
  program.rows[0][1].group = program.rows[1][0].group = 1;
  expect_undone(program, Rule::Collectives, "on cpu:1, swap b and a");
}

TEST(Prove, MeetingsMeanTheSameAtAllEnds) {
  EXPECT_EQ(
      text_of(members({{meeting("a"), meeting("b")}, {meeting("b"), meeting("a")}})),
      "program 'members', rule order: meeting 0 of group 'dp' is 'a' for a on cpu:0 and 'b' for "
      "b on cpu:1\n"
      "suggestion: on cpu:0, swap a and b\n");
  EXPECT_EQ(
      text_of(members({{meeting("a"), meeting("b")}, {meeting("a")}})),
      "program 'members', rule order: b on cpu:0 is meeting 1 of group 'dp' and has no other end: "
      "there are 2 and 1 in a round\n"
      "suggestion: let each member of a meeting do the same ones, in the same order\n");
  const Program kinds = members({{meeting("a")}, {meeting("a", Kind::Loop)}});
  EXPECT_NE(text_of(kinds).find("of another kind or other parts"), std::string::npos);
  Program program{.queues = {"cpu:0", "cpu:1"},
                  .rows = {{message(Kind::Send, 1, "x"), message(Kind::Send, 1, "y")},
                           {message(Kind::Recv, 0, "y"), message(Kind::Recv, 0, "x")}}};
  expect_undone(program, Rule::Order, "on cpu:0, swap send x and send y");
  std::swap(program.rows[1][0], program.rows[1][1]);
  program.rows[0].pop_back();
  EXPECT_NE(text_of(program).find("message 1 from cpu:0 to cpu:1 and has no other end"),
            std::string::npos)
      << text_of(program);
  program.rows = {{message(Kind::Send, 0, "x"), message(Kind::Recv, 0, "x")}, {}};
  EXPECT_NE(text_of(program).find("from a queue to itself"), std::string::npos);
}

TEST(Prove, OnlyMembersMeetAndDoTheParts) {
  Program program = members({{meeting("a")}, {meeting("a")}, {}});
  program.queues.push_back("cpu:2");
  EXPECT_EQ(text_of(program), "");
  program.rows[2] = {meeting("a")};
  EXPECT_NE(text_of(program).find("a on cpu:2 meets group 'dp', which its queue is not in"),
            std::string::npos);
  program.rows[2].clear();
  program.parts = {{.name = "body", .queues = program.queues, .rows = {{{.name = "f"}}, {}, {}}}};
  program.rows[0][0].parts = program.rows[1][0].parts = {0};
  EXPECT_EQ(text_of(program), "");
  std::swap(program.parts[0].rows[0], program.parts[0].rows[2]);
  EXPECT_NE(text_of(program).find("f on cpu:2 is in 'body', which only group 'dp' does"),
            std::string::npos)
      << text_of(program);
}

TEST(Prove, AChannelHasOneQueueAtEachEnd) {
  Program program = ring(1);
  program.channels[0].capacity = 2;
  program.rows[1][0].takes[0].count = 2;
  program.rows[1].push_back({.name = "c", .gives = {{0}}});
  EXPECT_NE(text_of(program).find("a on cpu:0 and c on cpu:1 both give to 'a.y -> b.x'"),
            std::string::npos)
      << text_of(program);
}

TEST(Prove, WhatTouchesTheSameMemoryIsInOneOrder) {
  Program program = fork(false);
  program.buffers = {"weights"};
  program.rows[0][0].uses = {{0, false}};
  program.rows[1][0].uses = {{0, false}};
  EXPECT_EQ(text_of(program), "") << "both read";
  program.rows[1][0].uses = {{0, true}};
  EXPECT_EQ(
      text_of(program),
      "program 'fork', rule races: b on cpu:1 and a on cpu:0 both touch 'weights', one to write, "
      "and nothing keeps the second, in its next round, from beginning before the first is done\n"
      "suggestion: on cpu:0, do a after a2\n")
      << "a2 waits for room, which c makes after b";
  program.rows[1][1].uses = {{0, false}};
  program.rows[0][1].uses = {{0, true}};
  program.rows[0][0].uses = program.rows[1][0].uses = {};
  EXPECT_NE(text_of(program).find("next round"), std::string::npos);
  Program safe = ring(1);
  safe.buffers = {"weights"};
  safe.rows[0][0].uses = safe.rows[1][0].uses = {{0, true}};
  EXPECT_EQ(text_of(safe), "");
  safe.channels[1] = {.name = "b.y -> a.x", .capacity = int64_t(1) << 60, .initial = 2};
  expect_undone(safe, Rule::Races, "let 'b.y -> a.x' hold 1 value before the first round");
}

TEST(Prove, TwoThatMeetAreNotInAnOrder) {
  Program program = members({{meeting("a")}, {meeting("a")}});
  program.buffers = {"weights"};
  program.rows[0][0].uses = program.rows[1][0].uses = {{0, true}};
  EXPECT_NE(text_of(program).find("or work on a copy"), std::string::npos);
  EXPECT_NE(text_of(program).find("both to write, and nothing says which comes first"),
            std::string::npos)
      << text_of(program);
  program.rows = {{{.name = "f", .uses = {{0, true}}}, meeting("a"), meeting("b")},
                  {meeting("a"), {.name = "g", .uses = {{0, true}}}, meeting("b")}};
  EXPECT_EQ(text_of(program), "") << "a meeting lies between them, and one before the next round";
}

TEST(Prove, BothEndsOfAChannelAgreeOnSizes) {
  Program program = ring(1);
  const auto ends = [&](const char* given, const char* taken, const char* given2 = "",
                        const char* taken2 = "") {
    const auto port = [](const std::string& text) {
      return text.empty() ? Port{} : parse_port(text);
    };
    program.channels[0].given = port(given), program.channels[0].taken = port(taken);
    program.channels[1].given = port(given2), program.channels[1].taken = port(taken2);
    return text_of(program);
  };
  EXPECT_EQ(ends("y:FP32[b,4]", "x:FP32[-1,4]"), "");
  EXPECT_EQ(ends("y:FP32[b,4]", ""), "");
  EXPECT_EQ(
      ends("y:FP32[b,4]", "x:FP32[b,5]"),
      "program 'ring', rule shapes: 'a.y -> b.x' is given y:FP32[b,4] and taken as x:FP32[b,5]: "
      "size 1 is 4 and 5\n"
      "suggestion: change one of the two models, or put one between them that makes the other of "
      "it\n");
  EXPECT_NE(ends("y:FP32[4]", "x:FP16[4]").find("FP32 is not FP16"), std::string::npos);
  EXPECT_NE(ends("y:FP32[4]", "x:FP32[4,1]").find("one has 1 sizes, the other 2"),
            std::string::npos);
  EXPECT_EQ(ends("y:FP32[1..8]", "x:FP32[4..16]"), "");
  EXPECT_NE(ends("y:FP32[1..8]", "x:FP32[9..16]").find("size 0 is 1..8 and 9..16"),
            std::string::npos);
  EXPECT_EQ(ends("y:FP32[b]", "x:FP32[4]", "y:FP32[b]", "x:FP32[1..9]"), "");
  EXPECT_NE(ends("y:FP32[b]", "x:FP32[4]", "y:FP32[b]", "x:FP32[5]").find("'b.y -> a.x' is given"),
            std::string::npos);
  EXPECT_NE(ends("y:FP32[b]", "x:FP32[c]", "y:FP32[b,4]", "x:FP32[5,c]").find("size 1 is 4 and 5"),
            std::string::npos);
}

TEST(Prove, PartsAreProvedToo) {
  Program program = members({{meeting("again", Kind::Loop)}, {meeting("again", Kind::Loop)}});
  program.parts = {ring(1)};
  program.parts[0].name = "body";
  program.rows[0][0].parts = program.rows[1][0].parts = {0};
  EXPECT_EQ(text_of(program), "");
  program.parts[0].parts = {ring(1), ring(0)};
  program.parts[0].parts[1].name = "inner";
  const auto knot = find_knot(program);
  ASSERT_TRUE(knot);
  EXPECT_EQ(knot->part, 2) << "after the body and the first part of the body";
  EXPECT_EQ(knot->suggestion.part, 2);
  EXPECT_EQ(knot->text(program).substr(0, 42), "program 'members', part 'inner', rule data");
  EXPECT_FALSE(find_knot(apply(program, knot->suggestion)));
  program.parts[0].parts[1] = ring(1);
  program.channels = {
      {.name = "k", .given = parse_port("y:FP32[b]"), .taken = parse_port("x:FP32[3]")}};
  program.parts[0].channels[0].given = parse_port("y:FP32[b]");
  program.parts[0].channels[0].taken = parse_port("x:FP32[4]");
  EXPECT_NE(text_of(program).find("part 'body', rule shapes: 'a.y -> b.x'"), std::string::npos)
      << "names hold for all parts";
}

TEST(Prove, ChannelsThatDoNotWaitBindNobody) {
  Program program = ring(0);
  EXPECT_FALSE(hangs_on_timing(program));
  program.channels[1].waits = false;
  program.rows[1][0].gives[0].count = 7;
  EXPECT_EQ(text_of(program), "");
  EXPECT_TRUE(hangs_on_timing(program));
  program.rows[1][0].gives.clear();
  EXPECT_FALSE(hangs_on_timing(program)) << "what is held has one end";
  program.parts = {ring(0)};
  program.parts[0].channels[0].waits = false;
  EXPECT_TRUE(hangs_on_timing(program));
}

TEST(Prove, PlacesThatDoNotExistAreBugs) {
  Program program = ring(1);
  program.rows[0][0].takes[0].channel = 2;
  EXPECT_THROW(find_knot(program), Error);
  program = members({{meeting("a")}, {meeting("a")}});
  program.rows[0][0].group = 1;
  EXPECT_THROW(find_knot(program), Error);
}

TEST(Prove, RulesHaveNames) {
  std::set<std::string> names;
  for (int rule = 0; rule < kNumRules; ++rule) names.insert(rule_name(Rule(rule)));
  EXPECT_EQ(names.size(), size_t(kNumRules));
}

// ---- against an oracle ----

// Whether each step of a circle waits for the next, within one round, and at a moment that the step
// before it needs. Counts values one by one.
std::string doubt_of(const Program& whole, const Knot& knot) {
  const Program& p = *with_parts(whole)[size_t(knot.part + 1)];
  const auto values = [&](int queue, int channel, bool gives) {  // whose each is, of a round
    std::vector<size_t> owners;
    const auto& row = p.rows[size_t(queue)];
    for (size_t i = 0; i < row.size(); ++i)
      for (const auto& access : gives ? row[i].gives : row[i].takes)
        if (access.channel == channel) owners.insert(owners.end(), size_t(access.count), i);
    return owners;
  };
  const auto nth = [&](const Knot::Step& step) {  // of its meetings with the same, on its queue
    const auto& row = p.rows[size_t(step.queue)];
    const auto& o = row[step.index];
    return std::count_if(row.begin(), row.begin() + int64_t(step.index),
                         [&](const Operation& other) {
                           if (!other.meets()) return false;
                           return o.group >= 0 ? other.group == o.group
                                               : other.kind == o.kind && other.peer == o.peer;
                         });
  };
  bool needs_only_take = false;  // of the step before: what it waits for comes right after our take
  for (size_t k = 0; k < 2 * knot.circle.size(); ++k) {
    const auto& a = knot.circle[k % knot.circle.size()];
    const auto& b = knot.circle[(k + 1) % knot.circle.size()];
    const auto& mine = p.rows[size_t(a.queue)][a.index];
    const auto& theirs = p.rows[size_t(b.queue)][b.index];
    if (k > 0 && needs_only_take && a.rule != Rule::Data) return cat(mine.name, " waits too late");
    bool waits = false;
    if (a.rule == Rule::Messages) {
      waits = mine.peer == b.queue && theirs.peer == a.queue && mine.kind != theirs.kind &&
              !mine.what.empty() && nth(a) == nth(b);
    } else if (a.rule == Rule::Collectives) {
      waits =
          mine.group >= 0 && mine.group == theirs.group && a.queue != b.queue && nth(a) == nth(b);
    } else if (a.channel < 0) {
      waits = a.rule == Rule::Data && a.queue == b.queue && b.index < a.index;
    } else {
      const auto& channel = p.channels[size_t(a.channel)];
      const bool gives = a.rule == Rule::Capacity;
      const auto ours = values(a.queue, a.channel, gives),
                 others = values(b.queue, a.channel, !gives);
      for (size_t n = 0; n < ours.size(); ++n) {
        const int64_t m =
            int64_t(n) + (gives ? channel.initial - channel.capacity : -channel.initial);
        waits |= ours[n] == a.index && m >= 0 && m < int64_t(others.size()) &&
                 others[size_t(m)] == b.index;
      }
    }
    if (!waits) return cat(mine.name, " does not wait for ", theirs.name);
    needs_only_take = a.rule != Rule::Data;
  }
  return "";
}

#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr bool kTimed = true;
#else
constexpr bool kTimed = false;
#endif

TEST(Prove, AgreesWithAReplayOnRandomPrograms) {
  using Harm = detail::Maker::Harm;
  constexpr int kPrograms = 20'000, kLeast = 6, kMost = 60;
  detail::Crew crew(5);
  std::array<int, kMost + 1> live_of{}, dead_of{};                 // by number of operations
  std::array<int, size_t(Harm::Meaning) + 1> refuted{}, harmed{};  // by what was done
  std::array<int, kNumRules> knots{}, unsuggested{}, missed{};
  for (int n = 0; n < kPrograms; ++n) {
    detail::Maker maker{uint32_t(n)};
    Program program;
    do program = maker.live(kLeast + n % (kMost - kLeast + 1));
    while (program.num_operations() < kLeast || program.num_operations() > kMost);
    auto harm = Harm::None;
    for (const bool harms = maker.chance(0.66); harms && harm == Harm::None;)
      harm = maker.damage(program);
    const std::string wrong = detail::Oracle::judge(program);
    const auto knot = find_knot(program);
    ASSERT_EQ(!knot, wrong.empty())
        << "program " << n << ": " << wrong << "\n"
        << (knot ? knot->text(program) : "passes\n") << to_text(program);
    ++(knot ? dead_of : live_of)[program.num_operations()];
    ++harmed[size_t(harm)];
    refuted[size_t(harm)] += knot.has_value();
    if (!knot) {
      ASSERT_EQ(detail::Threaded::run(crew, program, 2, uint32_t(n)), "") << n << "\n"
                                                                          << to_text(program);
      continue;
    }
    ++knots[size_t(knot->rule)];
    ASSERT_EQ(doubt_of(program, *knot), "") << n << "\n" << knot->text(program) << to_text(program);
    if (knot->suggestion.kind == Suggestion::Kind::None) {
      ++unsuggested[size_t(knot->rule)];
      EXPECT_TRUE(knot->rule == Rule::Races || harm >= Harm::Port)
          << "what was moved or counted can be undone: " << n << "\n"
          << knot->text(program) << to_text(program);
    } else {
      const Program better = apply(program, knot->suggestion);
      ASSERT_FALSE(find_knot(better)) << n << "\n" << knot->text(program);
      ASSERT_EQ(detail::Oracle::judge(better), "") << n << "\n" << knot->text(program);
    }
    for (int rule = 0; rule < kNumRules; ++rule)
      missed[size_t(rule)] += !find_knot(program, {.without = {Rule(rule)}, .suggest = false});
  }
  for (size_t size = kLeast; size <= kMost; ++size) {
    const int of_size = live_of[size] + dead_of[size];
    EXPECT_GT(of_size, 100) << "of " << size << " operations";
    EXPECT_GE(live_of[size] * 10, of_size * 4) << "of " << size << " operations";
    EXPECT_LE(live_of[size] * 10, of_size * 6) << "of " << size << " operations";
  }
  EXPECT_EQ(refuted[size_t(Harm::None)], 0);
  for (size_t harm = 1; harm < refuted.size(); ++harm) {
    std::cout << "harm " << harm << ": " << refuted[harm] << " of " << harmed[harm] << " refuted\n";
    EXPECT_GT(refuted[harm], 0) << "harm " << harm << " never does any";
  }
  for (size_t rule = 0; rule < knots.size(); ++rule) {
    std::cout << rule_name(Rule(rule)) << ": " << knots[rule] << " knots, " << unsuggested[rule]
              << " without a suggestion, " << missed[rule] << " missed without the rule\n";
    EXPECT_GT(missed[rule], 0) << "a prover without rule " << rule_name(Rule(rule))
                               << " is as good";
  }
}

// Stages on queues, some micro-batches deep: what a queue does is in one order with what the others
// do; each reads the weights that the last operation writes.
Program large(size_t num_operations) {
  constexpr int kQueues = 16;
  Program program{.name = "large", .buffers = {"weights"}};
  std::vector<int> all;
  for (int q = 0; q < kQueues; ++q) {
    program.queues.push_back(cat("cpu:", q));
    program.rows.emplace_back();
    all.push_back(q);
  }
  program.groups = {{"all", all}};
  for (int q = 0; q + 1 < kQueues; ++q)
    program.channels.push_back({.name = cat("stage ", q, " -> ", q + 1), .capacity = 2});
  program.channels.push_back({.name = "back", .capacity = 2, .initial = 2});
  for (size_t n = 0; program.num_operations() + 2 * kQueues <= num_operations; ++n)
    for (int q = 0; q < kQueues; ++q)
      program.rows[size_t(q)].push_back({.name = cat("stage", q, ".", n),
                                         .takes = {{q == 0 ? kQueues - 1 : q - 1}},
                                         .gives = {{q}},
                                         .uses = {{0, false}}});
  for (const auto* what : {"grads", "step"})
    for (int q = 0; q < kQueues; ++q)
      program.rows[size_t(q)].push_back(
          {.name = what, .kind = Kind::Collective, .group = 0, .what = what});
  program.rows[0].insert(program.rows[0].end() - 1, {.name = "write", .uses = {{0, true}}});
  return program;
}

TEST(Prove, TenThousandOperationsTakeLessThanASecond) {
  Program program = large(10'000);
  ASSERT_GE(program.num_operations(), 9'980u);
  const auto seconds = [&](bool live) {
    const auto start = std::chrono::steady_clock::now();
    const auto knot = find_knot(program);
    const double time =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_EQ(!knot, live) << (knot ? knot->text(program) : "");
    std::cout << program.num_operations() << " operations, "
              << (live ? "live" : rule_name(knot->rule)) << ": " << time << " s\n";
    return time;
  };
  const double limit = kTimed ? 1 : 60;
  EXPECT_LT(seconds(true), limit);
  std::swap(program.rows[3][300], program.rows[3].back());
  EXPECT_LT(seconds(false), limit) << "one member steps too early";
  program = large(10'000);
  program.channels.back().initial = 0;
  EXPECT_LT(seconds(false), limit) << "nobody begins";
  program = large(10'000);
  program.rows[9][100].uses[0].writes = true;
  EXPECT_LT(seconds(false), limit) << "two write, and no change of an order helps";
}

}  // namespace
}  // namespace yoke::plan
