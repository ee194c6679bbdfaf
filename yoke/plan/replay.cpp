// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/replay.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <tuple>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::plan {
namespace {

using OpKind = Operation::Kind;
constexpr size_t kNone = SIZE_MAX;

// What was there last, so that something could go on: an event's end, heard of through a channel.
struct Cause {
  size_t event = kNone;
  int channel = -1;
};

// One operation in one round.
struct Event {
  int queue = 0;
  Replayed::Timed timed = {};
  Cause taken = {}, done = {};
  double entry = 0;  // when what is inside of it begins
};

struct Value {
  double given = 0, arrived = 0;  // arrived: when it has moved
  int queue = -1;                 // that gave it; -1: it was there before the first round
  size_t event = kNone;
};

struct Room {
  double since = 0;
  size_t event = kNone;  // that took what was there
};

// A channel in time, oldest first.
struct Line {
  std::deque<Value> values = {};
  std::deque<Room> rooms = {};  // where values were
  int64_t spare = 0;            // rooms where none has been yet
  std::vector<int> ends = {};   // queues that give to it or take from it
  int taker = -1;
  double sent = 0;    // when its last value had left for another queue
  int64_t held = 0;   // where nobody waits
  double waited = 0;  // by takers for values, by givers for room
  int64_t room() const { return spare + int64_t(rooms.size()); }
};

enum class Moment { Take, Meet, Give };

struct Queue {
  size_t index = 0;
  int64_t round = 0;
  Moment moment = Moment::Take;
  double free = 0;        // when the last operation was done
  double there = 0;       // when all that the next one takes was there
  size_t now = kNone;     // the event that it is at, once it has taken
  size_t before = kNone;  // the last that was done
};

using Path = std::vector<Replayed::Link>;
// How long was waited for a channel of a part of a part …
using Waits = std::map<std::pair<std::vector<int>, int>, double>;

// A part, from its entry on; its members enter together.
struct Inside {
  int part = 0;
  std::vector<double> ends = {}, busy = {}, peak_bytes = {};  // by queue
  std::vector<std::vector<Replayed::Timed>> rows = {};        // likewise
  std::vector<Path> paths = {};                               // likewise: to its last operation
  Waits waits = {};
  double length() const { return ends.empty() ? 0 : std::ranges::max(ends); }
};

// Several accesses to one channel are one.
std::vector<Access> merged(const std::vector<Access>& accesses) {
  std::vector<Access> result;
  for (const auto& access : accesses) {
    const auto same = std::ranges::find(result, access.channel, &Access::channel);
    if (same == result.end())
      result.push_back(access);
    else
      same->count += access.count;
  }
  return result;
}

// The moments of all queues. A queue goes on until it must wait; whoever changes what it waits for
// wakes it. As a channel lies between two queues, the times hang on no order of waking.
class Replayer {
 public:
  Replayer(const Program& program, int64_t rounds, const ReplayCosts& costs)
      : program_(program),
        rounds_(rounds),
        costs_(costs),
        lines_(program.channels.size()),
        queues_(program.rows.size()),
        is_awake_(queues_.size(), false),
        memory_(queues_.size()),
        busy_(queues_.size(), 0) {
    for (size_t q = 0; q < queues_.size(); ++q)
      for (const auto& operation : program.rows[q]) {
        for (const auto& access : operation.takes) line(access).taker = int(q);
        for (const auto* accesses : {&operation.takes, &operation.gives})
          for (const auto& access : *accesses) line(access).ends.push_back(int(q));
      }
    for (size_t c = 0; c < lines_.size(); ++c) {
      const auto& channel = program.channels[c];
      auto& line = lines_[c];
      std::ranges::sort(line.ends);
      const auto doubles = std::ranges::unique(line.ends);
      line.ends.erase(doubles.begin(), doubles.end());
      line.held = channel.initial;
      line.values.resize(size_t(channel.initial));
      line.spare = std::max<int64_t>(channel.capacity - channel.initial, 0);
      remember(line.taker, 0, double(channel.initial) * channel.bytes);
    }
  }

