// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

using OpKind = Operation::Kind;
constexpr ReplayCosts kFreeMessages{.bytes_per_s = std::numeric_limits<double>::infinity(),
                                    .latency = 0};

Program queues(int number) {
  Program program{.name = "test"};
  for (int q = 0; q < number; ++q) program.queues.push_back(cat("cpu:", q));
  program.rows.resize(size_t(number));
  return program;
}

Operation compute(std::string name, double cost, std::vector<Access> takes = {},
                  std::vector<Access> gives = {}) {
  return {
      .name = std::move(name), .takes = std::move(takes), .gives = std::move(gives), .cost = cost};
}

// a -> b -> …, each on a queue of its own.
Program chain(const std::vector<double>& costs, int64_t capacity = 1) {
  Program program = queues(int(costs.size()));
  for (int q = 0; q < int(costs.size()); ++q) {
    auto& operation = program.rows[size_t(q)].emplace_back();
    operation = compute(std::string(1, char('a' + q)), costs[size_t(q)]);
    if (q > 0) operation.takes = {{q - 1}};
    if (q + 1 == int(costs.size())) break;
    operation.gives = {{q}};
    program.channels.push_back(
        {.name = cat(char('a' + q), " -> ", char('a' + q + 1)), .capacity = capacity});
  }
  return program;
}

// "a, a -> b: b, c": names, with the channels that they waited for.
std::string path_text(const Program& program, const Replayed& replayed) {
  std::vector<std::string> links;
  for (const auto& [queue, timed, channel] : replayed.critical) {
    const auto& name = program.rows[size_t(queue)][timed.index].name;
    links.push_back(channel < 0 ? name : cat(program.channels[size_t(channel)].name, ": ", name));
  }
  return join(links, ", ");
}

TEST(Replay, AChainGoesAtThePaceOfItsSlowestStage) {
  const auto program = chain({1, 2, 4, 1});
  const auto replayed = replay(program, 10, kFreeMessages);
  ASSERT_TRUE(replayed);
  EXPECT_DOUBLE_EQ(replayed->period, 4);
  EXPECT_DOUBLE_EQ(replayed->makespan, 1 + 2 + 10 * 4 + 1);
  EXPECT_DOUBLE_EQ(replayed->busy[2], 40.0 / 44);
  EXPECT_DOUBLE_EQ(replayed->busy[3], 10.0 / 44);
  for (const auto& row : replayed->rows) EXPECT_EQ(row.size(), 10u);
  EXPECT_EQ(path_text(program, *replayed),
            "a, a -> b: b, b -> c: c, c, c, c, c, c, c, c, c, c, c -> d: d");
}

TEST(Replay, WhatCostsNothingKnownTakesTheTimeOfAnOperation) {
  const auto replayed = replay(chain({0, 0}), 1, {.operation = 3, .bytes_per_s = 1, .latency = 1});
  EXPECT_DOUBLE_EQ(replayed->makespan, 3 + 1 + 3);
  EXPECT_DOUBLE_EQ(replayed->period, 7);
}

TEST(Replay, TheOrderOfQueuesChangesNoTime) {
  const auto program = chain({1, 3, 2, 2});
  auto turned = program;
  std::ranges::reverse(turned.rows);
  const auto one = replay(program, 7), other = replay(turned, 7);
  for (size_t q = 0; q < 4; ++q)
    for (size_t i = 0; i < 7; ++i)
      EXPECT_EQ(one->rows[q][i].end, other->rows[3 - q][i].end) << q << " " << i;
}

// Four models between a source and a mean, each on its queue or all on one.
TEST(Replay, AnEnsembleOnFourQueuesTakesAsLongAsItsSlowestMember) {
  auto ensemble = [](int number) {
    Program program = queues(number);
    program.channels.resize(8);
    const double costs[] = {1, 2, 3, 1};
    program.rows[0].push_back(compute("source", 0.5, {}, {{0}, {1}, {2}, {3}}));
    for (int i = 0; i < 4; ++i)
      program.rows[size_t(i % number)].push_back(
          compute(cat("model", i), costs[i], {{i}}, {{4 + i}}));
    program.rows[0].push_back(compute("mean", 0.5, {{4}, {5}, {6}, {7}}));
    return replay(program, 9, kFreeMessages);
  };
  EXPECT_DOUBLE_EQ(ensemble(4)->period, 0.5 + 3 + 0.5);
  EXPECT_DOUBLE_EQ(ensemble(2)->period, 0.5 + 4 + 0.5);
  EXPECT_DOUBLE_EQ(ensemble(1)->period, 0.5 + 7 + 0.5);
  EXPECT_DOUBLE_EQ(ensemble(1)->busy[0], 1);
}

