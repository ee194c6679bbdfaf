// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/shm/board.h"

#include <c10/core/CPUAllocator.h>

namespace yoke::comm {
namespace {

size_t in_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

Board::Piece piece_of(const at::Tensor& tensor, Location at) {
  Board::Piece piece{.at = at, .num_dims = tensor.dim(), .sizes = {}};
  if (tensor.dim() > Board::kMaxDims) {
    piece.num_dims = 1;
    piece.sizes[0] = tensor.numel();
  } else {
    for (int64_t d = 0; d < tensor.dim(); ++d) piece.sizes[size_t(d)] = tensor.size(d);
  }
  return piece;
}

at::Tensor tensor_of(const Board::Piece& piece, at::ScalarType type, SharedMemory* memory) {
  const at::IntArrayRef sizes(piece.sizes.data(), size_t(piece.num_dims));
  void* data = memory != nullptr ? memory->address(piece.at) : nullptr;
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * c10::elementSize(type);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(data, at::kCPU));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace

Board::Piece* pieces_of(Board::Part& part) { return reinterpret_cast<Board::Piece*>(&part + 1); }

size_t Board::part_bytes(size_t size) { return in_lines(sizeof(Part) + 2 * size * sizeof(Piece)); }

size_t Board::slot_bytes(size_t size) {
  return sizeof(Slot) + size * (sizeof(Share) + part_bytes(size));
}

size_t Board::bytes(int size) {
  const auto n = size_t(size);
  return sizeof(Header) + kSlots * (slot_bytes(n) + n * n * sizeof(Message));
}

Board::Slot& Board::slot(uint64_t sequence) const {
  return *reinterpret_cast<Slot*>(memory_ + sizeof(Header) + sequence % kSlots * slot_bytes(size_));
}

Board::Share& Board::share(uint64_t sequence, int rank) const {
  return reinterpret_cast<Share*>(&slot(sequence) + 1)[rank];
}

Board::Part& Board::part(uint64_t sequence, int rank) const {
  char* parts = reinterpret_cast<char*>(&share(sequence, 0) + size_);
  return *reinterpret_cast<Part*>(parts + size_t(rank) * part_bytes(size_));
}

Board::Message& Board::message(int from, int to, uint64_t sequence) const {
  char* messages = memory_ + sizeof(Header) + kSlots * slot_bytes(size_);
  const size_t pair = size_t(from) * size_ + size_t(to);
  return reinterpret_cast<Message*>(messages)[pair * kSlots + sequence % kSlots];
}

bool Board::complete(uint64_t sequence) const {
  return slot(sequence).arrived.load(std::memory_order_acquire) == size_ * (sequence / kSlots + 1);
}

void write(Board::Part& part, const Operation& operation, const std::vector<Location>& places) {
  const at::Tensor& subject = operation.subject();
  part.kind = operation.kind;
  part.reduce = operation.reduce ? int(*operation.reduce) : -1;
  part.root = operation.root;
  part.color = operation.color;
  part.key = operation.key;
  part.type = subject.defined() ? subject.scalar_type() : at::kByte;
  part.num_inputs = uint32_t(operation.inputs.size());
  part.num_outputs = uint32_t(operation.outputs.size());
  Board::Piece* piece = pieces_of(part);
  auto place = places.begin();
  for (const auto* list : {&operation.inputs, &operation.outputs})
    for (const auto& tensor : *list) *piece++ = piece_of(tensor, *place++);
}

Operation read(Board::Part& part, SharedMemory* memory) {
  Operation operation{.kind = part.kind, .root = part.root, .color = part.color, .key = part.key};
  if (part.reduce >= 0) operation.reduce = ReduceOp(part.reduce);
  const Board::Piece* piece = pieces_of(part);
  for (uint32_t i = 0; i < part.num_inputs; ++i)
    operation.inputs.push_back(tensor_of(*piece++, part.type, memory));
  for (uint32_t i = 0; i < part.num_outputs; ++i)
    operation.outputs.push_back(tensor_of(*piece++, part.type, memory));
  return operation;
}

}  // namespace yoke::comm