  // Empty, or what every queue waits for that did not come to its end.
  std::string run() {
    for (const auto& row : program_.rows)
      for (const auto& operation : row)
        for (const int part : operation.parts)
          if (const auto stuck = look_inside(operation, part); !stuck.empty()) return stuck;
    for (size_t q = 0; q < queues_.size(); ++q) wake(int(q));
    while (!awake_.empty()) {
      const int q = awake_.front();
      awake_.pop_front();
      is_awake_[size_t(q)] = false;
      advance(q);
    }
    std::vector<std::string> waits;
    for (size_t q = 0; q < queues_.size(); ++q)
      if (!is_done(int(q))) waits.push_back(what_it_waits_for(int(q)));
    return join(waits, "\n");
  }

  Inside inside(int part) {
    Inside result{
        .part = part, .busy = busy_, .peak_bytes = peak_bytes(), .rows = rows(), .waits = waits()};
    for (const auto& queue : queues_) {
      result.ends.push_back(queue.free);
      result.paths.push_back(path_to(queue.before));
    }
    return result;
  }

  Replayed result() {
    Replayed result{.rows = rows()};
    std::vector<double> round_ends(size_t(rounds_), 0);
    size_t last = kNone;
    for (size_t i = 0; i < events_.size(); ++i) {
      const auto& timed = events_[i].timed;
      auto& round_end = round_ends[size_t(timed.round)];
      round_end = std::max(round_end, timed.end);
      if (last == kNone || timed.end > events_[last].timed.end) last = i;
    }
    if (last != kNone) result.makespan = events_[last].timed.end;
    const int64_t middle = (rounds_ - 1) / 2, between = rounds_ - 1 - middle;
    result.period = between > 0 ? (round_ends.back() - round_ends[size_t(middle)]) / double(between)
                                : result.makespan;
    for (const double busy : busy_)
      result.busy.push_back(result.makespan > 0 ? busy / result.makespan : 0);
    result.peak_bytes = peak_bytes();
    result.critical = path_to(last);
    for (const auto& [where, seconds] : waits())
      if (seconds > result.costliest_wait) {
        std::tie(result.costliest_parts, result.costliest_channel) = where;
        result.costliest_wait = seconds;
      }
    return result;
  }

 private:
  // What is inside of an event, as it is seen from here.
  Replayed::Timed within(const Event& event, const Inside& inside, Replayed::Timed timed) const {
    if (timed.parts.empty()) timed.turn = timed.round;
    timed.parts.insert(timed.parts.begin(), inside.part);
    timed.round = event.timed.round;
    timed.begin += event.entry;
    timed.end += event.entry;
    return timed;
  }
  std::vector<std::vector<Replayed::Timed>> rows() const {
    std::vector<std::vector<Replayed::Timed>> rows(queues_.size());
    for (const auto& event : events_) {
      auto& row = rows[size_t(event.queue)];
      row.push_back(event.timed);
      const auto* inside = inside_of(program_.rows[size_t(event.queue)][event.timed.index]);
      if (!inside) continue;
      for (const auto& timed : inside->rows[size_t(event.queue)])
        row.push_back(within(event, *inside, timed));
    }
    return rows;
  }
  Path path_to(size_t last) const {
    std::vector<size_t> events;
    for (size_t i = last; i != kNone; i = events_[i].done.event) events.push_back(i);
    std::ranges::reverse(events);
    Path path;
    for (const size_t i : events) {
      const auto& event = events_[i];
      path.push_back({event.queue, event.timed, event.done.channel});
      const auto* inside = inside_of(program_.rows[size_t(event.queue)][event.timed.index]);
      if (!inside) continue;
      for (const auto& [queue, timed, channel] : inside->paths[size_t(event.queue)])
        path.push_back({queue, within(event, *inside, timed), channel});
    }
    return path;
  }
  Waits waits() const {
    Waits waits = waits_inside_;
    for (size_t c = 0; c < lines_.size(); ++c)
      if (lines_[c].waited > 0) waits[{{}, int(c)}] = lines_[c].waited;
    return waits;
  }

  Line& line(const Access& access) { return lines_[size_t(access.channel)]; }
  const Channel& channel(const Access& access) const {
    return program_.channels[size_t(access.channel)];
  }
  Queue& queue(int q) { return queues_[size_t(q)]; }
  Event& event(int q) { return events_[queue(q).now]; }
  const Operation& operation(int q) { return program_.rows[size_t(q)][queue(q).index]; }
  bool is_done(int q) { return queue(q).round == rounds_ || program_.rows[size_t(q)].empty(); }
  double bytes(const std::vector<Access>& accesses) const {
    double sum = 0;
    for (const auto& access : accesses) sum += double(access.count) * channel(access).bytes;
    return sum;
  }
  // Those that somebody may wait for.
  std::vector<Access> waiting(const std::vector<Access>& accesses) const {
    auto result = merged(accesses);
    std::erase_if(result, [&](const Access& access) { return !channel(access).waits; });
    return result;
  }