// What d takes of a has to wait for b and c, and a for it.
TEST(Replay, ASkipNeedsRoomForTheRoundsThatItSpans) {
  auto period = [](int64_t capacity) {
    auto program = chain({1, 1, 1, 1});
    program.channels.push_back({.name = "a -> d", .capacity = capacity});
    program.rows[0][0].gives.push_back({3});
    program.rows[3][0].takes.push_back({3});
    return replay(program, 21, kFreeMessages)->period;
  };
  EXPECT_DOUBLE_EQ(period(1), 2);
  EXPECT_DOUBLE_EQ(period(2), 1);
  EXPECT_DOUBLE_EQ(period(3), 1);
}

TEST(Replay, ACircleGoesAsManyRoundsAtOnceAsItHoldsValues) {
  auto period = [](int64_t initial) {
    auto program = chain({1, 1, 1});
    program.channels.push_back({.name = "c -> a", .capacity = 4, .initial = initial});
    program.rows[2][0].gives = {{2}};
    program.rows[0][0].takes = {{2}};
    return replay(program, 31, kFreeMessages)->period;
  };
  EXPECT_DOUBLE_EQ(period(1), 3);
  EXPECT_NEAR(period(2), 1.5, 0.05);
  EXPECT_DOUBLE_EQ(period(3), 1);
}

TEST(Replay, SeveralValuesAreTakenAtOnce) {
  auto program = chain({1, 1}, 4);
  program.rows[1][0].takes[0].count = 3;
  for (int i = 0; i < 2; ++i) program.rows[0].push_back(program.rows[0][0]);
  const auto replayed = replay(program, 5, kFreeMessages);
  EXPECT_DOUBLE_EQ(replayed->period, 3);
  EXPECT_DOUBLE_EQ(replayed->rows[1][0].begin, 3);
}

TEST(Replay, NobodyWaitsForAChannelThatDoesNotWait) {
  auto program = chain({1, 5});
  program.channels[0].waits = false;
  const auto replayed = replay(program, 4, kFreeMessages);
  EXPECT_DOUBLE_EQ(replayed->rows[0].back().end, 4);
  EXPECT_DOUBLE_EQ(replayed->rows[1][0].begin, 0);
  EXPECT_EQ(replayed->costliest_channel, -1);
}

TEST(Replay, MembersOfAGroupBeginWhenTheLastIsThere) {
  Program program = queues(3);
  program.groups = {{"all", {0, 1, 2}}};
  for (int q = 0; q < 3; ++q)
    program.rows[size_t(q)] = {
        compute(cat("grow", q), q + 1),
        {.name = "sum", .kind = OpKind::Collective, .group = 0, .what = "sum", .cost = 0.5}};
  const auto replayed = replay(program, 3, kFreeMessages);
  EXPECT_DOUBLE_EQ(replayed->period, 3.5);
  for (const auto& row : replayed->rows) {
    EXPECT_DOUBLE_EQ(row[1].begin, 3);
    EXPECT_DOUBLE_EQ(row[1].end, 3.5);
  }
  EXPECT_EQ(path_text(program, *replayed), "grow2, sum, grow2, sum, grow2, sum");
}

