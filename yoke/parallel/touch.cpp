// SPDX-License-Identifier: Apache-2.0
#include "yoke/parallel/touch.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstring>

#include "yoke/base/error.h"

namespace yoke::parallel {
namespace {

void not_owned(void*) {}  // its address marks the storages that are ours

at::DataPtr pointer(Touchable* owner, void* memory, at::Device device) {
  return {memory, owner, &not_owned, device};
}

thread_local int depth = 0;  // operations under way, one inside the other
std::atomic<uint64_t> num_threads{0};
thread_local uint64_t num_operations = ++num_threads << 40;  // a range for each thread
thread_local bool telling = false;  // an owner's own operations are not observed

void tell(const at::Tensor& tensor, Touch touch) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  if (Touchable* owner = owner_of(tensor)) {
    telling = true;
    owner->touched(touch);
    telling = false;
  }
}

// The engine tells of a backward node as if it were an operation around the node's own.
bool is_operation(const at::RecordFunction& function) {
  return std::strncmp(function.name(), "autograd::", 10) != 0;
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  if (!is_operation(function)) return nullptr;
  const Touch touch{.operation = ++num_operations, .outermost = depth++ == 0};
  if (telling) return nullptr;
  for (const c10::IValue& argument : function.inputs()) {
    if (argument.isTensor()) {
      tell(argument.toTensor(), touch);
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) tell(tensor, touch);
    } else if (argument.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorList())
        if (tensor) tell(*tensor, touch);
    }
  }
  return nullptr;
}

void after(const at::RecordFunction& function, at::ObserverContext*) {
  if (is_operation(function)) --depth;
}

}  // namespace

at::Tensor make_touchable(Touchable* owner, int64_t count, const at::TensorOptions& options,
                          void* memory) {
  const at::Tensor sample = at::empty({0}, options);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), size_t(count) * sample.element_size(),
                             pointer(owner, memory, sample.device()));
  return at::empty({0}, options).set_(storage, 0, {count});
}

void move_memory(const at::Tensor& tensor, void* memory) {
  Touchable* owner = owner_of(tensor);
  YOKE_CHECK(owner != nullptr);
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      pointer(owner, memory, tensor.device()));
}

void settle_memory(const at::Tensor& tensor, const at::Tensor& memory) {
  auto* keeper = new at::Tensor(memory);
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      {memory.mutable_data_ptr(), keeper, [](void* kept) { delete static_cast<at::Tensor*>(kept); },
       tensor.device()});
}

Touchable* owner_of(const at::Tensor& tensor) {
  const at::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->data_ptr();
  return data.get_deleter() == &not_owned ? static_cast<Touchable*>(data.get_context()) : nullptr;
}

TouchObserver::TouchObserver()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&before, &after)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {}

TouchObserver::~TouchObserver() { at::removeCallback(handle_); }

}  // namespace yoke::parallel
