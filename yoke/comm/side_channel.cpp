// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/side_channel.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <map>
#include <thread>

#include "yoke/base/text.h"

namespace yoke::comm {
namespace {

using namespace std::chrono_literals;
using Record = observe::FlightRecorder::Record;

constexpr Duration kTick = 100ms;
constexpr Duration kRetry = 50ms;
constexpr Duration kParting = 3s;

// A rank's last operation. Clocks of two hosts differ, so times go as ages.
std::string encode(const Record& record, const std::string& group,
                   const observe::FlightRecorder::Called& called, Time now) {
  const auto& flight = record.flight;
  Writer writer;
  writer.put(std::string_view(flight.kind)).put(group).put(flight.sequence).put(flight.bytes);
  writer.put(flight.peer).put(now - record.posted);
  writer.put(record.finished ? now - *record.finished : Duration(-1));
  writer.put(flight.message);
  for (const auto& [name, sequence] : called) writer.put(name).put(sequence);
  return writer.bytes();
}

void note(observe::FlightRecorder& flights, int rank, const std::string& status, Time now) {
  Reader reader(status);
  Record record;
  const auto kind = reader.get<std::string>();
  for (int k = 0; k <= int(OpKind::Recv); ++k)  // the recorder keeps static names
    if (kind == to_string(OpKind(k))) record.flight.kind = to_string(OpKind(k));
  const auto group = reader.get<std::string>();
  record.flight.sequence = reader.get<uint64_t>();
  record.flight.bytes = reader.get<uint64_t>();
  record.flight.peer = reader.get<int>();
  record.posted = now - reader.get<Duration>();
  if (const auto age = reader.get<Duration>(); age >= Duration(0)) record.finished = now - age;
  record.flight.message = reader.get<bool>();
  observe::FlightRecorder::Called called;
  while (!reader.empty()) {
    const auto name = reader.get<std::string>();
    called[name] = reader.get<uint64_t>();
  }
  flights.note(rank, record, group, std::move(called));
}

}  // namespace

class SideChannel::Impl {
 public:
  Impl(FrameSocket socket, std::vector<Hello> processes, const Hello& self, bool with_process_0)
      : processes_(std::move(processes)),
        process_(self.process),
        hub_is_with_process_0_(with_process_0),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        socket_(std::move(socket)) {
    int rank = 0;
    for (const auto& hello : processes_) {
      first_ranks_.push_back(rank);
      rank += hello.num_ranks;
    }
  }

  Membership membership(std::shared_ptr<Store> store) const {
    Membership members{.places = {},
                       .first = first_ranks_[size_t(process_)],
                       .count = processes_[size_t(process_)].num_ranks,
                       .store = std::move(store)};
    for (const auto& hello : processes_)
      members.places.insert(members.places.end(), size_t(hello.num_ranks), hello.place);
    return members;
  }

  void attach(World& world) {
    world_ = &world;
    left_told_.resize(size_t(world.num_here()));
    told_.resize(size_t(world.num_here()));
    news_ = world.on_change([this] { ring(); });
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }

  void close() {
    if (!thread_.joinable()) return;
    thread_.request_stop();
    ring();
    thread_.join();
    news_.reset();
    MutexLock lock(mutex_);
    lost_ = true;
    changed_.notify_all();
  }

  // Sends a request to the store and waits for the reply; nothing at the deadline.
  std::optional<std::string> ask(FrameType type, const std::string& key, const Writer& rest,
                                 Duration timeout) {
    MutexLock lock(mutex_);
    const uint64_t id = next_id_++;
    replies_[id] = std::nullopt;
    Writer values;
    values.put(id).put(key);
    requests_.emplace_back(type, values.bytes() + rest.bytes());
    ring();
    changed_.wait_for(mutex_, timeout, [&]() YOKE_REQUIRES(mutex_) {
      return replies_[id].has_value() || lost_ || world_->failed();
    });
    const auto reply = std::move(replies_[id]);
    replies_.erase(id);
    if (reply && !reply->good)
      fail(Kind::Usage, "cannot add to '", key, "' in the store: '", reply->value,
           "' is not a number");
    if (reply) return reply->value;
    if (world_->failed()) world_->raise(-1);
    if (lost_) fail(Kind::Comm, "cannot ask the store for '", key, "': the connection is gone");
    return std::nullopt;
  }

 private:
  struct Reply {
    bool good;
    std::string value;
  };

  void ring() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
  }

  void run(const std::stop_token& stop) {
    try {
      while (!stop.stop_requested()) turn(kTick);
      part();
    } catch (const Error& error) {
      lose(error.what());
    }
  }