TEST(Replay, AMessageTakesItsLatencyAndItsBytes) {
  Program program = queues(2);
  program.channels = {{.name = "a -> send", .bytes = 100}, {.name = "recv -> b", .bytes = 100}};
  program.rows[0] = {
      compute("a", 1, {}, {{0}}),
      {.name = "send", .kind = OpKind::Send, .takes = {{0}}, .peer = 1, .cost = 0.25}};
  program.rows[1] = {compute("late", 3),
                     {.name = "recv", .kind = OpKind::Recv, .gives = {{1}}, .peer = 0, .cost = 0.5},
                     compute("b", 1, {{1}})};
  const auto replayed = replay(program, 2, {.bytes_per_s = 50, .latency = 0.5});
  for (const auto& row : replayed->rows) {
    EXPECT_DOUBLE_EQ(row[1].begin, 3);
    EXPECT_DOUBLE_EQ(row[1].end, 3 + 0.5 + 0.5 + 2) << "the longer cost, latency, bytes";
  }
  EXPECT_EQ(path_text(program, *replayed), "late, recv, b, late, recv, b");
}

// Two queues enter together; each is in it as long as its own rounds of the body take.
Program with_part(OpKind kind) {
  Program program = queues(2);
  program.groups = {{"both", {0, 1}}};
  program.parts = {chain({1, 2})};
  for (int q = 0; q < 2; ++q)
    program.rows[size_t(q)] = {
        compute(cat("before", q), q + 1),
        {.name = "part", .kind = kind, .group = 0, .what = "part", .parts = {0}}};
  return program;
}

TEST(Replay, ALoopTakesTheRoundsOfItsBody) {
  auto program = with_part(OpKind::Loop);
  auto costs = kFreeMessages;
  costs.loop_rounds = 3;
  const auto replayed = replay(program, 2, costs);
  EXPECT_DOUBLE_EQ(replayed->rows[0][1].begin, 2);
  EXPECT_DOUBLE_EQ(replayed->rows[0][1].end, 2 + 3);
  EXPECT_DOUBLE_EQ(replayed->rows[1][1].end, 2 + 1 + 3 * 2);
  EXPECT_DOUBLE_EQ(replayed->busy[0], 2 * (1 + 3) / replayed->makespan);
  EXPECT_DOUBLE_EQ(replayed->period, 9);
  costs.loop_rounds = 5;
  EXPECT_DOUBLE_EQ(replay(program, 2, costs)->period, 13);
  for (auto& row : program.rows) row[1].cost = 0.25;
  EXPECT_DOUBLE_EQ(replay(program, 2, costs)->period, 13.25) << "what the entry costs is on top";
}

TEST(Replay, ALoopWhoseTurnsAreKnownTakesThem) {
  auto program = with_part(OpKind::Loop);
  for (const int64_t turns : {1, 5, 64, 1000}) {  // the last from what the first ones take
    for (auto& row : program.rows) row[1].turns = turns;
    const auto replayed = replay(program, 1, kFreeMessages);
    EXPECT_DOUBLE_EQ(replayed->rows[1][1].end, 2 + 1 + 2 * double(turns));
    EXPECT_DOUBLE_EQ(replayed->busy[1] * replayed->makespan, 2 + 2 * double(turns));
  }
}

// "before1, part, part: a, a -> b: part: b": with the channels that they waited for.
std::string named_path(const Program& program, const Replayed& replayed) {
  std::vector<std::string> links;
  for (const auto& [queue, timed, channel] : replayed.critical) {
    const auto& channels = part_of(program, timed.parts).channels;
    links.push_back(cat(channel < 0 ? "" : channels[size_t(channel)].name + ": ",
                        name_of(program, queue, timed)));
  }
  return join(links, ", ");
}

TEST(Replay, ThePathAndTheWaitsGoThroughTheBodiesOfLoops) {
  auto program = with_part(OpKind::Loop);
  program.parts[0].name = "body";
  for (const int64_t turns : {2, 3, 100}) {
    for (auto& row : program.rows) row[1].turns = turns;
    const auto replayed = replay(program, 1, kFreeMessages);
    EXPECT_EQ(
        named_path(program, *replayed),
        cat("before1, part, body: a, a -> b: body: b, body: b", turns > 2 ? ", body: b" : ""));
    const auto& last = replayed->critical.back().timed;
    EXPECT_EQ(last.turn, turns - 1);
    EXPECT_DOUBLE_EQ(last.end, replayed->makespan);
    // Two turns and the last; b waits 1 s for the first value, a from its fourth on for room.
    EXPECT_EQ(replayed->rows[0].size(), 2 + size_t(std::min<int64_t>(turns, 3)));
    EXPECT_EQ(replayed->costliest_parts, std::vector<int>{0});
    EXPECT_EQ(replayed->costliest_channel, 0);
    EXPECT_DOUBLE_EQ(replayed->costliest_wait, double(std::max<int64_t>(turns - 2, 1)));
  }
}