  void wake(int q) {
    if (is_awake_[size_t(q)]) return;
    is_awake_[size_t(q)] = true;
    awake_.push_back(q);
  }
  void wake_ends(const Access& access, int but) {
    for (const int q : line(access).ends)
      if (q != but) wake(q);
  }

  // From then on the queue holds so many bytes more.
  void remember(int q, double time, double more) {
    if (q >= 0 && more != 0) memory_[size_t(q)].emplace_back(time, more);
  }
  std::vector<double> peak_bytes() {
    std::vector<double> peaks;
    for (auto& changes : memory_) {
      std::ranges::sort(changes);  // at one time what goes before what comes
      double held = 0, peak = 0;
      for (const auto& [time, more] : changes) peak = std::max(peak, held += more);
      peaks.push_back(peak);
    }
    return peaks;
  }

  std::string look_inside(const Operation& operation, int part) {
    if (insides_.contains({operation.kind, part})) return {};
    constexpr int64_t kSettled = 32;  // turns, after which each takes as long as the one before
    const int64_t turns = operation.kind != OpKind::Loop ? 1
                          : operation.turns > 0          ? operation.turns
                                                         : costs_.loop_rounds;
    std::string stuck;
    const auto after = [&](int64_t rounds) {
      Replayer replayer(program_.parts[size_t(part)], rounds, costs_);
      stuck = replayer.run();
      return replayer.inside(part);
    };
    const int64_t done = std::min(turns, 2 * kSettled);
    auto inside = after(done);
    const auto simulated = inside.ends;
    if (turns > 2 * kSettled && stuck.empty()) {
      const auto half = after(kSettled);
      const double more = double(turns - 2 * kSettled) / double(kSettled);
      for (size_t q = 0; q < inside.ends.size(); ++q) {
        inside.ends[q] += more * (inside.ends[q] - half.ends[q]);
        inside.busy[q] += more * (inside.busy[q] - half.busy[q]);
      }
      for (auto& [where, seconds] : inside.waits) {
        const auto before = half.waits.find(where);
        seconds += more * (seconds - (before == half.waits.end() ? 0 : before->second));
      }
    }
    // Two turns and the last are enough to see.
    const auto is_hidden = [&](const Replayed::Timed& timed) {
      return timed.round > 1 && timed.round + 1 < done;
    };
    const auto put_last = [&](size_t q, Replayed::Timed& timed) {
      if (timed.round + 1 < done || turns == done) return;
      timed.round = turns - 1;
      timed.begin += inside.ends[q] - simulated[q];
      timed.end += inside.ends[q] - simulated[q];
    };
    for (size_t q = 0; q < inside.ends.size(); ++q) {
      std::erase_if(inside.rows[q], is_hidden);
      for (auto& timed : inside.rows[q]) put_last(q, timed);
      std::erase_if(inside.paths[q], [&](const auto& link) { return is_hidden(link.timed); });
      for (auto& link : inside.paths[q]) put_last(size_t(link.queue), link.timed);
    }
    insides_[{operation.kind, part}] = std::move(inside);
    return stuck.empty() ? "" : cat("inside of ", operation.name, "\n", stuck);
  }
  // The body of a loop, the costlier arm of a branch.
  const Inside* inside_of(const Operation& operation) const {
    const Inside* longest = nullptr;
    for (const int part : operation.parts)
      if (const auto& inside = insides_.at({operation.kind, part});
          !longest || inside.length() > longest->length())
        longest = &inside;
    return longest;
  }
  double own_cost(const Operation& operation) const {
    if (operation.cost > 0) return operation.cost;
    return operation.parts.empty() ? costs_.operation : 0;
  }

  void advance(int q) {
    while (!is_done(q)) {
      switch (queue(q).moment) {
        case Moment::Take:
          if (!take(q)) return;
          break;
        case Moment::Meet:
          if (!meet(q)) return;
          break;
        case Moment::Give:
          if (!give(q)) return;
      }
    }
  }

