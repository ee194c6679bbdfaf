// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/communicator.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include "yoke/base/error.h"

namespace yoke::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

bool reduces(const at::Tensor& tensor, ReduceOp op) {
  const at::ScalarType type = tensor.scalar_type();
  if (c10::isComplexType(type))
    return op != ReduceOp::Min && op != ReduceOp::Max && type != at::kComplexHalf;
  if (type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble)
    return true;
  if (op == ReduceOp::Mean) return false;
  return type == at::kBool || type == at::kByte || type == at::kChar || type == at::kShort ||
         type == at::kInt || type == at::kLong ||
         (tensor.is_cpu() && (type == at::kUInt16 || type == at::kUInt32 || type == at::kUInt64));
}

// `count` elements of a contiguous tensor as a flat view. Made directly: through the dispatcher a
// view costs as much as a small collective.
at::Tensor run_of(const at::Tensor& whole, int64_t first, int64_t count) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
  view.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  view.unsafeGetTensorImpl()->set_storage_offset(whole.storage_offset() + first);
  return view;
}

// Builds the normal form of one call: checks the arguments, flattens them, stages what is not
// contiguous.
class Builder {
 public:
  Builder(const Backend& backend, OpKind kind) : backend_(backend) { op_.kind = kind; }

  Builder& reduce(ReduceOp op, const at::Tensor& tensor) {
    check_tensor(tensor);
    if (!reduces(tensor, op))
      wrong("cannot take the ", to_string(op), " of ", tensor.scalar_type(), " tensors",
            op == ReduceOp::Mean ? "; reduce with sum and divide, or convert to a floating type"
                                 : "");
    op_.reduce = op;
    return *this;
  }

  Builder& root(int rank) {
    if (rank < 0 || rank >= backend_.size())
      wrong("there is no rank ", rank, " among the ", backend_.size(), " ranks of ",
            backend_.name());
    op_.root = rank;
    return *this;
  }

  Builder& input(const at::Tensor& tensor) {
    op_.inputs.push_back(readable(tensor));
    return *this;
  }

  Builder& output(const at::Tensor& tensor) {
    op_.outputs.push_back(writable(tensor));
    return *this;
  }

  // One buffer that is read and written. The two share a staging copy.
  Builder& in_place(const at::Tensor& tensor) {
    check_writable(tensor);
    at::Tensor buffer = readable(tensor);
    op_.inputs.push_back(buffer);
    op_.outputs.push_back(buffer);
    if (!buffer.is_same(tensor)) op_.after.push_back({buffer, tensor});
    return *this;
  }

  Builder& inputs(const Tensors& tensors) {
    check_count(tensors);
    for (const auto& tensor : tensors) input(tensor);
    return *this;
  }

  Builder& outputs(const Tensors& tensors) {
    check_count(tensors);
    for (const auto& tensor : tensors) output(tensor);
    return *this;
  }

  // One buffer cut into size() equal pieces, in the order of its elements.
  Builder& even_inputs(const at::Tensor& whole) {
    for (const auto& piece : cut(readable(whole))) op_.inputs.push_back(piece);
    return *this;
  }

  Builder& even_outputs(const at::Tensor& whole) {
    for (const auto& piece : cut(writable(whole))) op_.outputs.push_back(piece);
    return *this;
  }

  // Checks that hold between the tensors of one call.
  Operation build() {
    const at::Tensor& subject = op_.subject();
    for (const auto* list : {&op_.inputs, &op_.outputs})
      for (const auto& tensor : *list)
        if (tensor.scalar_type() != subject.scalar_type() || tensor.device() != subject.device())
          wrong("its tensors must share dtype and device; got ", subject.scalar_type(), " on ",
                subject.device(), " and ", tensor.scalar_type(), " on ", tensor.device());
    const auto me = size_t(backend_.rank());
    auto piece = [me](const Tensors& list) -> const at::Tensor& {
      return list.size() == 1 ? list[0] : list[me];
    };
    if (!op_.inputs.empty() && !op_.outputs.empty() &&
        piece(op_.inputs).numel() != piece(op_.outputs).numel())
      wrong("this rank gives itself ", piece(op_.inputs).numel(), " elements but expects ",
            piece(op_.outputs).numel());
    if (op_.kind == OpKind::AllToAll || op_.kind == OpKind::Gather || op_.kind == OpKind::Scatter)
      check_overlap();
    return std::move(op_);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    fail(Kind::Usage, to_string(op_.kind), " on ", backend_.name(), ": ", parts...);
  }

  void check_tensor(const at::Tensor& tensor) const {
    if (!tensor.defined()) wrong("a tensor is undefined");
    if (tensor.layout() != at::kStrided)
      wrong("sparse tensors are not supported; call to_dense() first");
    const Capabilities can = backend_.capabilities();
    if (!(tensor.is_cpu() ? can.cpu : tensor.is_cuda() && can.cuda))
      wrong("the ", can.backend, " backend of this build cannot move tensors on ", tensor.device());
  }

  void check_count(const Tensors& tensors) const {
    if (int(tensors.size()) != backend_.size())
      wrong("needs one tensor for each of the ", backend_.size(), " ranks, got ", tensors.size());
  }