TEST(Replay, PicturesShowWhatIsInsideOfLoopsAndBranches) {
  auto program = with_part(OpKind::Loop);
  program.parts[0].name = "inner";
  auto outer = with_part(OpKind::Branch);
  outer.parts = {program, program};
  outer.parts[0].name = outer.parts[1].name = "arm";
  outer.parts[1].rows[1][0].cost = 9;
  for (auto& row : outer.rows) row[1].parts = {0, 1};
  const auto replayed = *replay(outer, 2, kFreeMessages);
  EXPECT_EQ(named_path(outer, replayed).substr(0, 60),
            "before1, part, arm: before1, arm: part, arm: inner: a, a -> ");
  EXPECT_NE(draw_svg(outer, replayed)
                .find("<title>arm: inner: b, round 1, turn 2, 34000 ms to 36000 ms</title>"),
            std::string::npos)
      << draw_svg(outer, replayed);
  std::ostringstream out;
  write_trace(outer, replayed, out);
  EXPECT_NE(out.str().find(R"({"name":"arm: inner: a","cat":"compute")"), std::string::npos);
}

TEST(Replay, ABranchTakesItsCostlierArm) {
  auto program = with_part(OpKind::Branch);
  program.parts.push_back(chain({1, 7}));
  for (auto& row : program.rows) row[1].parts = {0, 1};
  EXPECT_DOUBLE_EQ(replay(program, 1, kFreeMessages)->makespan, 2 + 1 + 7);
}

TEST(Replay, TheEdgeWithManyBytesIsTheCostliest) {
  auto program = chain({1, 1, 1});
  const ReplayCosts costs{.bytes_per_s = 10, .latency = 0};
  EXPECT_DOUBLE_EQ(replay(program, 9, costs)->period, 1);
  program.channels[1].bytes = 50;
  const auto once = replay(program, 1, costs);
  EXPECT_EQ(path_text(program, *once), "a, a -> b: b, b -> c: c");
  const auto replayed = replay(program, 9, costs);
  EXPECT_DOUBLE_EQ(replayed->period, 5);
  EXPECT_EQ(replayed->costliest_channel, 1);
  // c waits 2 + 5 s for the first value and 4 s for each of 8; b as often 4 s for room.
  EXPECT_DOUBLE_EQ(replayed->costliest_wait, 7 + 8 * 4 + 8 * 4);
  ASSERT_EQ(replayed->critical.back().channel, 1);
  program.channels[1].capacity = 9;
  EXPECT_DOUBLE_EQ(replay(program, 9, costs)->period, 5) << "one value after the other";
}

TEST(Replay, AValueThatDoesNotMoveCostsNothingAndOneThatMovesDoesOnOneQueueToo) {
  auto program = chain({1, 1});
  program.channels[0].bytes = 50;
  const ReplayCosts costs{.bytes_per_s = 10, .latency = 2};
  EXPECT_DOUBLE_EQ(replay(program, 1, costs)->makespan, 1 + 5 + 2 + 1);
  program.channels[0].moves = false;
  EXPECT_DOUBLE_EQ(replay(program, 1, costs)->makespan, 2);
  EXPECT_DOUBLE_EQ(replay(program, 9, costs)->period, 1);
  program.rows[0].push_back(program.rows[1][0]);
  program.rows[1].clear();
  program.channels[0].moves = {};
  EXPECT_DOUBLE_EQ(replay(program, 1, costs)->makespan, 2) << "none said: on its queue at once";
  program.channels[0].moves = true;
  EXPECT_DOUBLE_EQ(replay(program, 1, costs)->makespan, 1 + 5 + 2 + 1);
}

