// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/signature.h"

#include "yoke/comm/wire.h"

namespace yoke::comm {
namespace {

void put(Writer& out, const std::vector<at::Tensor>& pieces) {
  out.put(uint32_t(pieces.size()));
  for (const auto& piece : pieces) {
    out.put(piece.scalar_type()).put(piece.device().type()).put(uint32_t(piece.dim()));
    for (const int64_t size : piece.sizes()) out.put(size);
  }
}

std::vector<at::Tensor> get_pieces(Reader& in) {
  std::vector<at::Tensor> pieces(in.get<uint32_t>());
  for (auto& piece : pieces) {
    const auto type = in.get<at::ScalarType>();
    const auto device = in.get<at::DeviceType>();
    std::vector<int64_t> sizes(in.get<uint32_t>());
    for (int64_t& size : sizes) size = in.get<int64_t>();
    const auto key = device == at::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    piece = at::detail::make_tensor<c10::TensorImpl>(
        c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(type),
        at::Device(device, device == at::kCPU ? -1 : 0));
    piece.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  return pieces;
}

}  // namespace

std::string encode(const Operation& operation) {
  Writer out;
  out.put(operation.kind).put(operation.reduce ? int(*operation.reduce) : -1).put(operation.root);
  out.put(operation.color).put(operation.key);
  put(out, operation.inputs);
  put(out, operation.outputs);
  return out.bytes();
}

Operation decode(std::string_view bytes) {
  Reader in(bytes);
  Operation operation{.kind = in.get<OpKind>()};
  if (const int reduce = in.get<int>(); reduce >= 0) operation.reduce = ReduceOp(reduce);
  operation.root = in.get<int>();
  operation.color = in.get<int>();
  operation.key = in.get<int>();
  operation.inputs = get_pieces(in);
  operation.outputs = get_pieces(in);
  return operation;
}

}  // namespace yoke::comm
