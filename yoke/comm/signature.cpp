// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/signature.h"

#include <c10/core/TensorOptions.h>

#include "yoke/comm/wire.h"

namespace yoke::comm {
namespace {

void put(Writer& writer, const std::vector<at::Tensor>& tensors) {
  writer.put(uint32_t(tensors.size()));
  for (const auto& tensor : tensors) {
    writer.put(tensor.scalar_type()).put(tensor.device().type()).put(uint32_t(tensor.dim()));
    for (const int64_t size : tensor.sizes()) writer.put(size);
  }
}

at::Tensor without_memory(at::ScalarType type, at::Device device, at::IntArrayRef sizes) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device));
  const c10::DispatchKeySet keys(c10::computeDispatchKey(type, at::kStrided, device));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys,
                                                         c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

std::vector<at::Tensor> get_tensors(Reader& reader) {
  std::vector<at::Tensor> tensors(reader.get<uint32_t>());
  for (auto& tensor : tensors) {
    const auto type = reader.get<at::ScalarType>();
    const auto device = reader.get<at::DeviceType>();
    std::vector<int64_t> sizes(reader.get<uint32_t>());
    for (auto& size : sizes) size = reader.get<int64_t>();
    tensor = without_memory(type, at::Device(device, device == at::kCPU ? -1 : 0), sizes);
  }
  return tensors;
}

}  // namespace

std::string encode(const Operation& operation) {
  Writer writer;
  writer.put(operation.kind).put(operation.reduce.has_value());
  writer.put(operation.reduce.value_or(ReduceOp::Sum)).put(operation.root);
  writer.put(operation.color).put(operation.key);
  put(writer, operation.inputs);
  put(writer, operation.outputs);
  return writer.bytes();
}

Operation decode(std::string_view bytes) {
  Reader reader(bytes);
  Operation operation{.kind = reader.get<OpKind>()};
  const bool reduces = reader.get<bool>();
  const auto reduce = reader.get<ReduceOp>();
  if (reduces) operation.reduce = reduce;
  operation.root = reader.get<int>();
  operation.color = reader.get<int>();
  operation.key = reader.get<int>();
  operation.inputs = get_tensors(reader);
  operation.outputs = get_tensors(reader);
  return operation;
}

}  // namespace yoke::comm
