// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/trace.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <thread>

#include "yoke/base/text.h"

using namespace yoke;
using namespace yoke::observe;
using namespace std::chrono_literals;

namespace {

std::string trace_of(const Tracer& tracer) {
  std::ostringstream out;
  tracer.write_chrome_trace(out);
  return out.str();
}

// The lines of the trace that are spans.
std::vector<std::string> spans_of(const Tracer& tracer) {
  std::vector<std::string> spans;
  for (const auto& line : split(trace_of(tracer), '\n'))
    if (line.find(R"("ph":"X")") != std::string::npos) spans.push_back(line);
  return spans;
}

// What stands after `"key":` in the line.
std::string value_of(const std::string& line, const std::string& key) {
  const auto at = line.find('"' + key + "\":");
  if (at == std::string::npos) return "";
  const auto begin = at + key.size() + 3;
  return line.substr(begin, line.find_first_of(",}", begin) - begin);
}

}  // namespace

TEST(Tracer, WritesTheChromeTraceFormat) {
  ManualClock clock;
  Tracer tracer(clock);
  tracer.name_thread(3, "main");
  clock.advance(1500us);
  {
    Span span(&tracer, "all_reduce", Category::Comm);
    clock.advance(2ms + 7ns);
  }
  EXPECT_EQ(
      trace_of(tracer),
      R"({"displayTimeUnit":"ms","traceEvents":[)"
      "\n"
      R"({"name":"process_name","ph":"M","pid":5,"tid":1,"args":{"name":"rank 3"}},)"
      "\n"
      R"({"name":"thread_name","ph":"M","pid":5,"tid":1,"args":{"name":"main"}},)"
      "\n"
      R"({"name":"all_reduce","cat":"comm","ph":"X","ts":1500.000,"dur":2000.007,"pid":5,"tid":1})"
      "\n]}\n");
}

TEST(Tracer, WithoutSpansIsStillATrace) {
  const ManualClock clock;
  EXPECT_EQ(trace_of(Tracer(clock)), "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n]}\n");
}

TEST(Tracer, EscapesNamesOfSpansAndTracks) {
  const ManualClock clock;
  Tracer tracer(clock);
  tracer.name_thread(-1, "a\"b");
  { Span span(&tracer, "line\n\\end"); }
  const auto text = trace_of(tracer);
  EXPECT_NE(text.find(R"("args":{"name":"a\"b"})"), std::string::npos);
  EXPECT_NE(text.find(R"("name":"line\n\\end")"), std::string::npos);
  EXPECT_NE(text.find(R"("args":{"name":"no rank"})"), std::string::npos);
}

TEST(Tracer, NamesEveryCategory) {
  const ManualClock clock;
  Tracer tracer(clock);
  const std::vector<std::string> names{R"("compute")", R"("comm")", R"("wait")", R"("data")"};
  for (auto category : {Category::Compute, Category::Comm, Category::Wait, Category::Data})
    Span(&tracer, "x", category);
  const auto spans = spans_of(tracer);
  ASSERT_EQ(spans.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(value_of(spans[i], "cat"), names[i]);
}

TEST(Tracer, OuterSpanComesBeforeTheInnerOneThatBeginsWithIt) {
  ManualClock clock;
  Tracer tracer(clock);
  {
    Span outer(&tracer, "outer");
    {
      Span inner(&tracer, "inner");
      clock.advance(1us);
    }
    clock.advance(1us);
  }
  const auto spans = spans_of(tracer);
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(value_of(spans[0], "name"), R"("outer")");
  EXPECT_EQ(value_of(spans[1], "name"), R"("inner")");
}

TEST(Tracer, FullRingKeepsTheNewestSpans) {
  ManualClock clock;
  Tracer tracer(clock, 3);
  for (int i = 0; i < 3; ++i) tracer.record("x", Category::Data, Time(i * 1us), Time(i * 1us));
  EXPECT_EQ(spans_of(tracer).size(), 3u);
  EXPECT_EQ(tracer.num_overwritten(), 0u);
  for (int i = 3; i < 11; ++i) tracer.record("x", Category::Data, Time(i * 1us), Time(i * 1us));
  const auto spans = spans_of(tracer);
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(value_of(spans[0], "ts"), "8.000");
  EXPECT_EQ(value_of(spans[2], "ts"), "10.000");
  EXPECT_EQ(tracer.num_overwritten(), 8u);
}

TEST(Tracer, EveryThreadHasATrackThatOutlivesIt) {
  const ManualClock clock;
  Tracer tracer(clock);
  for (int rank = 0; rank < 3; ++rank) {
    std::jthread([&, rank] {
      tracer.name_thread(rank, "main");
      Span span(&tracer, "work");
    });
  }
  std::set<std::string> pids, tids;
  for (const auto& span : spans_of(tracer)) {
    pids.insert(value_of(span, "pid"));
    tids.insert(value_of(span, "tid"));
  }
  EXPECT_EQ(pids, (std::set<std::string>{"2", "3", "4"}));
  EXPECT_EQ(tids, (std::set<std::string>{"1", "2", "3"}));
}

TEST(Tracer, SeveralTracersOnOneThreadStayApart) {
  const ManualClock clock;
  Tracer first(clock);
  for (int i = 0; i < 4; ++i) {
    Tracer second(clock);
    { Span span(&second, "second"); }
    { Span span(&first, "first"); }
    EXPECT_EQ(spans_of(second).size(), 1u);
  }
  EXPECT_EQ(spans_of(first).size(), 4u);
}

TEST(Tracer, InternedNameLivesAsLongAsTheTracer) {
  const ManualClock clock;
  Tracer tracer(clock);
  const char* name = nullptr;
  {
    const std::string temporary = "layer 12 of a model with a long name";
    name = tracer.intern(temporary);
  }
  EXPECT_STREQ(name, "layer 12 of a model with a long name");
  EXPECT_EQ(tracer.intern("layer 12 of a model with a long name"), name);
}

TEST(Tracer, WithoutATracerASpanDoesNothing) { Span span(nullptr, "nothing"); }

// Each span is (i, i + 1000): a torn one would show another length.
TEST(Tracer, IsReadWholeWhileThreadsOverwrite) {
  const ManualClock clock;
  Tracer tracer(clock, 8);
  std::atomic<bool> stop{false};
  std::vector<std::jthread> writers;
  for (int t = 0; t < 2; ++t) {
    writers.emplace_back([&] {
      for (int64_t i = 0; !stop; ++i)
        tracer.record("x", Category::Data, Time(Duration(i)), Time(Duration(i + 1000)));
    });
  }
  for (int i = 0; i < 300; ++i)
    for (const auto& span : spans_of(tracer)) EXPECT_EQ(value_of(span, "dur"), "1.000");
  stop = true;
}
