// SPDX-License-Identifier: Apache-2.0
// What the prover is held against, none of it made of the prover: random programs that are live by
// construction and may then be damaged, a replay of tokens that says whether a program is live, and
// threads that run one.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "yoke/base/error.h"
#include "yoke/plan/program.h"

namespace yoke::plan::detail {

// Every queue walks its row, moment by moment, for some rounds. Clocks travel with values, with
// room and through meetings: a queue's count in one says how many of its operations are done then.
class Oracle {
 public:
  static constexpr int64_t kRounds = 4;
  static constexpr size_t kMostQueues = 8;
  using Clock = std::array<int64_t, kMostQueues>;

  // What is wrong; empty if nothing is.
  static std::string judge(const Program& program) {
    std::string wrong = judge_parts(program);
    return wrong.empty() ? judge_sizes(program) : wrong;
  }

  explicit Oracle(const Program& program) : p_(program), states_(p_.rows.size()) {
    for (size_t q = 0; q < p_.rows.size(); ++q)
      states_[q].starts.resize(p_.rows[q].size() * size_t(kRounds));
    for (const auto& channel : p_.channels) {
      values_.emplace_back(size_t(std::max<int64_t>(0, channel.initial)));
      rooms_.emplace_back(size_t(std::max<int64_t>(0, channel.capacity - channel.initial)));
    }
    used_.resize(p_.buffers.size());
  }

  std::string run() {
    wrong_ = form();
    bool moves = true;
    while (wrong_.empty() && moves) {
      moves = false;
      for (size_t q = 0; q < states_.size(); ++q)
        while (wrong_.empty() && step(q)) moves = true;
    }
    if (!wrong_.empty()) return wrong_;
    for (size_t q = 0; q < states_.size(); ++q)
      if (!done(q)) return cat("stuck: ", p_.queues[q], " at ", here(q).name);
    for (size_t c = 0; c < p_.channels.size(); ++c)
      if (p_.channels[c].waits && int64_t(values_[c].size()) != p_.channels[c].initial)
        return cat("rate: ", p_.channels[c].name);
    return race_;
  }

  // Whether a is done before b begins, in the same round or in the next one. After run().
  bool before(size_t queue_a, size_t a, size_t queue_b, size_t b, bool next) const {
    const size_t begin = b + (next ? p_.rows[queue_b].size() : 0);
    return states_[queue_b].starts[begin][queue_a] >= int64_t(a) + 1;
  }

 private:
  struct State {
    size_t steps = 0;  // operations that are done
    int moment = 0;    // take, meet, give
    Clock clock = {};
    std::vector<Clock> starts;
  };
  struct Used {
    std::array<std::array<int64_t, kMostQueues>, 2> last = {};  // by writing and queue
  };

  static std::string judge_parts(const Program& program) {
    std::string wrong = Oracle(program).run();
    for (const auto& part : program.parts)
      if (wrong.empty()) wrong = judge_parts(part);
    return wrong;
  }

  std::string form() const {
    std::vector<std::array<int, 2>> ends(p_.channels.size(), {-1, -1});
    for (size_t q = 0; q < p_.rows.size(); ++q)
      for (const auto& o : p_.rows[q])
        for (const bool gives : {false, true})
          for (const auto& access : gives ? o.gives : o.takes) {
            if (!p_.channels[size_t(access.channel)].waits) continue;
            if (access.count < 1) return "count";
            int& end = ends[size_t(access.channel)][gives];
            if (end >= 0 && end != int(q)) return "two queues at one end";
            end = int(q);
          }
    for (const auto& c : p_.channels)
      if (c.waits && (c.capacity < 1 || c.initial < 0 || c.initial > c.capacity)) return "capacity";
    return "";
  }

  bool done(size_t q) const { return states_[q].steps == p_.rows[q].size() * size_t(kRounds); }
  const Operation& here(size_t q) const { return p_.rows[q][states_[q].steps % p_.rows[q].size()]; }
  static void join(Clock& into, const Clock& from) {
    for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
  }