  // Waits for something to happen, at most a tick, and handles it all.
  void turn(Duration tick) {
    const short events = short(POLLIN | (socket_.has_unsent() ? POLLOUT : 0));
    std::array<pollfd, 2> polls{{{socket_.fd(), events, 0}, {wake_.get(), POLLIN, 0}}};
    ::poll(polls.data(), polls.size(), int(tick / 1ms));
    uint64_t rings = 0;
    [[maybe_unused]] const auto drained = ::read(wake_.get(), &rings, sizeof rings);
    const bool connected = socket_.receive();
    while (const auto frame = socket_.next()) {
      Reader reader(*frame);
      handle(take_type(reader), reader);
    }
    if (!connected) fail(Kind::Comm, "the connection to ", socket_.peer(), " is gone");
    tell_news();
    socket_.send();
    changed_.notify_all();  // a failure wakes those who wait for the store
  }

  void part() {
    tell_news();
    socket_.put(FrameType::Bye);
    const Time until = SteadyClock().now() + kParting;
    while (socket_.has_unsent() && SteadyClock().now() < until) turn(1ms);
    socket_.finish_writing();
    // The hub has read everything once it hangs up as well.
    while (SteadyClock().now() < until && socket_.receive()) {
      pollfd entry{socket_.fd(), POLLIN, 0};
      ::poll(&entry, 1, 10);
    }
  }

  // The hub's process has died, or cannot be reached any more.
  void lose(const std::string& why) {
    {
      MutexLock lock(mutex_);
      lost_ = true;
    }
    changed_.notify_all();
    if (hub_is_with_process_0_ && process_ != 0)
      world_->fail(0, Kind::Comm, death_of(0));
    else
      world_->fail(-1, Kind::Comm, cat("the meeting place of this world is gone: ", why));
  }

  std::string death_of(int rank) const {
    const bool silent = !world_->flights().last(rank);
    return cat("its process died or its host is gone; its last operation: ",
               silent ? "none heard of" : world_->flights().describe(rank));
  }

  void handle(FrameType type, Reader& reader) {
    switch (type) {
      case FrameType::Status: {
        const int rank = reader.get<int>();
        const auto status = reader.get<std::string>();
        if (!world_->here(rank)) note(world_->flights(), rank, status, SteadyClock().now());
        return;
      }
      case FrameType::Failed:
        failure_told_ = true;  // everybody knows this one
        return world_->fail(get_failure(reader));
      case FrameType::Left:
        return world_->leave(reader.get<int>());
      case FrameType::Died:
        return mourn(reader.get<int>());
      case FrameType::Reply: {
        const auto id = reader.get<uint64_t>();
        const bool good = reader.get<bool>();
        MutexLock lock(mutex_);
        if (replies_.contains(id)) replies_[id] = Reply{good, reader.get<std::string>()};
        return;
      }
      default:
        return;
    }
  }

  void mourn(int process) {
    const int first = first_ranks_[size_t(process)];
    for (int rank = first; rank < first + processes_[size_t(process)].num_ranks; ++rank)
      if (!world_->left(rank)) {
        failure_told_ = true;  // everybody hears of it from the hub
        return world_->fail(rank, Kind::Comm, death_of(rank));
      }
  }

  void tell_news() {
    const Time now = SteadyClock().now();
    // Who has left is looked up before the failure, and told after it: a rank that fails leaves,
    // and who hears of its leaving alone would take that for the first cause.
    std::vector<bool> leaves;
    for (int place = 0; place < world_->num_here(); ++place)
      leaves.push_back(world_->left(world_->first_here() + place) && !left_told_[size_t(place)]);
    if (const auto failure = world_->failure(); failure && !failure_told_) {
      Writer values;
      put(values, *failure);
      socket_.put(FrameType::Failed, values);
      failure_told_ = true;
    }
    for (int place = 0; place < world_->num_here(); ++place) {
      const int rank = world_->first_here() + place;
      const auto last = world_->flights().last(rank);
      if (last && (now >= next_status_ || leaves[size_t(place)])) {
        const std::pair state(last->posted, last->finished.has_value());
        if (told_[size_t(place)] != state) {
          const auto group = world_->flights().group_name(last->flight.group);
          socket_.put(FrameType::Status, Writer().put(rank).put(encode(
                                             *last, group, world_->flights().called(rank), now)));
          told_[size_t(place)] = state;
        }
      }
      if (leaves[size_t(place)]) {  // after its last operation: who looks finds it has come to it
        socket_.put(FrameType::Left, Writer().put(rank));
        left_told_[size_t(place)] = true;
      }
    }
    if (now >= next_status_) next_status_ = now + kTick - kTick / 10;
    MutexLock lock(mutex_);
    for (const auto& [type, values] : requests_) {
      Writer writer;
      writer.raw(values);
      socket_.put(type, writer);
    }
    requests_.clear();
  }

  const std::vector<Hello> processes_;
  std::vector<int> first_ranks_;
  const int process_;
  const bool hub_is_with_process_0_;
  World* world_ = nullptr;
  net::Descriptor wake_;
  std::shared_ptr<void> news_;
  // Touched by the thread alone:
  FrameSocket socket_;
  std::vector<bool> left_told_;
  std::vector<std::pair<Time, bool>> told_;  // the operation last told of, and whether finished
  bool failure_told_ = false;
  Time next_status_{};

