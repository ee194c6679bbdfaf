// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/hub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <list>
#include <map>
#include <thread>

#include "yoke/base/text.h"
#include "yoke/comm/frames.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;

constexpr Duration kTick = 100ms;
constexpr Duration kFarewell = 5s;  // for all to hear of a failure

struct Member {
  FrameSocket socket;
  std::optional<Hello> hello = {};
  int first_rank = 0;
  bool bye = false, gone = false;
};

struct Waiter {  // a get of a key that nobody has set
  std::list<Member>::iterator member;
  uint64_t id;
};

std::string text_of(const Hello& hello) {
  return cat("process ", hello.process, " (host ", hello.place.host, ", process ",
             hello.place.process, ")");
}

}  // namespace

class Hub::Impl {
 public:
  Impl(const net::Address& at, const HubOptions& options)
      : options_(options),
        listener_(at),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        meet_until_(SteadyClock().now() + options.timeout),
        thread_([this](const std::stop_token& stop) { run(stop); }) {}

  ~Impl() {
    thread_.request_stop();
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  }

  const net::Address& address() const { return listener_.address(); }

  std::optional<World::Failure> failure() const {
    MutexLock lock(mutex_);
    return failure_;
  }

  void wait_until_all_left() {
    std::optional<Time> until;
    MutexLock lock(mutex_);
    while (num_connected_ > 0) {
      if (failure_ && !until) until = SteadyClock().now() + kFarewell;
      if (until && SteadyClock().now() >= *until) return;
      changed_.wait_for(mutex_, kTick);
    }
  }

 private:
  using Where = std::list<Member>::iterator;