TEST(Replay, ASlowConsumerHoldsAFullChannelAndWhatItWorksOn) {
  for (const int64_t capacity : {1, 2, 5}) {
    auto program = chain({1, 10}, capacity);
    program.channels[0].bytes = 100;
    const auto replayed = replay(program, 12, kFreeMessages);
    EXPECT_DOUBLE_EQ(replayed->peak_bytes[1], double(capacity + 1) * 100);
    EXPECT_DOUBLE_EQ(replayed->peak_bytes[0], 0);
    program.channels[0].initial = capacity;
    EXPECT_DOUBLE_EQ(replay(program, 12, kFreeMessages)->peak_bytes[1], double(capacity + 1) * 100);
  }
  auto program = chain({10, 1}, 5);
  program.channels[0].bytes = 100;
  EXPECT_DOUBLE_EQ(replay(program, 12, kFreeMessages)->peak_bytes[1], 100) << "a fast one";
}

std::string stuck_text(const Program& program, int64_t rounds = 3) {
  std::string stuck;
  EXPECT_FALSE(replay(program, rounds, {}, &stuck));
  return stuck;
}

TEST(Replay, StuckQueuesSayWhatTheyWaitFor) {
  auto circle = chain({1, 1});
  circle.channels.push_back({.name = "b -> a"});
  circle.rows[0][0].takes = {{1}};
  circle.rows[1][0].gives = {{1}};
  EXPECT_EQ(stuck_text(circle),
            "cpu:0: a in round 0 waits for a value of 'b -> a', which holds 0 of the 1 that it "
            "takes\n"
            "cpu:1: b in round 0 waits for a value of 'a -> b', which holds 0 of the 1 that it "
            "takes");
  circle.channels[1].initial = 1;
  EXPECT_TRUE(replay(circle, 3));

  auto full = chain({1, 1});
  full.rows[1][0].takes.clear();
  EXPECT_EQ(stuck_text(full),
            "cpu:0: a in round 1 waits for room in 'a -> b', which holds 1 of at most 1, for 1 "
            "more");
}

TEST(Replay, StuckMeetingsNameWhoIsMissing) {
  Program senders = queues(2);
  for (int q = 0; q < 2; ++q)
    senders.rows[size_t(q)] = {{.name = cat("send", q), .kind = OpKind::Send, .peer = 1 - q},
                               {.name = cat("recv", q), .kind = OpKind::Recv, .peer = 1 - q}};
  EXPECT_EQ(stuck_text(senders),
            "cpu:0: send0 in round 0 waits for cpu:1 to receive\n"
            "cpu:1: send1 in round 0 waits for cpu:0 to receive");
  std::swap(senders.rows[1][0], senders.rows[1][1]);
  EXPECT_TRUE(replay(senders, 3));

  Program groups = queues(2);
  groups.groups = {{"one", {0, 1}}, {"two", {0, 1}}};
  for (int q = 0; q < 2; ++q)
    for (int g = 0; g < 2; ++g)
      groups.rows[size_t(q)].push_back(
          {.name = cat("sum", g), .kind = OpKind::Collective, .group = (q + g) % 2});
  EXPECT_EQ(stuck_text(groups),
            "cpu:0: sum0 in round 0 waits for cpu:1 in the group 'one'\n"
            "cpu:1: sum0 in round 0 waits for cpu:0 in the group 'two'");

  auto inside = with_part(OpKind::Loop);
  inside.parts[0].rows[0][0].gives.clear();
  EXPECT_EQ(stuck_text(inside),
            "inside of part\n"
            "cpu:1: b in round 0 waits for a value of 'a -> b', which holds 0 of the 1 that it "
            "takes");
}

TEST(Replay, CostsThatMakeNoSenseAreRefused) {
  const auto program = chain({1, 1});
  EXPECT_THROW(replay(program, 0), Error);
  EXPECT_THROW(replay(program, 1, {.bytes_per_s = 0}), Error);
  EXPECT_THROW(replay(program, 1, {.latency = -1}), Error);
}

