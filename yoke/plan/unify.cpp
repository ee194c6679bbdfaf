// SPDX-License-Identifier: Apache-2.0
#include "yoke/plan/unify.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "yoke/base/error.h"

namespace yoke::plan {
namespace {

// Sizes that must be equal, in classes with the range that is left to them.
class Sizes {
 public:
  int of(const Size& size) {
    if (size.name.empty()) return add(size);
    const auto [found, is_new] = named_.emplace(size.name, 0);
    if (is_new) found->second = add({});
    return found->second;
  }
  // False where nothing is left.
  bool equate(int a, int b) {
    a = root(a), b = root(b);
    const Size both{std::max(range_[size_t(a)].least, range_[size_t(b)].least),
                    std::min(range_[size_t(a)].most, range_[size_t(b)].most)};
    if (both.least > both.most) return false;
    parent_[size_t(b)] = a;
    range_[size_t(a)] = both;
    return true;
  }
  std::string text(int a) {
    const Size& range = range_[size_t(root(a))];
    if (range.fixed()) return cat(range.least);
    return range.most == INT64_MAX ? cat(range.least, " or more")
                                   : cat(range.least, "..", range.most);
  }

 private:
  int add(const Size& size) {
    parent_.push_back(int(parent_.size()));
    range_.push_back({size.least, size.most});
    return parent_.back();
  }
  int root(int a) {
    while (parent_[size_t(a)] != a) a = parent_[size_t(a)] = parent_[size_t(parent_[size_t(a)])];
    return a;
  }
  std::map<std::string, int> named_;
  std::vector<int> parent_;
  std::vector<Size> range_;
};

}  // namespace

std::optional<Knot> find_clash(const std::vector<const Program*>& programs) {
  Sizes sizes;
  for (size_t p = 0; p < programs.size(); ++p)
    for (size_t c = 0; c < programs[p]->channels.size(); ++c) {
      const auto& [given, taken] =
          std::tie(programs[p]->channels[c].given, programs[p]->channels[c].taken);
      const auto clash = [&](const auto&... parts) {
        return Knot{.rule = Rule::Shapes,
                    .what = cat("'", programs[p]->channels[c].name, "' is given ", given.text(),
                                " and taken as ", taken.text(), ": ", parts...),
                    .part = int(p) - 1,
                    .channel = int(c)};
      };
      // A name may have a range of its own at each place.
      for (const Port* port : {&given, &taken})
        for (const auto& size : port->name.empty() ? std::vector<Size>() : port->shape)
          if (!size.name.empty())
            if (const int a = sizes.of(size), b = sizes.of({size.least, size.most});
                !sizes.equate(a, b))
              return clash("'", size.name, "' is ", sizes.text(b), " here and ", sizes.text(a),
                           " elsewhere");
      if (given.name.empty() || taken.name.empty()) continue;
      if (given.type != taken.type)
        return clash(type_name(given.type), " is not ", type_name(taken.type));
      if (given.shape.size() != taken.shape.size())
        return clash("one has ", given.shape.size(), " sizes, the other ", taken.shape.size());
      for (size_t d = 0; d < given.shape.size(); ++d)
        if (const int a = sizes.of(given.shape[d]), b = sizes.of(taken.shape[d]);
            !sizes.equate(a, b))
          return clash("size ", d, " is ", sizes.text(a), " and ", sizes.text(b));
    }
  return std::nullopt;
}

}  // namespace yoke::plan