  void run(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      std::vector<pollfd> polls{{listener_.fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      for (auto& member : members_) {
        const short events = short(POLLIN | (member.socket.has_unsent() ? POLLOUT : 0));
        polls.push_back({member.socket.fd(), events, 0});
      }
      ::poll(polls.data(), polls.size(), int(kTick / 1ms));
      try {
        while (auto socket = listener_.try_accept()) {
          socket->notice_dead_peer();
          members_.push_back({.socket = FrameSocket(std::move(*socket))});
        }
      } catch (const Error&) {  // that one is lost; others may come
      }
      for (auto member = members_.begin(); member != members_.end(); ++member) serve(member);
      for (auto member = members_.begin(); member != members_.end();)
        member = member->gone ? take_leave(member) : std::next(member);
      if (!welcomed_ && !refused_ && SteadyClock().now() >= meet_until_) refuse_all(absentees());
      pass_on_status();
      for (auto& member : members_) send(member);
      {
        MutexLock lock(mutex_);
        num_connected_ = size_t(std::ranges::count_if(
            members_, [](const Member& member) { return member.hello.has_value(); }));
      }
      changed_.notify_all();
    }
  }

  void serve(Where member) {
    if (!member->socket.receive()) member->gone = true;
    try {
      while (const auto frame = member->socket.next()) {
        Reader reader(*frame);
        handle(member, take_type(reader), reader);
      }
    } catch (const Error&) {  // not one of ours
      member->gone = true;
    }
  }

  static void send(Member& member) {
    try {
      member.socket.send();
    } catch (const Error&) {
      member.gone = true;
    }
  }

  void handle(Where member, FrameType type, Reader& reader) {
    if (!member->hello && type != FrameType::Hello) fail(Kind::Comm, "who are you?");
    switch (type) {
      case FrameType::Hello:
        return introduce(member, get_hello(reader));
      case FrameType::Status: {
        const int rank = reader.get<int>();
        latest_[rank] = reader.get<std::string>();
        return;
      }
      case FrameType::Failed:
        return note_failure(get_failure(reader), member);
      case FrameType::Left:
        pass_on_status(/*at_once=*/true);
        return tell(FrameType::Left, Writer().put(reader.get<int>()), member);
      case FrameType::Bye:
        member->bye = true;
        return;
      default:
        return serve_store(member, type, reader);
    }
  }

  // Meeting.

  std::string where() const {
    const auto& at = address();
    return to_text(net::Address{at.host.empty() ? options_.where : at.host, at.port});
  }

  void introduce(Where member, Hello hello) {
    std::string reason;
    if (hello.job != options_.job)
      reason = cat("another job ('", options_.job, "') meets at ", where());
    else if (hello.num_processes != options_.num_processes)
      reason =
          cat(text_of(hello), " counts ", hello.num_processes, " processes, the meeting place ",
              options_.num_processes, "; start them all with the same number");
    else if (hello.process < 0 || hello.process >= options_.num_processes)
      reason = cat("there is no ", text_of(hello), " among ", options_.num_processes);
    for (const auto& other : members_)
      if (other.hello && other.hello->process == hello.process)
        reason = cat(text_of(*other.hello), " is here already, and so is ", text_of(hello),
                     ": two processes have the same number");
    // A former world at this place, or one of another job, may be about to end.
    const bool look_again = welcomed_ || hello.job != options_.job;
    if (welcomed_ && reason.empty()) reason = cat("the world at ", where(), " is complete");
    if (refused_) reason = failure()->what;  // too late
    if (!reason.empty()) {
      member->socket.put(FrameType::Refused, Writer().put(look_again).put(reason));
      return;
    }
    member->hello = std::move(hello);
    if (std::ranges::count_if(members_, [](const Member& m) { return m.hello.has_value(); }) ==
        options_.num_processes)
      welcome();
  }

  void welcome() {
    std::vector<Member*> in_order(size_t(options_.num_processes));
    for (auto& member : members_)
      if (member.hello) in_order[size_t(member.hello->process)] = &member;
    Writer table;
    int rank = 0;
    for (Member* member : in_order) {
      member->first_rank = rank;
      put(table, *member->hello);
      rank += member->hello->num_ranks;
    }
    num_ranks_ = rank;
    welcomed_ = true;
    for (Member* member : in_order) member->socket.put(FrameType::Welcome, table);
  }

  std::string absentees() const {
    std::vector<std::string> here, missing;
    for (int process = 0; process < options_.num_processes; ++process) {
      const auto found = std::ranges::find_if(
          members_, [&](const Member& m) { return m.hello && m.hello->process == process; });
      if (found == members_.end())
        missing.push_back(cat(process));
      else
        here.push_back(text_of(*found->hello));
    }
    return cat("waited ", duration_text(options_.timeout), " for ", options_.num_processes,
               " processes to meet at ", where(), "; missing: process ", join(missing, ", "),
               "; here: ", here.empty() ? "nobody" : join(here, ", "));
  }

  void refuse_all(const std::string& reason) {
    refused_ = true;
    {
      MutexLock lock(mutex_);
      if (!failure_) failure_ = World::Failure{-1, Kind::Comm, reason, {}};
    }
    for (auto& member : members_)
      if (member.hello) member.socket.put(FrameType::Refused, Writer().put(false).put(reason));
  }

  // The first failure, and deaths.

  void note_failure(World::Failure failure, std::optional<Where> from) {
    {
      MutexLock lock(mutex_);
      if (failure_) return;
      failure_ = failure;
    }
    Writer values;
    put(values, failure);
    tell(FrameType::Failed, values, from);
  }

  Where take_leave(Where member) {
    for (auto& [key, waiters] : waiters_)
      std::erase_if(waiters, [&](const Waiter& waiter) { return waiter.member == member; });
    if (member->hello && !member->bye) {
      const Hello& hello = *member->hello;
      if (!welcomed_) {
        refuse_all(cat(text_of(hello), " died before all had come"));
      } else {
        MutexLock lock(mutex_);
        if (!failure_)
          failure_ =
              World::Failure{member->first_rank, Kind::Comm, cat(text_of(hello), " died"), {}};
      }
      tell(FrameType::Died, Writer().put(hello.process), member);
    }
    return members_.erase(member);
  }

  void tell(FrameType type, const Writer& values, std::optional<Where> but = std::nullopt) {
    for (auto member = members_.begin(); member != members_.end(); ++member)
      if (member->hello && !member->gone && member != but) member->socket.put(type, values);
  }

  // What every rank is doing goes to all, at a pace that the number of ranks allows.
  void pass_on_status(bool at_once = false) {
    const Time now = SteadyClock().now();
    const auto pace =
        std::max<Duration>(kTick / 2, std::chrono::microseconds(10) * num_ranks_ * num_ranks_);
    if (latest_.empty() || !welcomed_ || (!at_once && now < last_status_ + pace)) return;
    last_status_ = now;
    for (const auto& [rank, status] : latest_)
      tell(FrameType::Status, Writer().put(rank).put(status));
    latest_.clear();
  }

  // The store.

  void serve_store(Where member, FrameType type, Reader& reader) {
    const auto id = reader.get<uint64_t>();
    const auto key = reader.get<std::string>();
    auto reply = [&](const std::string& value) { answer(*member, id, value); };
    switch (type) {
      case FrameType::Set:
        values_[key] = reader.get<std::string>();
        for (const auto& waiter : waiters_[key]) answer(*waiter.member, waiter.id, values_[key]);
        waiters_.erase(key);
        return reply("");
      case FrameType::Get:
        if (values_.contains(key)) return reply(values_[key]);
        waiters_[key].push_back({member, id});
        return;
      case FrameType::Add: {
        std::string& value = values_[key];
        const auto old = value.empty() ? std::optional<int64_t>(0) : parse_int(value);
        if (!old) return answer(*member, id, value, false);
        value = std::to_string(*old + reader.get<int64_t>());
        return reply(value);
      }
      case FrameType::Has:
        return reply(values_.contains(key) ? "1" : "");
      default:
        fail(Kind::Comm, "an unknown frame");
    }
  }

  static void answer(Member& member, uint64_t id, const std::string& value, bool good = true) {
    member.socket.put(FrameType::Reply, Writer().put(id).put(good).put(value));
  }

  const HubOptions options_;
  net::Listener listener_;
  net::Descriptor wake_;
  const Time meet_until_;
  // Touched by the thread alone:
  std::list<Member> members_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::vector<Waiter>> waiters_;
  std::map<int, std::string> latest_;  // rank -> status not yet passed on
  Time last_status_{};
  int num_ranks_ = 0;
  bool welcomed_ = false, refused_ = false;

  mutable Mutex mutex_;
  Condition changed_;
  std::optional<World::Failure> failure_ YOKE_GUARDED_BY(mutex_);
  size_t num_connected_ YOKE_GUARDED_BY(mutex_) = 0;
  std::jthread thread_;  // last: it uses all of the above
};

Hub::Hub(const net::Address& at, const HubOptions& options)
    : impl_(std::make_unique<Impl>(at, options)) {}
Hub::~Hub() = default;
const net::Address& Hub::address() const { return impl_->address(); }
std::optional<World::Failure> Hub::failure() const { return impl_->failure(); }
void Hub::wait_until_all_left() { impl_->wait_until_all_left(); }

}  // namespace yoke::comm