  bool step(size_t q) {
    if (done(q)) return false;
    State& state = states_[q];
    if (state.moment == 1 && here(q).meets()) return meet(q);
    if (state.moment == 1) return ++state.moment, true;
    const bool gives = state.moment == 2;
    auto& from = gives ? rooms_ : values_;
    auto& into = gives ? values_ : rooms_;
    const auto& accesses = gives ? here(q).gives : here(q).takes;
    const auto waits = [&](const Access& a) { return p_.channels[size_t(a.channel)].waits; };
    std::map<int, int64_t> wanted;
    for (const auto& a : accesses)
      if (waits(a)) wanted[a.channel] += a.count;
    for (const auto& [c, count] : wanted)
      if (int64_t(from[size_t(c)].size()) < count) return false;
    for (const auto& [c, count] : wanted)
      for (int64_t n = 0; n < count; ++n) {
        join(state.clock, from[size_t(c)].front());
        from[size_t(c)].pop_front();
      }
    if (gives) state.clock[q] = int64_t(state.steps) + 1;
    for (const auto& [c, count] : wanted)
      into[size_t(c)].insert(into[size_t(c)].end(), size_t(count), state.clock);
    if (gives) {
      state.moment = 0;
      ++state.steps;
    } else {
      state.moment = 1;
      begin(q);
    }
    return true;
  }

  void begin(size_t q) {
    State& state = states_[q];
    state.starts[state.steps] = state.clock;
    for (const auto& [buffer, writes] : here(q).uses)
      for (size_t other = 0; other < states_.size(); ++other) {
        if (other == q) continue;
        auto& last = used_[size_t(buffer)].last;
        const int64_t since = std::max(last[true][other], writes ? last[false][other] : 0);
        if (state.clock[other] < since)
          race_ = cat("race: ", here(q).name, " on ", p_.buffers[size_t(buffer)]);
      }
    for (const auto& [buffer, writes] : here(q).uses)
      used_[size_t(buffer)].last[writes][q] = int64_t(state.steps) + 1;
  }

  bool meet(size_t q) {
    const Operation& mine = here(q);
    const bool message = mine.kind <= Operation::Kind::Recv;
    std::vector<size_t> all;
    if (message) {
      all = {q, size_t(mine.peer)};
    } else {
      for (const int member : p_.groups[size_t(mine.group)].queues) all.push_back(size_t(member));
      if (std::ranges::find(all, q) == all.end()) return wrong_ = "no member", false;
      for (const int part : mine.parts)
        for (size_t other = 0; other < p_.rows.size(); ++other)
          if (!p_.parts[size_t(part)].rows[other].empty() &&
              std::ranges::find(all, other) == all.end())
            return wrong_ = "a part on a queue that is no member", false;
    }
    for (const size_t other : all) {
      if (other == q && !message) continue;
      if (done(other) || states_[other].moment != 1 || !here(other).meets()) return false;
      const Operation& theirs = here(other);
      if (message && other != q) {
        const auto answer =
            mine.kind == Operation::Kind::Send ? Operation::Kind::Recv : Operation::Kind::Send;
        if (theirs.kind != answer || theirs.peer != int(q)) return false;
      } else if (!message && (theirs.kind <= Operation::Kind::Recv || theirs.group != mine.group)) {
        return false;
      }
    }
    if (message && mine.peer == int(q)) return false;
    Clock joined = {};
    for (const size_t other : all) {
      const Operation& theirs = here(other);
      if (theirs.what != mine.what || theirs.parts != mine.parts ||
          (!message && theirs.kind != mine.kind))
        wrong_ = cat("meeting: ", mine.what, " is ", theirs.what);
      join(joined, states_[other].clock);
    }
    for (const size_t other : all) {
      states_[other].clock = joined;
      states_[other].moment = 2;
    }
    return true;
  }

