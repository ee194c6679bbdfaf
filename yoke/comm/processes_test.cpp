// SPDX-License-Identifier: Apache-2.0
// Worlds of several processes: what happens when one of them is late, stopped or killed. Each test
// starts this program again, to run one of the functions below.
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "yoke/base/rng.h"
#include "yoke/base/text.h"
#include "yoke/comm/contract_test.h"
#include "yoke/comm/run_processes.h"
#include "yoke/comm/shm/backend.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;
using topo::LaunchInfo;

void require(bool condition, const std::string& what) {
  if (!condition) fail(Kind::Internal, what);
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The functions that the processes run.

void sum(const LaunchInfo& launch, const std::string& argument) {
  run_world(launch,
            [](Communicator& comm) {
              const at::Tensor mine = at::full({1000}, comm.rank() + 1, at::kFloat);
              for (int repeat = 0; repeat < 20; ++repeat)
                comm.all_reduce(mine, ReduceOp::Max).wait();
              require(mine.max().item<float>() == float(comm.size()), "wrong maximum");
              const at::Tensor shared = comm.allocate({300'000}, at::kDouble);
              shared.fill_(comm.rank());
              comm.all_reduce(shared).wait();
              const double want = comm.size() * (comm.size() - 1) / 2.0;
              require(shared.eq(want).all().item<bool>(), "wrong sum");
            },
            {.ranks = int(*parse_int(argument))});
}

void complain(const LaunchInfo& launch, const std::string&) {
  run_world(launch, [](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 1) throw std::runtime_error("out of cheese");
    comm.barrier();
  });
}

void misuse(const LaunchInfo&, const std::string&) { fail(Kind::Usage, "no such model"); }

void come_late(const LaunchInfo& launch, const std::string& argument) {
  if (launch.rank == 1) std::this_thread::sleep_for(1500ms);
  sum(launch, argument);
}

void stay_away(const LaunchInfo& launch, const std::string&) {
  if (launch.rank == 1) {
    std::this_thread::sleep_for(60s);
    return;
  }
  run_world(launch, [](Communicator&) {}, {.meet_timeout = 30s});
}

// Random operations without end, until one rank sends itself a signal before a random one. The
// argument: that rank, the signal, a seed, and a file for the time of it. The others must hear of
// it within a second (of the deadline, if it only stopped), and by name.
void meet_an_end(const LaunchInfo& launch, const std::string& argument) {
  const auto words = split(argument, ' ');
  const int victim = int(*parse_int(words[0])), signal = int(*parse_int(words[1]));
  const auto seed = uint64_t(*parse_int(words[2]));
  const auto file = words[3];
  const auto last = int64_t(Rng(seed, "last", 0).below(0, 60));
  int64_t issued = 0;
  JoinOptions options;
  if (signal == SIGSTOP) options.run.world.timeout = 1s;
  options.run.world.before_issue = [&](int rank, OpKind) {
    if (rank != victim || issued++ < last) return;
    std::ofstream(file) << std::chrono::steady_clock::now().time_since_epoch().count();
    ::raise(signal);
  };
  const Rng rng(seed, "operations", 0);
  try {
    run_world(
        launch,
        [&](Communicator& comm) {
          const at::Tensor large = comm.allocate({100'000}, at::kFloat), small = at::ones({10});
          const at::Tensor many = at::zeros({comm.size() * 10});
          const Communicator row = comm.split(0, comm.rank());
          for (uint64_t i = 0; i < 100'000; ++i) {
            const auto& group = rng.below(2 * i, 2) == 0 ? comm : row;
            const int next = (comm.rank() + 1) % comm.size(),
                      before = (comm.rank() + comm.size() - 1) % comm.size();
            using enum Communicator::Message::Direction;
            switch (rng.below(2 * i + 1, 5)) {
              case 0:
                group.all_reduce(large).wait();
                break;
              case 1:
                group.all_gather(many, small).wait();
                break;
              case 2:
                group.barrier();
                break;
              case 3:
                group.broadcast(small, 1).wait();
                break;
              default:
                group.group({{Send, small, next}, {Recv, at::empty({10}), before}}).wait();
            }
          }
        },
        options);
  } catch (const Error& error) {
    const auto died = parse_int(read_text(file));
    require(died.has_value(), cat("failed too early: ", error.what()));
    const auto late =
        std::chrono::steady_clock::now().time_since_epoch() - std::chrono::nanoseconds(*died);
    const auto limit = signal == SIGSTOP ? 2500ms : 1000ms;
    require(late < limit, cat("heard of it after ", duration_text(late)));
    const std::string what = error.what(), name = cat("rank ", victim, " (host ");
    require(what.find(name) != what.npos, cat("does not name the victim: ", what));
    throw;
  }
}

const ProcessFunctions kFunctions{{"sum", sum},
                                  {"complain", complain},
                                  {"misuse", misuse},
                                  {"come_late", come_late},
                                  {"stay_away", stay_away},
                                  {"meet_an_end", meet_an_end}};

// What run_processes throws.
std::string failure_of(int num_processes, const std::string& function,
                       const ProcessesOptions& options = {}) {
  try {
    run_processes(num_processes, function, options);
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << function << " should have failed";
  return "";
}

class ProcessesMultiproc : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / cat("yoke-processes-", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

BackendFactory launched_backend() {
  const char* name = std::getenv("YOKE_TEST_BACKEND");
  if (name != nullptr && std::string(name) == "nccl") return nccl_backend({.file = nccl_file()});
  return shm_backend();
}

TEST_F(ProcessesMultiproc, FormOneWorld) { run_processes(3, "sum", {.argument = "1"}); }

TEST_F(ProcessesMultiproc, MixWithRankThreads) { run_processes(2, "sum", {.argument = "2"}); }

TEST_F(ProcessesMultiproc, AreWaitedForWhenTheyComeLate) {
  run_processes(3, "come_late", {.argument = "1"});
}

TEST_F(ProcessesMultiproc, MayBeManyMoreThanTheCores) {
  run_processes(16, "sum", {.argument = "1"});
}

TEST_F(ProcessesMultiproc, TellTheFirstFailureToTheCaller) {
  const auto text = failure_of(3, "complain");
  EXPECT_TRUE(has(text, "rank 1 failed: out of cheese")) << text;
  EXPECT_TRUE(has(text, "process 0")) << text;
}

TEST_F(ProcessesMultiproc, TellAMistakeThatComesBeforeAnyWorld) {
  const auto text = failure_of(1, "misuse");
  EXPECT_TRUE(has(text, "no such model")) << text;
  EXPECT_TRUE(has(text, "exit code 2")) << text;
  EXPECT_TRUE(has(failure_of(1, "unheard_of"), "no function 'unheard_of'"));
}

TEST_F(ProcessesMultiproc, AreMissedByName) {
  const std::string wanted = "missing: process 1; here: process 0";
  std::string text;
  for (const auto timeout : {5s, 25s})  // where five are too few to load LibTorch
    if (!has(text, wanted))
      text = failure_of(3, "stay_away", {.meet_timeout = timeout, .grace = 1s});
  EXPECT_TRUE(has(text, wanted)) << text;
}

TEST_F(ProcessesMultiproc, ThatAreStoppedAreNamedAtTheDeadline) {
  const auto text =
      failure_of(3, "meet_an_end",
                 {.argument = cat("1 ", SIGSTOP, " 7 ", (folder_ / "end").string()), .grace = 1s});
  EXPECT_TRUE(has(text, "not arrived: rank 1")) << text;
  EXPECT_TRUE(has(text, "did not end and was killed")) << text;
}

// Whatever it was doing: the others fail within a second and name it, and nothing is left.
TEST_F(ProcessesMultiproc, ThatAreKilledAtAnyOperationAreNamedWithinASecond) {
  const int repeats = 200;
  std::vector<int> ids;
  for (int repeat = 0; repeat < repeats && !HasFailure(); ++repeat) {
    const auto file = folder_ / cat("end-", repeat);
    const int victim = repeat % 3;
    const auto text =
        failure_of(3, "meet_an_end",
                   {.argument = cat(victim, " ", SIGKILL, " ", repeat, " ", file.string()),
                    .on_start = [&](const std::vector<int>& started) {
                      ids.insert(ids.end(), started.begin(), started.end());
                    }});
    for (int p = 0; p < 3; ++p)
      EXPECT_TRUE(has(text, p == victim ? "was killed by signal 9" : "ended with exit code 3"))
          << text;
  }
  // A number may meanwhile be another process's: ours have the folder in their environment, or,
  // ended and not waited for, this process as their parent.
  auto text_of = [](int id, const char* name) {
    std::ifstream file(cat("/proc/", id, "/", name));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (const int id : ids) {
    const bool ours = has(text_of(id, "environ"), folder_.string()) ||
                      has(text_of(id, "status"), cat("PPid:\t", ::getpid(), "\n"));
    EXPECT_FALSE(ours) << "process " << id << " is left";
  }
}

}  // namespace yoke::comm

int main(int argc, char** argv) {
  const auto environment = yoke::topo::environment_of(environ);
  if (const auto code = yoke::comm::process_main(environment, yoke::comm::kFunctions)) return *code;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
