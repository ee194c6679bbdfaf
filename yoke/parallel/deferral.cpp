// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/deferral.h"

#include <ATen/core/grad_mode.h>

#include <map>

namespace yoke::parallel {
namespace {

std::shared_ptr<Deferral>& of_this_thread() {
  thread_local std::shared_ptr<Deferral> deferral;
  return deferral;
}

}  // namespace

void Deferral::run(const Deliver& deliver) {
  const at::NoGradGuard no_grad;
  std::map<const at::TensorImpl*, int> left;
  for (const auto& [leaf, gradient] : todo_) ++left[leaf.unsafeGetTensorImpl()];
  for (auto& [leaf, gradient] : todo_) {
    deliver(leaf, gradient(), --left[leaf.unsafeGetTensorImpl()] == 0);
    gradient = nullptr;  // with what it has kept
  }
  todo_.clear();
}

std::shared_ptr<Deferral> Deferral::current() { return of_this_thread(); }

Deferral::Scope::Scope(std::shared_ptr<Deferral> deferral)
    : outer_(std::exchange(of_this_thread(), std::move(deferral))) {}
Deferral::Scope::~Scope() { of_this_thread() = std::move(outer_); }

}  // namespace yoke::parallel
