// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/event_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "yoke/base/error.h"

using namespace yoke;
using namespace yoke::observe;
using namespace std::string_literals;
namespace fs = std::filesystem;

namespace {

class EventFileTest : public testing::Test {
 protected:
  EventFileTest() {
    folder_ = (fs::temp_directory_path() / "yoke_events_XXXXXX").string();
    if (::mkdtemp(folder_.data()) == nullptr) fail(Kind::Io, "cannot make ", folder_);
  }
  ~EventFileTest() override { fs::remove_all(folder_); }

  std::string folder_;
};

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The message of the Kind::Io that the call throws.
template <typename Call>
std::string io_error(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Io);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// Length 24, its checksum, wall time 1.5, step 300, summary { value { "a", 0.5 } }, checksum. The
// checksums are what TensorBoard's own writer makes of these bytes.
const std::string kScalar =
    "\x18\0\0\0\0\0\0\0"
    "\xA3\x7F\x4B\x22"
    "\x09\0\0\0\0\0\0\xF8\x3F"
    "\x10\xAC\x02"
    "\x2A\x0A\x0A\x08"
    "\x0A\x01\x61"
    "\x15\0\0\0\x3F"
    "\x64\x07\x6A\x3F"s;

}  // namespace

TEST_F(EventFileTest, BeginsWithTheVersionOfTheFormat) {
  const EventFile events(folder_, 1.0);
  EXPECT_EQ(contents(events.path()),
            "\x18\0\0\0\0\0\0\0"
            "\xA3\x7F\x4B\x22"
            "\x09\0\0\0\0\0\0\xF0\x3F"
            "\x1A\x0D"
            "brain.Event:2"
            "\x86\xBF\x57\x7A"s);
}

TEST_F(EventFileTest, ScalarIsOneRecordOfKnownBytes) {
  EventFile events(folder_, 1.0);
  const std::string version = contents(events.path());
  events.scalar("a", 300, 0.5, 1.5);
  events.flush();
  EXPECT_EQ(contents(events.path()), version + kScalar);
}

TEST_F(EventFileTest, WhatWasNotFlushedIsWrittenAtTheEnd) {
  std::string path;
  {
    EventFile events(folder_, 1.0);
    path = events.path();
    events.scalar("a", 300, 0.5, 1.5);
  }
  EXPECT_TRUE(contents(path).ends_with(kScalar));
}

TEST_F(EventFileTest, ManyScalarsDoNotWaitForAFlush) {
  EventFile events(folder_, 1.0);
  for (int i = 0; i < 10000; ++i) events.scalar("a", 300, 0.5, 1.5);
  EXPECT_GT(fs::file_size(events.path()), 5000 * kScalar.size());
}

TEST_F(EventFileTest, FilesOfOneFolderHaveTheirOwnNamesInTheOrderOfTime) {
  const EventFile first(folder_, 999999999.75), second(folder_, 999999999.75),
      third(folder_, 1000000000.0);
  const std::string name = fs::path(first.path()).filename();
  EXPECT_TRUE(name.starts_with("events.out.tfevents.0999999999.")) << name;
  EXPECT_TRUE(name.ends_with(cat(".", ::getpid(), ".0"))) << name;
  EXPECT_LT(first.path(), second.path());
  EXPECT_LT(second.path(), third.path());
}

TEST_F(EventFileTest, FolderThatIsNotThereIsAnIoErrorWithItsPath) {
  const std::string message = io_error([&] { EventFile(folder_ + "/no", 1.0); });
  EXPECT_NE(message.find(folder_ + "/no/events.out.tfevents.0000000001."), std::string::npos);
  EXPECT_NE(message.find("No such file or directory"), std::string::npos) << message;
}

TEST_F(EventFileTest, FullDiskIsAnIoErrorOfTheCallThatMetIt) {
  const int lowest = ::dup(STDERR_FILENO);  // the number that the next open() gets
  ::close(lowest);
  EventFile events(folder_, 1.0);
  ASSERT_EQ(fs::read_symlink(cat("/proc/self/fd/", lowest)), fs::canonical(events.path()));
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  ::dup2(full, lowest);
  ::close(full);
  events.scalar("a", 300, 0.5, 1.5);
  EXPECT_EQ(io_error([&] { events.flush(); }),
            cat("cannot write the event file '", events.path(), "': No space left on device"));
  EXPECT_THROW(
      {
        for (int i = 0; i < 10000; ++i) events.scalar("a", 300, 0.5, 1.5);
      },
      Error);
}

TEST_F(EventFileTest, RecordThatWasCutIsCompletedOnceThereIsRoom) {
  EventFile events(folder_, 1.0);
  const std::string version = contents(events.path());
  events.scalar("a", 300, 0.5, 1.5);

  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{version.size() + 10, limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = io_error([&] { events.flush(); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);

  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(contents(events.path()), version + kScalar.substr(0, 10));
  events.flush();
  EXPECT_EQ(contents(events.path()), version + kScalar);
}