  // Every size is one of 0..63 here: a name's sizes are what all its places allow.
  static std::string judge_sizes(const Program& program) {
    std::map<std::string, uint64_t> names;
    std::vector<const Channel*> channels;
    collect(program, channels);
    const auto allowed = [](const Size& size) {
      uint64_t bits = 0;
      for (int64_t n = 0; n < 64; ++n)
        if (size.holds(n)) bits |= uint64_t(1) << n;
      return bits;
    };
    // Until nothing changes: what an end allows is what its bounds, its name and the other end do.
    for (bool changes = true; changes;) {
      changes = false;
      for (const Channel* channel : channels) {
        const Port &a = channel->given, &b = channel->taken;
        const bool both = !a.name.empty() && !b.name.empty();
        if (both && (a.type != b.type || a.shape.size() != b.shape.size())) return "type or rank";
        for (const Port* port : {&a, &b})
          for (size_t d = 0; !port->name.empty() && d < port->shape.size(); ++d) {
            uint64_t bits = ~uint64_t(0);
            for (const Port* end : {&a, &b})
              if (end == port || both) {
                bits &= allowed(end->shape[d]);
                if (const auto n = names.find(end->shape[d].name); n != names.end())
                  bits &= n->second;
              }
            if (bits == 0) return cat("size ", d, " of ", channel->name);
            if (port->shape[d].name.empty()) continue;
            auto& known = names.emplace(port->shape[d].name, ~uint64_t(0)).first->second;
            if (known != bits) changes = true;
            known = bits;
          }
      }
    }
    return "";
  }
  static void collect(const Program& program, std::vector<const Channel*>& channels) {
    for (const auto& channel : program.channels) channels.push_back(&channel);
    for (const auto& part : program.parts) collect(part, channels);
  }

  const Program& p_;
  std::vector<State> states_;
  std::vector<std::deque<Clock>> values_, rooms_;
  std::vector<Used> used_;
  std::string wrong_, race_;
};

// Random programs: a walk in one global order, in which every operation finds what it takes and
// room for what it gives, and after which each channel holds what it held before.
class Maker {
 public:
  explicit Maker(uint32_t seed) : rng_(seed) {}

  Program live(int num_operations) {
    Program program;
    const int most = std::clamp(num_operations / 5, 2, 5);
    const int queues = between(2, most);
    for (int q = 0; q < queues; ++q) program.queues.push_back(cat("cpu:", q));
    program.name = "random";
    std::vector<int> all;
    for (int q = 0; q < queues; ++q) all.push_back(q);
    fill(program, all, num_operations, true);
    return program;
  }

  enum class Harm { None, Swap, Token, Capacity, Meetings, Count, Port, Write, Use, Meaning };
  // One change, which may do harm. None: there was nothing to change.
  Harm damage(Program& whole) {
    Program& p = !whole.parts.empty() && chance(0.2) ? whole.parts[0] : whole;
    const auto harm = Harm(1 + below(9));
    auto& row = p.rows[below(p.rows.size())];
    return !row.empty() && damage(harm, p, row) ? harm : Harm::None;
  }

  size_t below(size_t bound) { return size_t(rng_() % bound); }
  bool chance(double p) { return double(rng_()) < p * 4294967296.0; }