  // An expanded tensor has no memory of its own for each element.
  void check_writable(const at::Tensor& tensor) const {
    check_tensor(tensor);
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      wrong(
          "cannot write to a tensor whose elements share memory (expanded?); give it a "
          "contiguous() one");
  }

  // Its memory is its value: one run of elements, without a lazy conjugation or negation.
  static bool flat(const at::Tensor& tensor) {
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  }

  at::Tensor readable(const at::Tensor& tensor) {
    check_tensor(tensor);
    if (flat(tensor)) return tensor;
    at::Tensor buffer = at::empty(tensor.sizes(), tensor.options());
    op_.before.push_back({tensor, buffer});
    return buffer;
  }

  at::Tensor writable(const at::Tensor& tensor) {
    check_writable(tensor);
    if (flat(tensor)) return tensor;
    at::Tensor buffer = at::empty(tensor.sizes(), tensor.options());
    op_.after.push_back({buffer, tensor});
    return buffer;
  }

  Tensors cut(const at::Tensor& whole) const {
    const int size = backend_.size();
    if (whole.numel() % size != 0)
      wrong("the large tensor has ", whole.numel(), " elements, which do not divide by ", size,
            " ranks; pad it, or give a list of pieces");
    const int64_t each = whole.numel() / size;
    Tensors pieces;
    for (int r = 0; r < size; ++r) pieces.push_back(run_of(whole, r * each, each));
    return pieces;
  }

  void check_overlap() const {
    auto begin = [](const at::Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); };
    for (const auto& in : op_.inputs)
      for (const auto& out : op_.outputs)
        if (in.nbytes() > 0 && out.nbytes() > 0 && begin(in) < begin(out) + out.nbytes() &&
            begin(out) < begin(in) + in.nbytes())
          wrong("inputs and outputs must not overlap");
  }

  const Backend& backend_;
  Operation op_{};
};

Operation send_of(const Backend& backend, const at::Tensor& tensor, int to) {
  return Builder(backend, OpKind::Send).root(to).input(tensor).build();
}

Operation recv_of(const Backend& backend, const at::Tensor& tensor, int from) {
  return Builder(backend, OpKind::Recv).root(from).output(tensor).build();
}

}  // namespace

Communicator Communicator::split(int color, int key) const {
  return Communicator(backend_->split(color, key));
}

Work Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  return backend_->issue(
      Builder(*backend_, OpKind::AllReduce).reduce(op, tensor).in_place(tensor).build());
}

Work Communicator::broadcast(const at::Tensor& tensor, int root) const {
  return backend_->issue(Builder(*backend_, OpKind::Broadcast).root(root).in_place(tensor).build());
}

Work Communicator::reduce(const at::Tensor& tensor, int root, ReduceOp op) const {
  Builder builder(*backend_, OpKind::Reduce);
  builder.reduce(op, tensor).root(root);
  return backend_->issue(rank() == root ? builder.in_place(tensor).build()
                                        : builder.input(tensor).build());
}

Work Communicator::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  return backend_->issue(
      Builder(*backend_, OpKind::AllGather).input(input).even_outputs(output).build());
}

Work Communicator::all_gather(const Tensors& outputs, const at::Tensor& input) const {
  return backend_->issue(
      Builder(*backend_, OpKind::AllGather).input(input).outputs(outputs).build());
}

Work Communicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  ReduceOp op) const {
  return backend_->issue(Builder(*backend_, OpKind::ReduceScatter)
                             .reduce(op, output)
                             .even_inputs(input)
                             .output(output)
                             .build());
}

Work Communicator::reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                                  ReduceOp op) const {
  return backend_->issue(Builder(*backend_, OpKind::ReduceScatter)
                             .reduce(op, output)
                             .inputs(inputs)
                             .output(output)
                             .build());
}

Work Communicator::gather(const Tensors& outputs, const at::Tensor& input, int root) const {
  Builder builder(*backend_, OpKind::Gather);
  builder.root(root).input(input);
  if (rank() == root) builder.outputs(outputs);
  return backend_->issue(builder.build());
}

Work Communicator::scatter(const at::Tensor& output, const Tensors& inputs, int root) const {
  Builder builder(*backend_, OpKind::Scatter);
  builder.root(root).output(output);
  if (rank() == root) builder.inputs(inputs);
  return backend_->issue(builder.build());
}

Work Communicator::all_to_all(const Tensors& outputs, const Tensors& inputs) const {
  return backend_->issue(
      Builder(*backend_, OpKind::AllToAll).inputs(inputs).outputs(outputs).build());
}

Work Communicator::send(const at::Tensor& tensor, int to) const {
  return backend_->issue(send_of(*backend_, tensor, to));
}

Work Communicator::recv(const at::Tensor& tensor, int from) const {
  return backend_->issue(recv_of(*backend_, tensor, from));
}

Work Communicator::group(const std::vector<Message>& messages) const {
  std::vector<Operation> operations;
  for (const auto& [direction, tensor, peer] : messages)
    operations.push_back(direction == Message::Direction::Send ? send_of(*backend_, tensor, peer)
                                                               : recv_of(*backend_, tensor, peer));
  return backend_->issue_group(std::move(operations));
}

void Communicator::barrier() const { backend_->issue({.kind = OpKind::Barrier}).wait(); }

}  // namespace yoke::comm