  bool take(int q) {
    auto& own = queue(q);
    const auto takes = waiting(operation(q).takes);
    for (const auto& access : takes)
      if (int64_t(line(access).values.size()) < access.count) return false;
    own.there = own.free;
    Cause cause{own.before, -1};
    for (const auto& access : takes)
      for (int64_t i = 0; i < access.count; ++i) {
        const auto& value = line(access).values[size_t(i)];
        const bool moves = channel(access).moves.value_or(value.queue != q);
        const double arrived = moves ? value.arrived : value.given;
        if (arrived <= own.there) continue;
        own.there = arrived;
        cause = {value.event, access.channel};
      }
    if (cause.channel >= 0) lines_[size_t(cause.channel)].waited += own.there - own.free;
    own.now = events_.size();
    events_.push_back({q, {.index = own.index, .round = own.round}, cause, cause});
    for (const auto& access : takes) {
      auto& line = this->line(access);
      for (int64_t i = 0; i < access.count; ++i) {
        line.values.pop_front();
        if (int64_t(line.values.size()) + line.room() < channel(access).capacity)
          line.rooms.push_back({own.there, own.now});
      }
      wake_ends(access, q);
    }
    own.moment = Moment::Meet;
    if (!operation(q).meets()) work(q, own.there, own_cost(operation(q)));
    return true;
  }

  // From the entry on, and as long as it takes itself; what is inside comes on top.
  void work(int q, double begin, double length) {
    const auto* inside = inside_of(operation(q));
    auto& timed = event(q).timed;
    timed.begin = begin;
    event(q).entry = begin + length;
    timed.end = begin + length + (inside ? inside->ends[size_t(q)] : 0);
    busy_[size_t(q)] += length + (inside ? inside->busy[size_t(q)] : 0);
    if (inside) {
      remember(q, timed.begin, inside->peak_bytes[size_t(q)]);
      remember(q, timed.end, -inside->peak_bytes[size_t(q)]);
    }
    remember(q, timed.end, -bytes(waiting(operation(q).takes)));
    queue(q).moment = Moment::Give;
  }

  std::set<int> members(int q) {
    const auto& own = operation(q);
    std::set<int> all{q};
    if (own.group < 0)
      all.insert(own.peer);
    else
      for (const int other : program_.groups[size_t(own.group)].queues) all.insert(other);
    return all;
  }
  // A queue waits at its k-th meeting until that is complete: whoever is at one with it is at the
  // k-th too.
  bool is_met(int q, int other) {
    if (q == other) return operation(q).peer != q;
    if (is_done(other) || queue(other).moment != Moment::Meet) return false;
    const auto &own = operation(q), &theirs = operation(other);
    if (own.group >= 0) return theirs.group == own.group;
    const bool fits =
        own.kind == OpKind::Send ? theirs.kind == OpKind::Recv : theirs.kind == OpKind::Send;
    return fits && theirs.peer == q;
  }
  bool meet(int q) {
    const auto all = members(q);
    double length = 0, message = 0;
    int latest = q;
    for (const int other : all) {
      if (!is_met(q, other)) return false;
      if (queue(other).there > queue(latest).there) latest = other;
      length = std::max(length, own_cost(operation(other)));
      if (operation(other).kind == OpKind::Send)
        message = costs_.latency + bytes(operation(other).takes) / costs_.bytes_per_s;
    }
    const double begin = queue(latest).there;
    if (const auto* inside = inside_of(operation(q)))
      for (const auto& [where, seconds] : inside->waits) {
        auto parts = where.first;
        parts.insert(parts.begin(), inside->part);
        waits_inside_[{parts, where.second}] += seconds;
      }
    for (const int other : all) {
      if (queue(other).there < begin) event(other).done = event(latest).taken;
      work(other, begin, length + message);
      if (other != q) wake(other);
    }
    return true;
  }