 private:
  bool damage(Harm harm, Program& p, std::vector<Operation>& row) {
    auto& operation = row[below(row.size())];
    auto* channel = p.channels.empty() ? nullptr : &p.channels[below(p.channels.size())];
    switch (harm) {
      case Harm::Swap: {
        auto& other = row[below(row.size())];
        if (&operation != &other) std::swap(operation, other);
        return &operation != &other;
      }
      case Harm::Token:
        return channel && channel->initial > 0 && channel->initial-- > 0;
      case Harm::Capacity:
        return channel && channel->capacity-- > 0;
      case Harm::Meetings: {  // one member does two the other way around
        std::vector<size_t> meetings;
        for (size_t i = 0; i < row.size(); ++i)
          if (row[i].meets()) meetings.push_back(i);
        if (meetings.size() < 2) return false;
        const size_t k = below(meetings.size() - 1);
        std::swap(row[meetings[k]], row[meetings[k + 1]]);
        return true;
      }
      case Harm::Count: {
        auto& list = chance(0.5) ? operation.takes : operation.gives;
        if (list.empty()) return false;
        list[below(list.size())].count += chance(0.5) ? 1 : -1;
        return true;
      }
      case Harm::Port:
        if (!channel || channel->given.name.empty()) return false;
        change(chance(0.5) ? channel->given : channel->taken);
        return true;
      case Harm::Write:
        return !operation.uses.empty() && touch(operation, operation.uses[0].buffer);
      case Harm::Use:
        return !p.buffers.empty() && touch(operation, int(below(p.buffers.size())));
      default:
        if (!operation.meets()) return false;
        operation.what = cat("m", below(4));
        return true;
    }
  }
  static bool touch(Operation& operation, int buffer) {
    const auto use = std::ranges::find(operation.uses, buffer, &Use::buffer);
    if (use == operation.uses.end()) return operation.uses.push_back({buffer, true}), true;
    return !std::exchange(use->writes, true);
  }
  void change(Port& port) {
    if (port.shape.empty() || chance(0.3)) {
      port.type = port.type == Type::Fp32 ? Type::Fp16 : Type::Fp32;
      return;
    }
    Size& size = port.shape[below(port.shape.size())];
    if (chance(0.3)) {
      size.name = size.name == "b" ? "t" : "b";
    } else {
      const int64_t other = size.least + (chance(0.5) ? 1 : 2);
      size = {.least = other, .most = other};
    }
  }

  struct Open {  // a channel while it is made
    int from = 0, to = 0;
    int64_t held = 0, most = 0;
  };

  int between(int least, int most) { return least + int(below(size_t(most - least + 1))); }
  template <typename T>
  const T& one(const std::vector<T>& list) {
    return list[below(list.size())];
  }

  void fill(Program& p, const std::vector<int>& queues, int num_operations, bool may_nest) {
    p.rows.resize(p.queues.size());
    std::vector<Open> open;
    int made = 0, messages = 0;
    if (queues.size() > 1)
      for (int g = 0; g < between(1, 2); ++g) {
        auto members = queues;
        std::ranges::shuffle(members, rng_);
        members.resize(size_t(between(2, int(members.size()))));
        p.groups.push_back({cat("g", g), members});
      }
    const int rest = std::min(num_operations / 4, int(queues.size()));
    while (made < num_operations - rest) {
      const double kind = double(below(100)) / 100;
      if (kind < 0.15 && queues.size() > 1) {
        const int from = one(queues);
        int to = one(queues);
        while (to == from) to = one(queues);
        const std::string what = cat("m", chance(0.5) ? messages % 4 : 0);
        ++messages;
        meet(p, open, queues,
             {{from,
               {.name = cat("s", made), .kind = Operation::Kind::Send, .peer = to, .what = what}},
              {to,
               {.name = cat("r", made),
                .kind = Operation::Kind::Recv,
                .peer = from,
                .what = what}}});
        made += 2;
      } else if (kind < 0.25 && !p.groups.empty()) {
        const int group = int(below(p.groups.size()));
        Operation o{.name = cat("c", made),
                    .kind = Operation::Kind::Collective,
                    .group = group,
                    .what = cat("m", below(4))};
        const auto& members = p.groups[size_t(group)].queues;
        if (may_nest && p.parts.empty() && num_operations > 20 && chance(0.5)) {
          Program part{.name = "body", .queues = p.queues};
          fill(part, members, between(4, 8), false);
          made += int(part.num_operations());
          p.parts.push_back(std::move(part));
          o.kind = chance(0.5) ? Operation::Kind::Loop : Operation::Kind::Branch;
          o.parts = {0};
        }
        std::vector<std::pair<int, Operation>> ends;
        for (const int member : members) ends.push_back({member, o});
        made += int(members.size());
        meet(p, open, queues, std::move(ends));
      } else {
        Operation o{.name = cat("o", made++)};
        if (chance(0.2)) o.kind = Operation::Kind::Copy;
        meet(p, open, queues, {{one(queues), std::move(o)}});
      }
    }
    close(p, open, queues);
    for (size_t c = 0; c < open.size(); ++c) {
      p.channels[c].capacity = std::max<int64_t>(open[c].most, 1) + (chance(0.25) ? 1 : 0);
      if (chance(0.6)) name_sizes(p.channels[c]);
    }
    touch_buffers(p, queues);
  }

