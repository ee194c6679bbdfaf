// SPDX-License-Identifier: Apache-2.0
// What the mpi backend does for each kind of operation.
#include <algorithm>
#include <cstring>

#include "yoke/comm/local/group.h"
#include "yoke/comm/local/reduce.h"
#include "yoke/comm/mpi/engine.h"
#include "yoke/comm/signature.h"

namespace yoke::comm {
namespace {

// Up to here a second round of messages costs more than sending everything to everybody.
constexpr size_t kSmallBytes = 8 << 10;
constexpr size_t kSmallBroadcastBytes = 256 << 10;

// The tags of a context: the collectives' from 0, then these.
enum : int { kCheckTag = 60, kHeaderTag, kPayloadTag, kTagsPerContext };

// Goes ahead of a message, so that one of the wrong size is found before it is taken.
struct Header {
  int64_t numel;
  at::ScalarType type;
  char text[239];  // of the call, cut short if need be
};

// Reading and writing are told apart for tensors that share memory until they are written.
Bytes to_read(const at::Tensor& tensor) {
  return {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), tensor.nbytes()};
}
Bytes to_write(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

template <typename T>
Bytes bytes_of(T& value) {
  return {reinterpret_cast<char*>(&value), sizeof value};
}

// One task in its group. Small: every step keeps a copy.
struct Steps {
  using List = std::vector<std::function<void()>>;
  using PerRank = std::vector<Bytes>;

  MpiRank& rank;
  MpiTask& task;
  const MpiGroup& group = *task.group;
  const Operation& part = task.part;
  const size_t n = group.members.size(), me = size_t(group.rank), root = size_t(part.root);

  int tag(int number) const { return group.context * kTagsPerContext + number; }
  // Calls that differ seldom meet by mistake: unlike ones wait for each other until the deadline.
  int tag() const {
    const int type = part.subject().defined() ? int(part.subject().scalar_type()) : 0;
    const int reduce = part.reduce ? int(*part.reduce) : 0;
    return tag(int(part.kind) * 5 + (reduce + 2 * type + 3 * (part.root + 1)) % 5);
  }

  PerRank nothing() const { return PerRank(n); }
  PerRank to_all(Bytes bytes) const { return PerRank(n, bytes); }
  PerRank only(size_t r, Bytes bytes) const {
    PerRank list(n);
    list[r] = bytes;
    return list;
  }
  template <typename Of>
  PerRank each(Of of) const {
    PerRank list;
    for (size_t r = 0; r < n; ++r) list.push_back(of(r));
    return list;
  }
  // One n-th of the elements.
  Bytes cut(Bytes whole, size_t r) const {
    const size_t element = part.subject().element_size(), count = whole.size() / element;
    const size_t begin = count * r / n, end = count * (r + 1) / n;
    return whole.subspan(begin * element, (end - begin) * element);
  }

  char* slot(size_t r, size_t stride) const {
    return static_cast<char*>(task.scratch.mutable_data_ptr()) + r * stride;
  }

  // The one primitive: what this rank gives to and gets from each rank. Both sides know the sizes.
  void exchange(int tag, const PerRank& give, const PerRank& get) const {
    const MpiChannel& channel = rank.channel();
    if (!get[me].empty() && get[me].data() != give[me].data())
      std::memcpy(get[me].data(), give[me].data(), get[me].size());
    for (size_t i = 1; i < n; ++i) {
      const size_t from = (me + n - i) % n;
      if (!get[from].empty()) channel.recv(group.members[from], tag, get[from], task.transfers);
    }
    for (size_t i = 1; i < n; ++i) {  // everybody begins with another one
      const size_t to = (me + i) % n;
      if (!give[to].empty()) channel.send(group.members[to], tag, give[to], task.transfers);
    }
  }

  void move(List& list) const;
  void broadcast(List& list) const;
  void reduce(List& list) const;
  void fold(Bytes mine, Bytes target, size_t stride) const;
  void check(List& list) const;
  void compare(const std::vector<std::string>& calls) const;
  void split(List& list) const;
  void send(List& list) const;
  void recv(List& list) const;
};

void Steps::move(List& list) const {
  list.push_back([*this] {
    auto inputs = [&] { return each([&](size_t r) { return to_read(part.inputs[r]); }); };
    auto outputs = [&] { return each([&](size_t r) { return to_write(part.outputs[r]); }); };
    switch (part.kind) {
      case OpKind::AllGather:
        return exchange(tag(), to_all(to_read(part.inputs[0])), outputs());
      case OpKind::Gather:
        return exchange(tag(), only(root, to_read(part.inputs[0])),
                        me == root ? outputs() : nothing());
      case OpKind::Scatter:
        return exchange(tag(), me == root ? inputs() : nothing(),
                        only(root, to_write(part.outputs[0])));
      case OpKind::AllToAll:
        return exchange(tag(), inputs(), outputs());
      default: {  // a barrier: a byte that says "I am here"
        const Bytes bytes = rank.scratch(task, n);
        return exchange(tag(), to_all(bytes.subspan(me, 1)),
                        each([&](size_t r) { return bytes.subspan(r, 1); }));
      }
    }
  });
}

void Steps::broadcast(List& list) const {
  const Bytes whole = to_write(part.outputs[0]);
  if (n <= 2 || whole.size() <= kSmallBroadcastBytes) {
    list.push_back([*this, whole] {
      exchange(tag(), me == root ? to_all(whole) : nothing(), only(root, whole));
    });
    return;
  }
  // The root gives each rank a piece, and each gives its piece to those that lack it.
  list.push_back([*this, whole] {
    const auto pieces = each([&](size_t r) { return cut(whole, r); });
    exchange(tag(), me == root ? pieces : nothing(), only(root, pieces[me]));
  });
  list.push_back([*this, whole] {
    const auto pieces = each([&](size_t r) { return cut(whole, r); });
    auto give = to_all(pieces[me]);
    give[root] = {};
    exchange(tag(), give, me == root ? nothing() : pieces);
  });
}

// Each rank gets its piece from all, folds it, and passes the result on. A small one is not cut:
// everybody who wants the result gets and folds the whole.
void Steps::reduce(List& list) const {
  const bool scattered = part.kind == OpKind::ReduceScatter, to_root = part.kind == OpKind::Reduce;
  const bool whole = !scattered && part.inputs[0].nbytes() <= kSmallBytes;
  auto piece = [*this, scattered, to_root, whole](size_t r) -> Bytes {
    if (scattered) return to_read(part.inputs[r]);
    if (!whole) return cut(to_read(part.inputs[0]), r);
    return to_root && r != root ? Bytes() : to_read(part.inputs[0]);
  };
  const size_t size = piece(me).size(), stride = (size + 63) / 64 * 64;
  list.push_back([=, *this] {
    const Bytes slots = rank.scratch(task, stride * n);
    auto get = each([&](size_t r) { return slots.subspan(r * stride, size); });
    get[me] = {};
    exchange(tag(), each(piece), get);
  });
  list.push_back([=, *this] {
    // The slot of this rank is free: a place for a result that is only passed on.
    const bool wanted = !part.outputs.empty();
    const Bytes output = wanted ? to_write(part.outputs[0]) : Bytes();
    const Bytes target = !wanted              ? Bytes(slot(me, stride), size)
                         : scattered || whole ? output
                                              : cut(output, me);
    fold(piece(me), target, stride);
    if (scattered || whole) return;
    exchange(tag(), to_root ? only(root, target) : to_all(target),
             wanted ? each([&](size_t r) { return cut(output, r); }) : nothing());
  });
}

void Steps::fold(Bytes mine, Bytes target, size_t stride) const {
  if (mine.empty()) return;
  if (n == 1) {
    if (mine.data() != target.data()) std::memcpy(target.data(), mine.data(), mine.size());
    return;
  }
  std::vector<const void*> sources;
  for (size_t r = 0; r < n; ++r) sources.push_back(r == me ? mine.data() : slot(r, stride));
  void* const result = target.data();
  const auto kernel = reduce_kernel(part.subject().scalar_type(), *part.reduce);
  kernel(sources, {&result, 1}, 0, int64_t(mine.size()) / part.subject().element_size());
}

void Steps::check(List& list) const {
  struct Calls {
    std::vector<uint64_t> sizes;
    std::vector<std::string> bytes;
  };
  const auto calls = std::make_shared<Calls>();
  list.push_back([*this, calls] {
    calls->bytes.resize(n);
    calls->bytes[me] = encode(part);
    calls->sizes.resize(n, calls->bytes[me].size());
    exchange(tag(kCheckTag), to_all(bytes_of(calls->sizes[me])),
             each([&](size_t r) { return bytes_of(calls->sizes[r]); }));
  });
  list.push_back([*this, calls] {
    for (size_t r = 0; r < n; ++r) calls->bytes[r].resize(calls->sizes[r]);
    exchange(tag(kCheckTag), to_all(calls->bytes[me]),
             each([&](size_t r) -> Bytes { return calls->bytes[r]; }));
  });
  list.push_back([*this, calls] { compare(calls->bytes); });
}

// All ranks look at all calls in one order, so that all say the same.
void Steps::compare(const std::vector<std::string>& calls) const {
  std::vector<Operation> parts;
  for (const auto& call : calls) {
    parts.push_back(decode(call));
    const int last = int(parts.size()) - 1;
    for (int other = 0; other < last; ++other)
      if (const auto reason = mismatch(parts[size_t(other)], other, parts.back(), last))
        rank.call_off(group.members[size_t(last)], Kind::Comm,
                      disagreement(*reason, {group.members[size_t(last)], parts.back().text()},
                                   {group.members[size_t(other)], parts[size_t(other)].text()},
                                   task.sequence, group.name));
  }
}

void Steps::split(List& list) const {
  struct Wish {
    int color, key, context;
  };
  const auto wishes = std::make_shared<std::vector<Wish>>(n);
  list.push_back([*this, wishes] {
    (*wishes)[me] = {part.color, part.key, rank.next_context()};
    exchange(tag(), to_all(bytes_of((*wishes)[me])),
             each([&](size_t r) { return bytes_of((*wishes)[r]); }));
  });
  list.push_back([*this, wishes] {
    int context = 0;
    std::vector<std::pair<int, int>> mine;  // (key, rank) of this rank's color
    for (int r = 0; r < int(n); ++r) {
      const Wish& wish = (*wishes)[size_t(r)];
      context = std::max(context, wish.context);
      if (wish.color == part.color && wish.color >= 0) mine.emplace_back(wish.key, r);
    }
    if (context >= rank.channel().max_tag() / kTagsPerContext)
      fail(Kind::Comm, "this MPI has tags for ", context, " groups only; split less often");
    std::ranges::sort(mine);
    std::vector<int> members;
    for (const auto& [key, r] : mine) members.push_back(group.members[size_t(r)]);
    task.formed = rank.form_group(cat(group.name, "/", task.sequence, ".", part.color),
                                  std::move(members), context);
  });
}

void Steps::send(List& list) const {
  list.push_back([*this] {
    const Bytes bytes = rank.scratch(task, sizeof(Header));
    Header header{
        .numel = part.subject().numel(), .type = part.subject().scalar_type(), .text = {}};
    part.text().copy(header.text, sizeof header.text - 1);
    std::memcpy(bytes.data(), &header, sizeof header);
    rank.channel().send(group.members[root], tag(kHeaderTag), bytes, task.transfers);
    rank.channel().send(group.members[root], tag(kPayloadTag), to_read(part.inputs[0]),
                        task.transfers, MpiChannel::Until::Taken);
  });
}

void Steps::recv(List& list) const {
  list.push_back([*this] {
    rank.channel().recv(group.members[root], tag(kHeaderTag), rank.scratch(task, sizeof(Header)),
                        task.transfers);
  });
  list.push_back([*this] {
    task.met = true;
    Header header;
    std::memcpy(&header, task.scratch.const_data_ptr(), sizeof header);
    const at::Tensor& inbox = part.outputs[0];
    if (const auto reason =
            message_mismatch(header.type, header.numel, inbox.scalar_type(), inbox.numel()))
      rank.call_off(rank.rank(), Kind::Comm,
                    disagreement(*reason, {rank.rank(), part.text()},
                                 {group.members[root], header.text}, task.sequence, group.name,
                                 /*message=*/true));
    rank.channel().recv(group.members[root], tag(kPayloadTag), to_write(inbox), task.transfers);
  });
}

}  // namespace

std::vector<std::function<void()>> steps_of(MpiRank& rank, MpiTask& task) {
  const Steps steps{rank, task};
  const bool collective = !task.part.point_to_point();
  Steps::List list;
  if (collective && rank.world().options().check && steps.n > 1) steps.check(list);
  list.push_back([&task] { run_copies(task.part.before); });
  switch (task.kind) {
    case OpKind::Send:
      steps.send(list);
      break;
    case OpKind::Recv:
      steps.recv(list);
      break;
    case OpKind::Split:
      steps.split(list);
      break;
    case OpKind::Broadcast:
      steps.broadcast(list);
      break;
    case OpKind::AllReduce:
    case OpKind::Reduce:
    case OpKind::ReduceScatter:
      steps.reduce(list);
      break;
    default:
      steps.move(list);
  }
  list.push_back([&task] { run_copies(task.part.after); });
  return list;
}

}  // namespace yoke::comm