  bool give(int q) {
    const auto& own = operation(q);
    const auto gives = waiting(own.gives);
    for (const auto& access : gives)
      if (line(access).room() < access.count) return false;
    const double end = event(q).timed.end;
    double done = end;
    for (const auto& access : gives)
      for (int64_t i = line(access).spare; i < access.count; ++i) {
        const auto& room = line(access).rooms[size_t(i - line(access).spare)];
        if (room.since <= done) continue;
        done = room.since;
        event(q).done = {events_[room.event].taken.event, access.channel};
      }
    if (done > end) lines_[size_t(event(q).done.channel)].waited += done - end;
    for (const auto& access : gives) {
      auto& line = this->line(access);
      const double more = double(access.count) * channel(access).bytes;
      const int64_t fresh = std::min(line.spare, access.count);
      line.spare -= fresh;
      line.rooms.erase(line.rooms.begin(), line.rooms.begin() + (access.count - fresh));
      line.sent = std::max(line.sent, done) + more / costs_.bytes_per_s;
      for (int64_t i = 0; i < access.count; ++i)
        line.values.push_back({done, line.sent + costs_.latency, q, queue(q).now});
      remember(line.taker, done, more);
      wake_ends(access, q);
    }
    for (const auto& access : own.gives) {
      if (channel(access).waits) continue;
      auto& line = this->line(access);
      const int64_t more = std::min(access.count, channel(access).capacity - line.held);
      if (more <= 0) continue;
      line.held += more;
      remember(line.taker, done, double(more) * channel(access).bytes);
    }
    go_on(q, done);
    return true;
  }

  void go_on(int q, double time) {
    auto& own = queue(q);
    own.free = time;
    own.before = own.now;
    own.moment = Moment::Take;
    if (++own.index < program_.rows[size_t(q)].size()) return;
    own.index = 0;
    ++own.round;
  }

  std::string what_it_waits_for(int q) {
    const auto& own = operation(q);
    std::vector<std::string> reasons;
    switch (queue(q).moment) {
      case Moment::Take:
        for (const auto& access : waiting(own.takes))
          if (const auto there = int64_t(line(access).values.size()); there < access.count)
            reasons.push_back(cat("a value of '", channel(access).name, "', which holds ", there,
                                  " of the ", access.count, " that it takes"));
        break;
      case Moment::Meet:
        if (own.group < 0) {
          reasons.push_back(cat(program_.queues[size_t(own.peer)], " to ",
                                own.kind == OpKind::Send ? "receive" : "send"));
          break;
        }
        for (const int other : members(q))
          if (!is_met(q, other))
            reasons.push_back(cat(program_.queues[size_t(other)], " in the group '",
                                  program_.groups[size_t(own.group)].name, "'"));
        break;
      case Moment::Give:
        for (const auto& access : waiting(own.gives))
          if (line(access).room() < access.count)
            reasons.push_back(cat("room in '", channel(access).name, "', which holds ",
                                  line(access).values.size(), " of at most ",
                                  channel(access).capacity, ", for ", access.count, " more"));
    }
    return cat(program_.queues[size_t(q)], ": ", own.name, " in round ", queue(q).round,
               " waits for ", join(reasons, " and for "));
  }

  const Program& program_;
  int64_t rounds_;
  ReplayCosts costs_;
  std::vector<Line> lines_;
  std::vector<Queue> queues_;
  std::deque<int> awake_ = {};
  std::vector<bool> is_awake_;
  std::vector<Event> events_ = {};
  std::vector<std::vector<std::pair<double, double>>> memory_;  // by queue: when, how much more
  std::vector<double> busy_;                                    // by queue, in seconds
  std::map<std::pair<OpKind, int>, Inside> insides_ = {};       // by who does it, and part
  Waits waits_inside_ = {};
};

}  // namespace

std::string name_of(const Program& program, int queue, const Replayed::Timed& timed) {
  std::string name;
  const Program* at = &program;
  for (const int part : timed.parts) {
    at = &at->parts[size_t(part)];
    name += at->name + ": ";
  }
  return name + at->rows[size_t(queue)][timed.index].name;
}

std::optional<Replayed> replay(const Program& program, int64_t rounds, const ReplayCosts& costs,
                               std::string* stuck) {
  if (rounds < 1 || costs.loop_rounds < 0 || !(costs.operation >= 0) || !(costs.latency >= 0) ||
      !(costs.bytes_per_s > 0))
    fail(Kind::Usage, "a replay has 1 or more rounds, costs of 0 or more and bytes above 0 in a ",
         "second; got ", rounds, " rounds, ", costs.loop_rounds, " of a loop, ", costs.operation,
         " s for an operation, ", costs.latency, " s latency, ", costs.bytes_per_s, " bytes/s");
  Replayer replayer(program, rounds, costs);
  const auto waits = replayer.run();
  if (waits.empty()) return replayer.result();
  if (stuck) *stuck = waits;
  return std::nullopt;
}

}  // namespace yoke::plan