  // Appends operations that happen at once: all take, then all give.
  void meet(Program& p, std::vector<Open>& open, const std::vector<int>& queues,
            std::vector<std::pair<int, Operation>> ends) {
    for (auto& [queue, o] : ends) {
      for (size_t c = 0; c < open.size() && o.takes.size() < 3; ++c)
        if (open[c].to == queue && open[c].held > 0 && chance(0.7)) {
          const int64_t count = chance(0.6) ? open[c].held : between(1, int(open[c].held));
          o.takes.push_back({int(c), count});
          open[c].held -= count;
        }
    }
    for (auto& [queue, o] : ends) {
      for (size_t c = 0; c < open.size() && o.gives.size() < 2; ++c)
        if (open[c].from == queue && open[c].held < 4 && chance(0.4)) give(open, o, int(c));
      if (chance(o.meets() ? 0.3 : 0.7)) {
        const bool before = chance(0.3);  // holds values before the first round
        Open it{queue, one(queues), before ? between(1, 3) : 0, 0};
        it.most = it.held;
        if (before && chance(0.5)) std::swap(it.from, it.to);
        const int c = int(open.size());
        open.push_back(it);
        p.channels.push_back(
            {.name = cat("k", p.channels.size()), .initial = it.held, .waits = !chance(0.04)});
        if (it.from == queue) give(open, o, c);
      }
      p.rows[size_t(queue)].push_back(std::move(o));
    }
  }
  void give(std::vector<Open>& open, Operation& o, int c) {
    const int64_t count = chance(0.6) ? 1 : between(2, 3);
    o.gives.push_back({c, count});
    Open& it = open[size_t(c)];
    it.held += count;
    it.most = std::max(it.most, it.held);
  }
  // Each channel back to what it held.
  void close(Program& p, std::vector<Open>& open, const std::vector<int>& queues) {
    for (const bool gives : {false, true})
      for (const int q : queues) {
        Operation o{.name = cat(gives ? "refill" : "drain", q)};
        for (size_t c = 0; c < open.size(); ++c) {
          const int64_t over = open[c].held - p.channels[c].initial;
          if (!gives && open[c].to == q && over > 0) o.takes.push_back({int(c), over});
          if (gives && open[c].from == q && over < 0) o.gives.push_back({int(c), -over});
          if (gives ? open[c].from == q && over < 0 : open[c].to == q && over > 0)
            open[c].held = p.channels[c].initial;
        }
        if (!o.takes.empty() || !o.gives.empty()) p.rows[size_t(q)].push_back(std::move(o));
      }
  }

  // Both ends say of one true size what they know of it.
  void name_sizes(Channel& channel) {
    static const std::array<std::pair<const char*, int64_t>, 3> kTrue{
        {{"b", 4}, {"t", 9}, {"h", 4}}};
    const Type type = chance(0.5) ? Type::Fp32 : Type::Int64;
    channel.given = {.name = "y", .type = type};
    channel.taken = {.name = "x", .type = type};
    for (int d = between(0, 3); d > 0; --d) {
      const auto& [name, size] = kTrue[below(kTrue.size())];
      for (Port* port : {&channel.given, &channel.taken}) {
        Size said;
        if (const size_t kind = below(10); kind < 4)
          said = {.least = size, .most = size};
        else if (kind < 6)
          said = {.least = size - int64_t(below(3)), .most = size + int64_t(below(3))};
        if (chance(0.4)) said.name = name;
        port->shape.push_back(said);
      }
    }
  }

