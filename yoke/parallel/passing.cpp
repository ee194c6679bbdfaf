// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/passing.h"

#include <ATen/Functions.h>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

const Passing kNothing;
thread_local const Passing* current_passing = &kNothing;

}  // namespace

std::pair<at::Tensor, at::Tensor> KvCache::extend(const void* attention, const at::Tensor& keys,
                                                  const at::Tensor& values) {
  const int64_t tokens = keys.size(2), end = length_ + tokens;
  if (end > most_)
    fail(Kind::Usage, "token ", end, " of a text, and there is room for ", most_, " of them");
  const auto [kept, is_new] = kept_.try_emplace(attention);
  auto& [all_keys, all_values] = kept->second;
  if (is_new) {
    auto shape = keys.sizes().vec();
    shape[2] = most_;
    all_keys = at::empty(shape, keys.options());
    all_values = at::empty(shape, values.options());
  }
  all_keys.narrow(2, length_, tokens).copy_(keys);
  all_values.narrow(2, length_, tokens).copy_(values);
  return {all_keys.narrow(2, 0, end), all_values.narrow(2, 0, end)};
}

void KvCache::advance(int64_t tokens) { length_ += tokens; }

const Passing& Passing::current() { return *current_passing; }

Passing::Scope::Scope(Passing passing) : mine_(std::move(passing)), outer_(current_passing) {
  current_passing = &mine_;
}
Passing::Scope::~Scope() { current_passing = outer_; }

at::Tensor places_in(const at::Tensor& documents) {
  const at::Tensor places = at::arange(documents.size(1), documents.options());
  const at::Tensor begins =
      at::cat({at::ones_like(documents.narrow(1, 0, 1), documents.options().dtype(at::kBool)),
               documents.slice(1, 1) != documents.slice(1, 0, -1)},
              1);
  return places - std::get<0>((begins * places).cummax(1));
}

}  // namespace yoke::parallel
