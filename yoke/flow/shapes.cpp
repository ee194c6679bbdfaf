// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/shapes.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/flow/place.h"
#include "yoke/models/port.h"

namespace yoke::flow {
namespace {

using plan::Size;
using plan::Type;
using Sizes = std::vector<Size>;
using Known = std::optional<plan::Port>;

bool floating(Type type) {
  return type == Type::Fp16 || type == Type::Fp32 || type == Type::Fp64 || type == Type::Bf16;
}

// The type of what two are put together to, as LibTorch has it; nothing where it has none.
std::optional<Type> both(Type a, Type b) {
  if (a == b) return a;
  for (const Type type : {a, b})
    if (type == Type::Bytes || type == Type::Uint16 || type == Type::Uint32 || type == Type::Uint64)
      return std::nullopt;
  return models::type_of(c10::promoteTypes(models::dtype_of(a), models::dtype_of(b)));
}

// What may be either of two; nothing where they have nothing in common.
Known either(const Known& a, const Known& b) {
  if (!a || !b || a->type != b->type || a->shape.size() != b->shape.size()) return std::nullopt;
  Known out = a;
  for (size_t d = 0; d < a->shape.size(); ++d) {
    const auto &one = a->shape[d], &other = b->shape[d];
    if (!(one == other))
      out->shape[d] = {std::min(one.least, other.least), std::max(one.most, other.most)};
  }
  return out;
}

// Why a value of one cannot be one of the other; empty: it can.
std::string clash(const plan::Port& a, const plan::Port& b) {
  if (a.type != b.type) return cat(plan::type_name(a.type), " is not ", plan::type_name(b.type));
  if (a.shape.size() != b.shape.size())
    return cat("one has ", a.shape.size(), " sizes, the other ", b.shape.size());
  for (size_t d = 0; d < a.shape.size(); ++d)
    if (std::max(a.shape[d].least, b.shape[d].least) > std::min(a.shape[d].most, b.shape[d].most))
      return cat("size ", d, " does not agree");
  return {};
}

// A sum of sizes that may be open.
int64_t sum(int64_t a, int64_t b) {
  int64_t both = 0;
  return __builtin_add_overflow(a, b, &both) ? INT64_MAX : both;
}

class Patterns {
 public:
  explicit Patterns(Graph& graph) : graph_(graph), nodes_(graph.mutable_nodes()) {}

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t i = 0; i < nodes_.size(); ++i)
        if (!done_.contains(int(i)) && declare(int(i))) moved = done_.insert(int(i)).second;
      for (const auto& region : graph_.regions()) moved = declare_ends(region) || moved;
    }
    for (const auto& region : graph_.regions()) check_arms(region);
  }

 private:
  Node& node(int id) { return nodes_[size_t(id)]; }

  static void set(Port& port, Type type, Sizes shape) {
    if (port.declared) return;
    port.port = {.name = port.port.name, .type = type, .shape = std::move(shape)};
    port.declared = true;
  }
  static void set(Port& port, const plan::Port& known) { set(port, known.type, known.shape); }

  // What comes to an input; in a loop from outside, and from the turn before.
  Known coming(int id, size_t port) {
    if (const auto& own = node(id).inputs[port]; own.declared) return own.port;
    Known all;
    bool first = true;
    for (const auto& edge : graph_.edges()) {
      if (edge.to != id || edge.to_port != int(port)) continue;
      const auto& given = node(edge.from).outputs[size_t(edge.from_port)];
      if (!given.declared) return std::nullopt;
      all = first ? Known(given.port) : either(all, given.port);
      first = false;
    }
    return all;
  }

  std::string edge_to(int id, size_t port) const {
    for (const auto& edge : graph_.edges())
      if (edge.to == id && edge.to_port == int(port)) return edge_name(graph_, edge);
    return {};
  }

  // False where it is not known, or none of ours.
  bool declare(int id) {
    auto& at = node(id);
    if (at.what == "pass") {
      const Known known = at.outputs[0].declared ? at.outputs[0].port : coming(id, 0);
      if (!known) return false;
      set(at.inputs[0], *known), set(at.outputs[0], *known);
      return true;
    }
    const std::set<std::string> words{"mean",   "vote",  "stack", "weighted",
                                      "concat", "split", "merge"};
    if (!words.contains(at.what) || at.inputs.empty()) return false;
    std::vector<plan::Port> inputs;
    for (size_t i = 0; i < at.inputs.size(); ++i) {
      const Known known = coming(id, i);
      if (!known || known->type == Type::Bytes) return false;
      inputs.push_back(*known);
    }
    if (at.what == "split") return cut(id, inputs[0]);
    if (at.what != "merge") return join(id, inputs);
    set(at.inputs[0], inputs[0]);  // its output: declare_ends
    return true;
  }

  // Rows in pieces, the first of them one longer where they do not come out even.
  bool cut(int id, const plan::Port& input) {
    auto& at = node(id);
    if (input.shape.empty()) return false;  // LibTorch tells
    const auto pieces = int64_t(at.outputs.size());
    const Size rows = input.shape[0];
    if (rows.most < pieces)
      fail(Kind::Config, "'", edge_to(id, 0), "' gives ", input.wanted(),
           ", and cannot be cut into ", pieces, " pieces, one for each copy; give it more rows, ",
           "or make fewer copies");
    set(at.inputs[0], input);
    for (int64_t i = 0; i < pieces; ++i) {
      const auto part = [&](int64_t of) { return of / pieces + (i < of % pieces); };
      auto shape = input.shape;
      shape[0] = {part(rows.least), rows.most == INT64_MAX ? INT64_MAX : part(rows.most)};
      set(at.outputs[size_t(i)], input.type, shape);
    }
    return true;
  }

  // Several values put together: all of one shape, but for the rows of `concat` and the classes of
  // which `vote` takes the largest.
  bool join(int id, const std::vector<plan::Port>& inputs) {
    auto& at = node(id);
    const bool rows = at.what == "concat" && inputs.size() > 1, vote = at.what == "vote";
    const bool weighted = at.what == "weighted";
    std::vector<Sizes> shapes;
    std::optional<Type> type;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& input = inputs[i];
      if (rows && input.shape.empty()) return false;
      const bool scores = vote && floating(input.type) && input.shape.size() > 1;
      shapes.emplace_back(input.shape.begin() + rows, input.shape.end() - scores);
      const Type own = weighted && !floating(input.type) ? Type::Fp32 : input.type;
      type = i == 0 ? std::optional(own) : both(*type, own);
      if (!type && !vote) return false;
      if (vote) type = Type::Int64;
    }
    if (at.what == "mean" && !floating(*type))
      fail(
          Kind::Config, "'", edge_to(id, 0), "' gives ", inputs[0].wanted(),
          ", and a mean is of numbers in floating point; take merge = vote, or a node of your own");
    Sizes common = shapes[0];
    for (size_t i = 1; i < inputs.size(); ++i)
      if (const auto why = narrow(common, shapes[i]); !why.empty())
        fail(Kind::Config, "'", edge_to(id, 0), "' gives ", inputs[0].wanted(), " and '",
             edge_to(id, i), "' gives ", inputs[i].wanted(), ", and ", at.what,
             " wants values of one shape", rows ? " but for their rows" : "", ": ", why,
             "; let their nodes give the same, or put a node between");
    // What nobody has named is the same size nevertheless.
    for (size_t d = 0; d < common.size() && inputs.size() > 1; ++d)
      if (!common[d].fixed() && common[d].name.empty()) common[d].name = cat(at.name, ".", d);
    Size together{0, 0};
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto shape = inputs[i].shape;
      std::ranges::copy(common, shape.begin() + rows);
      if (rows) {
        shape[0].name.clear();
        together = {sum(together.least, shape[0].least), sum(together.most, shape[0].most)};
      }
      set(at.inputs[i], inputs[i].type, shape);
    }
    auto shape = common;
    if (rows) shape.insert(shape.begin(), together);
    if (at.what == "stack") {
      const auto count = int64_t(inputs.size());
      shape.insert(shape.begin(), {.least = count, .most = count});
    }
    set(at.outputs[0], *type, std::move(shape));
    return true;
  }

  // What is left to a shape that another must be equal to; or why there is nothing.
  static std::string narrow(Sizes& common, const Sizes& other) {
    if (common.size() != other.size())
      return cat("one has ", common.size(), " of these sizes, the other ", other.size());
    for (size_t d = 0; d < common.size(); ++d) {
      auto& size = common[d];
      const Size before{size.least, size.most};
      size.least = std::max(size.least, other[d].least);
      size.most = std::min(size.most, other[d].most);
      if (size.name.empty()) size.name = other[d].name;
      const auto text = [](const Size& one) {
        return one.fixed() ? cat(one.least) : cat(one.least, "..", one.most);
      };
      if (size.least > size.most)
        return cat(text(before), " is not ", text({other[d].least, other[d].most}));
    }
    return {};
  }

  // What leaves a branch is what either arm gives.
  bool declare_ends(const Region& region) {
    if (region.ends.empty()) return false;
    auto &a = node(region.ends[0]), &b = node(region.ends[1]);
    if (a.outputs[0].declared || !a.inputs[0].declared || !b.inputs[0].declared) return false;
    const Known known = either(a.inputs[0].port, b.inputs[0].port);
    if (!known) return false;
    set(a.outputs[0], *known), set(b.outputs[0], *known);
    return true;
  }

  // One arm at a time: a size that is open may be another in each.
  void check_arms(const Region& region) {
    for (const auto& edge : graph_.edges()) {
      if (region.ends.empty() || edge.from != region.ends[0]) continue;
      const auto& taker = node(edge.to).inputs[size_t(edge.to_port)];
      for (const int end : region.ends) {
        const auto& arm = node(end).inputs[0];
        if (!taker.declared || !arm.declared) continue;
        if (const auto why = clash(arm.port, taker.port); !why.empty())
          fail(Kind::Config, "branch '", region.name, "': '", edge_to(end, 0), "' gives ",
               arm.port.wanted(), ", and '", node(edge.to).name, ".", taker.port.name,
               "', which takes '", region.name, ".y', wants ", taker.port.wanted(), ": ", why,
               "; let both arms give what is wanted");
      }
    }
  }

  Graph& graph_;
  std::vector<Node>& nodes_;
  std::set<int> done_;
};

}  // namespace

void declare_patterns(Graph& graph) { Patterns(graph).run(); }

}  // namespace yoke::flow