  // Uses that the clocks put into one order, and some that only read.
  void touch_buffers(Program& p, const std::vector<int>& queues) {
    Oracle clocks(p);
    if (!clocks.run().empty()) return;
    struct At {
      size_t queue, index;
      bool writes;
    };
    for (int b = 0; b < between(1, 3); ++b) {
      p.buffers.push_back(cat("w", b));
      std::vector<At> users;
      const bool reads_only = chance(0.2);
      for (int tries = 0; tries < 12 && users.size() < 4; ++tries) {
        const auto queue = size_t(one(queues));
        if (p.rows[queue].empty()) continue;
        const At it{queue, below(p.rows[queue].size()), !reads_only && chance(0.6)};
        const auto in_order = [&](const At& a, const At& b) {
          return clocks.before(a.queue, a.index, b.queue, b.index, false) &&
                 clocks.before(b.queue, b.index, a.queue, a.index, true);
        };
        if (std::ranges::all_of(users, [&](const At& u) {
              if (u.queue == it.queue) return u.index != it.index;
              return (!u.writes && !it.writes) || in_order(u, it) || in_order(it, u);
            })) {
          users.push_back(it);
          p.rows[queue][it.index].uses.push_back({b, it.writes});
        }
      }
    }
  }

  std::mt19937 rng_;
};

// Threads that stay, one for each queue of whatever program is given.
class Crew {
 public:
  explicit Crew(size_t size) {
    for (size_t i = 0; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Crew() {
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void run(size_t num, const std::function<void(size_t)>& job) {
    std::unique_lock lock(mutex_);
    job_ = &job;
    num_ = num;
    left_ = threads_.size();
    ++turn_;
    wake_.notify_all();
    idle_.wait(lock, [&] { return left_ == 0; });
  }

 private:
  void serve(size_t i) {
    for (int64_t turn = 1;; ++turn) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return ends_ || turn_ == turn; });
      if (ends_) return;
      const auto* job = i < num_ ? job_ : nullptr;
      lock.unlock();
      if (job) (*job)(i);
      lock.lock();
      if (--left_ == 0) idle_.notify_one();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  const std::function<void(size_t)>* job_ = nullptr;
  size_t num_ = 0, left_ = 0;
  int64_t turn_ = 0;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

// Runs a program's rows on threads that really wait, each with short random delays.
class Threaded {
 public:
  // What went wrong; empty if nothing did.
  static std::string run(Crew& crew, const Program& program, int rounds, uint32_t seed) {
    Shared shared;
    Threaded whole(program, shared);
    crew.run(program.rows.size(), [&](size_t queue) {
      std::mt19937 rng(seed * 8 + uint32_t(queue));
      whole.walk(queue, rounds, rng);
    });
    return shared.wrong;
  }

 private:
  struct Waiter {
    std::function<bool()> ready;
    std::condition_variable woken;
  };
  struct Shared {
    std::mutex mutex;
    std::vector<Waiter*> waiting;
    std::chrono::steady_clock::time_point deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(20);
    std::string wrong;
  };
  struct Meeting {
    size_t here = 0;
    int64_t done = 0;
    std::string what;
  };
  struct Buffer {
    int readers = 0, writers = 0;
  };

  Threaded(const Program& program, Shared& shared)
      : p_(program), shared_(shared), groups_(p_.groups.size()), buffers_(p_.buffers.size()) {
    for (const auto& channel : p_.channels) held_.push_back(channel.initial);
    for (const auto& part : p_.parts)
      parts_.push_back(std::unique_ptr<Threaded>(new Threaded(part, shared)));
  }

  void walk(size_t queue, int rounds, std::mt19937& rng) {
    for (int round = 0; round < rounds; ++round)
      for (const auto& o : p_.rows[queue]) {
        {
          std::unique_lock lock(shared_.mutex);
          if (!move(lock, o.takes, -1)) return;
          touch(o, 1);
          if (o.meets() && !meet(lock, queue, o)) return;
        }
        if (const auto r = rng() % 16; r < 2)
          std::this_thread::yield();
        else if (r < 6)
          for (volatile uint32_t spin = rng() % 256; spin > 0;) spin = spin - 1;
        if (!o.parts.empty()) {
          const bool loops = o.kind == Operation::Kind::Loop;
          parts_[size_t(o.parts[size_t(round) % o.parts.size()])]->walk(queue, loops ? 2 : 1, rng);
        }
        std::unique_lock lock(shared_.mutex);
        touch(o, -1);
        if (!move(lock, o.gives, 1)) return;
      }
  }

  bool wait(std::unique_lock<std::mutex>& lock, std::function<bool()> ready) {
    if (!shared_.wrong.empty() || ready()) return shared_.wrong.empty();
    Waiter waiter{std::move(ready), {}};
    shared_.waiting.push_back(&waiter);
    const bool came = waiter.woken.wait_until(
        lock, shared_.deadline, [&] { return !shared_.wrong.empty() || waiter.ready(); });
    std::erase(shared_.waiting, &waiter);
    if (!came) wrong("waited too long");
    return shared_.wrong.empty();
  }
  void wrong(const std::string& what) {
    if (shared_.wrong.empty()) shared_.wrong = what;
    for (Waiter* waiter : shared_.waiting) waiter->woken.notify_one();
  }
  void tell() {
    for (Waiter* waiter : shared_.waiting)
      if (waiter->ready()) waiter->woken.notify_one();
  }

  bool move(std::unique_lock<std::mutex>& lock, const std::vector<Access>& accesses, int sign) {
    const auto fits = [&](const Access& a) {
      const auto& channel = p_.channels[size_t(a.channel)];
      const int64_t after = held_[size_t(a.channel)] + sign * a.count;
      return !channel.waits || (after >= 0 && after <= channel.capacity);
    };
    if (accesses.empty()) return true;
    if (!wait(lock, [&] { return std::ranges::all_of(accesses, fits); })) return false;
    for (const auto& a : accesses) held_[size_t(a.channel)] += sign * a.count;
    tell();
    return true;
  }
  void touch(const Operation& o, int by) {
    for (const auto& [b, writes] : o.uses) {
      auto& buffer = buffers_[size_t(b)];
      (writes ? buffer.writers : buffer.readers) += by;
      if (buffer.writers > 1 || (buffer.writers == 1 && buffer.readers > 0))
        wrong(cat("two touch ", p_.buffers[size_t(b)]));
    }
  }
  bool meet(std::unique_lock<std::mutex>& lock, size_t queue, const Operation& o) {
    const bool message = o.kind <= Operation::Kind::Recv, sends = o.kind == Operation::Kind::Send;
    auto& meeting =
        message ? messages_[sends ? std::pair(int(queue), o.peer) : std::pair(o.peer, int(queue))]
                : groups_[size_t(o.group)];
    const size_t size = message ? 2 : p_.groups[size_t(o.group)].queues.size();
    if (meeting.here == 0) meeting.what = o.what;
    if (meeting.what != o.what) wrong(cat(meeting.what, " meets ", o.what));
    if (++meeting.here == size) {
      meeting.here = 0;
      ++meeting.done;
      tell();
      return true;
    }
    return wait(lock, [&, before = meeting.done] { return meeting.done != before; });
  }

  const Program& p_;
  Shared& shared_;
  std::vector<int64_t> held_;
  std::map<std::pair<int, int>, Meeting> messages_;
  std::vector<Meeting> groups_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Threaded>> parts_;
};

}  // namespace yoke::plan::detail