  Mutex mutex_;
  Condition changed_;
  uint64_t next_id_ YOKE_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::optional<Reply>> replies_ YOKE_GUARDED_BY(mutex_);
  std::vector<std::pair<FrameType, std::string>> requests_ YOKE_GUARDED_BY(mutex_);
  bool lost_ YOKE_GUARDED_BY(mutex_) = false;
  std::jthread thread_;  // last: it uses all of the above
};

namespace {

// What one hub answers to a process that comes.
struct Answer {
  std::optional<FrameSocket> socket = {};  // of a world that is complete, with
  std::vector<Hello> processes = {};
  std::string reason = {};  // why not
  bool final = false;       // asking again is of no use
};

Answer ask_hub(const net::Address& address, const Hello& hello, Time connect_until, Time until,
               const std::function<bool()>& cancelled) {
  try {
    auto plain = net::Socket::connect(address, connect_until);
    plain.notice_dead_peer();
    FrameSocket socket(std::move(plain));
    Writer values;
    put(values, hello);
    socket.put(FrameType::Hello, values);
    while (SteadyClock().now() < until && !cancelled()) {
      socket.send();
      const bool connected = socket.receive();
      if (const auto frame = socket.next()) {
        Reader reader(*frame);
        if (take_type(reader) == FrameType::Refused) {
          const bool look_again = reader.get<bool>();  // ours may be elsewhere, or come later
          return {.reason = reader.get<std::string>(), .final = !look_again};
        }
        Answer answer;
        while (!reader.empty()) answer.processes.push_back(get_hello(reader));
        answer.socket.emplace(std::move(socket));
        return answer;
      }
      if (!connected) return {.reason = cat(to_text(address), " hung up")};
      pollfd entry{socket.fd(), POLLIN, 0};
      ::poll(&entry, 1, 50);
    }
    return {.reason = cat(to_text(address), " does not answer")};
  } catch (const Error& error) {
    return {.reason = error.what()};
  }
}

}  // namespace

std::shared_ptr<SideChannel> SideChannel::join(const HubFinder& find_hub, const Hello& hello,
                                               Duration timeout) {
  const Time deadline = SteadyClock().now() + timeout;
  std::string reason = "no address";
  bool first = true;
  while (true) {
    if (find_hub.cancelled())
      fail(Kind::Cancelled, "asked to stop while process ", hello.process,
           " waited for the others: ", reason);
    std::vector<net::Address> addresses;
    try {
      addresses = find_hub.addresses();
    } catch (const Error& error) {
      reason = error.what();
    }
    for (const auto& address : addresses) {
      // The hub gives up before we do, and says who is missing.
      const Time now = SteadyClock().now();
      auto answer =
          ask_hub(address, hello, std::min(deadline, now + 5s), deadline + 5s, find_hub.cancelled);
      if (answer.final) fail(Kind::Comm, answer.reason);
      // An attempt in the last moment fails for lack of time, which is no reason to tell.
      if (first || now + 1s < deadline) reason = answer.reason;
      first = false;
      if (!answer.socket) continue;
      std::shared_ptr<SideChannel> channel(new SideChannel(std::make_unique<Impl>(
          std::move(*answer.socket), answer.processes, hello, find_hub.with_process_0)));
      channel->self_ = channel;
      return channel;
    }
    if (SteadyClock().now() >= deadline)
      fail(Kind::Timeout, "process ", hello.process, " of ", hello.num_processes,
           " could not join its world within ", duration_text(timeout), ": ", reason,
           "; does process 0 run, and is its address right? YOKE_ADDRESS and YOKE_PORT set it");
    std::this_thread::sleep_for(kRetry);
  }
}

SideChannel::SideChannel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SideChannel::~SideChannel() { close(); }
Membership SideChannel::membership() { return impl_->membership(self_.lock()); }
void SideChannel::attach(World& world) { impl_->attach(world); }
void SideChannel::close() { impl_->close(); }

void SideChannel::set(const std::string& key, const std::string& value) {
  if (!impl_->ask(FrameType::Set, key, Writer().put(value), 60s))
    fail(Kind::Timeout, "the store does not answer");
}

std::string SideChannel::get(const std::string& key, Duration timeout) {
  auto value = impl_->ask(FrameType::Get, key, {}, timeout);
  if (!value)
    fail(Kind::Timeout, "nobody set '", key, "' in the store within ", duration_text(timeout));
  return *value;
}

int64_t SideChannel::add(const std::string& key, int64_t by) {
  const auto value = impl_->ask(FrameType::Add, key, Writer().put(by), 60s);
  if (!value) fail(Kind::Timeout, "the store does not answer");
  return *parse_int(*value);
}

bool SideChannel::has(const std::string& key) {
  const auto value = impl_->ask(FrameType::Has, key, {}, 60s);
  if (!value) fail(Kind::Timeout, "the store does not answer");
  return !value->empty();
}

}  // namespace yoke::comm