// Whatever is opened is closed again in order, and every < and & means something.
bool is_xml(const std::string& text) {
  std::vector<std::string> open;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '&') {
      bool known = false;
      for (const auto* entity : {"&lt;", "&gt;", "&amp;", "&quot;"})
        known |= text.compare(i, std::string(entity).size(), entity) == 0;
      if (!known) return false;
    }
    if (text[i] != '<') continue;
    const size_t close = text.find('>', i);
    if (close == std::string::npos) return false;
    const std::string tag = text.substr(i + 1, close - i - 1);
    if (std::ranges::count(tag, '"') % 2 != 0) return false;
    if (tag.front() == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
    i = close;
  }
  return open.empty();
}

// Reads one value from `at` on and leaves `at` behind it.
bool read_json(const std::string& text, size_t& at) {
  auto space = [&] { at = std::min(text.find_first_not_of(" \n", at), text.size()); };
  auto read = [&](char c) { return space(), at < text.size() && text[at] == c && ++at; };
  auto string = [&] {
    if (!read('"')) return false;
    for (; at < text.size() && text[at] != '"'; ++at) {
      if (uint8_t(text[at]) < 0x20) return false;
      if (text[at] == '\\') ++at;
    }
    return read('"');
  };
  space();
  for (const auto& [begin, end] : {std::pair{'{', '}'}, std::pair{'[', ']'}})
    if (read(begin)) {
      if (read(end)) return true;
      do {
        if (begin == '{' && !(string() && read(':'))) return false;
        if (!read_json(text, at)) return false;
      } while (read(','));
      return read(end);
    }
  if (at < text.size() && text[at] == '"') return string();
  const size_t first = at;
  at = std::min(text.find_first_not_of("0123456789.+-e", at), text.size());
  return at > first;
}

Program badly_named() {
  auto program = chain({1, 2, 1});
  program.name = "a \"flow\" & <more>";
  program.rows[1][0].name = "b<x>&\"\\\n";
  program.queues[2] = "<cuda & co>";
  return program;
}

TEST(Replay, ATextPictureShowsQueuesDownwardsAndTimeToTheRight) {
  const auto program = chain({1, 2, 1});
  EXPECT_EQ(draw_text(program, *replay(program, 3, kFreeMessages)),
            "cpu:0    a---a---a---....................\n"
            "cpu:1    ....b-------b-------b-------....\n"
            "cpu:2    ............c---....c---....c---\n");
  auto named = program;
  named.rows[1][0].name = "transformer";
  EXPECT_EQ(draw_text(named, *replay(named, 1, kFreeMessages)),
            "cpu:0    a---............\n"
            "cpu:1    ....transfor....\n"
            "cpu:2    ............c---\n");
  for (const int columns : {50, 80, 120})
    for (const auto& line : split(draw_text(program, *replay(program, 500), columns), '\n'))
      EXPECT_LE(int(line.size()), columns);
}

TEST(Replay, ASvgPictureIsXmlWhateverTheNamesAre) {
  ASSERT_FALSE(is_xml("<a><b></a>"));
  ASSERT_FALSE(is_xml("<a>b & c</a>"));
  const auto program = badly_named();
  const auto svg = draw_svg(program, *replay(program, 3, kFreeMessages));
  EXPECT_TRUE(is_xml(svg)) << svg;
  EXPECT_NE(svg.find("<title>a, round 1, 1000 ms to 2000 ms</title>"), std::string::npos) << svg;
  EXPECT_NE(svg.find("b&lt;x&gt;&amp;"), std::string::npos);
  EXPECT_NE(svg.find("critical path"), std::string::npos);
  EXPECT_TRUE(is_xml(draw_svg(queues(2), *replay(queues(2), 1)))) << "nothing to do";
}

TEST(Replay, ATraceIsJsonWhateverTheNamesAre) {
  const auto program = badly_named();
  std::ostringstream out;
  write_trace(program, *replay(program, 3, kFreeMessages), out);
  size_t at = 0;
  EXPECT_TRUE(read_json(out.str(), at)) << out.str().substr(at);
  EXPECT_EQ(out.str().substr(at), "\n");
  EXPECT_NE(out.str().find(R"({"name":"a","cat":"compute","ph":"X","pid":1,"tid":0,"ts":1e+06,)"
                           R"("dur":1e+06,"args":{"round":1}})"),
            std::string::npos)
      << out.str();
}

}  // namespace
}  // namespace yoke::plan
