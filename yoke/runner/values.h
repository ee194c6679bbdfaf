// SPDX-License-Identifier: Apache-2.0
// What a call brings and what a model gives, as LibTorch has it: tensors, and lists of strings for
// Type::Bytes.
#pragma once

#include <ATen/core/ivalue.h>

#include "yoke/serve/worker.h"

namespace yoke::runner {

using Values = std::vector<c10::IValue>;

// In the memory that it lies in; strings are copied.
c10::IValue as_value(const serve::TensorView& view);
// The parts of a tuple, a list or a dictionary; of the latter those of `names` and in their order,
// or all where there are none. Throws Kind::Usage where there are others than tensors and strings.
Values flatten(const c10::IValue& result, const std::vector<std::string>& names);
std::vector<std::string> keys_of(const c10::IValue& result);  // of a dictionary, else none
bool is_strings(const c10::IValue& value);
void give_strings(const c10::IValue& strings, serve::Outputs& outputs);

plan::Type type_of(const c10::IValue& value);
plan::Shape shape_of(const c10::IValue& value);

}  // namespace yoke::runner
