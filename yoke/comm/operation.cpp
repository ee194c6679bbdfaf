// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/operation.h"

#include "yoke/base/error.h"

namespace yoke::comm {
namespace {

std::string shape_text(const at::Tensor& tensor) {
  std::string text = "[";
  for (const auto size : tensor.sizes())
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::string type_text(const at::Tensor& tensor) {
  const std::string name(
      c10::getDtypeNames(tensor.scalar_type()).first);  // as Python says it: float32
  return tensor.is_cpu() ? name : cat(tensor.device().type(), " ", name);
}

// The sizes of the pieces that `op` holds for (input) or from (output) each rank.
int64_t numel_at(const std::vector<at::Tensor>& pieces, int rank) {
  return pieces.size() == 1 ? pieces[0].numel() : pieces[rank].numel();
}

}  // namespace

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return "sum";
    case ReduceOp::Mean:
      return "mean";
    case ReduceOp::Min:
      return "min";
    case ReduceOp::Max:
      return "max";
    case ReduceOp::Product:
      return "product";
  }
  return "unknown";
}

const char* to_string(OpKind kind) {
  switch (kind) {
    case OpKind::AllReduce:
      return "all_reduce";
    case OpKind::AllGather:
      return "all_gather";
    case OpKind::ReduceScatter:
      return "reduce_scatter";
    case OpKind::Broadcast:
      return "broadcast";
    case OpKind::Reduce:
      return "reduce";
    case OpKind::Gather:
      return "gather";
    case OpKind::Scatter:
      return "scatter";
    case OpKind::AllToAll:
      return "all_to_all";
    case OpKind::Barrier:
      return "barrier";
    case OpKind::Split:
      return "split";
    case OpKind::Send:
      return "send";
    case OpKind::Recv:
      return "recv";
  }
  return "unknown";
}

bool Operation::rooted() const {
  return kind == OpKind::Broadcast || kind == OpKind::Reduce || kind == OpKind::Gather ||
         kind == OpKind::Scatter;
}

const at::Tensor& Operation::subject() const {
  static const at::Tensor kNone;
  const bool by_output = kind == OpKind::Scatter || kind == OpKind::ReduceScatter;
  const auto& pieces = by_output || inputs.empty() ? outputs : inputs;
  return pieces.empty() ? kNone : pieces[0];
}

uint64_t Operation::bytes() const {
  uint64_t sum = 0;
  for (const auto& tensor : inputs.size() > outputs.size() ? inputs : outputs)
    sum += tensor.nbytes();
  return sum;
}

std::string Operation::text() const {
  std::string text = to_string(kind);
  text += "(";
  if (reduce) text += cat(to_string(*reduce), ", ");
  const auto& pieces = inputs.size() > outputs.size() ? inputs : outputs;
  if (subject().defined()) text += type_text(subject()) + " ";
  for (const auto& piece : pieces)
    text += shape_text(piece) + (&piece == &pieces.back() ? "" : " ");
  if (pieces.size() > 1 || kind == OpKind::AllGather || kind == OpKind::Gather)
    for (const auto& tensor : &pieces == &inputs ? outputs : inputs)
      text += cat(&pieces == &inputs ? " to " : " from ", shape_text(tensor));
  if (rooted()) text += cat(", root ", root);
  if (kind == OpKind::Split) text += cat("color ", color, ", key ", key);
  if (kind == OpKind::Send) text += cat(", to rank ", root);
  if (kind == OpKind::Recv) text += cat(", from rank ", root);
  return text + ")";
}

std::optional<std::string> mismatch(const Operation& a, int rank_a, const Operation& b,
                                    int rank_b) {
  if (a.kind != b.kind) return "the operations differ";
  if (a.reduce != b.reduce) return "the reductions differ";
  if (a.rooted() && a.root != b.root) return "the roots differ";
  const auto &x = a.subject(), &y = b.subject();
  if (!x.defined() || !y.defined()) return std::nullopt;
  if (x.scalar_type() != y.scalar_type()) return "the dtypes differ";
  if (x.device().type() != y.device().type()) return "the devices differ";
  const bool same_shape =
      a.kind == OpKind::AllReduce || a.kind == OpKind::Broadcast || a.kind == OpKind::Reduce;
  if (same_shape && x.sizes() != y.sizes()) return "the shapes differ";
  // Where pieces are told apart, what one rank gives must be what the other expects from it.
  auto agree = [](const Operation& from, int rank_from, const Operation& to, int rank_to) {
    return from.inputs.empty() || to.outputs.empty() ||
           numel_at(from.inputs, rank_to) == numel_at(to.outputs, rank_from);
  };
  if (!same_shape && (!agree(a, rank_a, b, rank_b) || !agree(b, rank_b, a, rank_a)))
    return "the sizes differ";
  // Reductions of pieces: every rank gives the same number of elements for each target.
  if (a.kind == OpKind::ReduceScatter)
    for (size_t i = 0; i < a.inputs.size(); ++i)
      if (a.inputs[i].numel() != b.inputs[i].numel()) return "the sizes differ";
  return std::nullopt;
}

std::optional<std::string> message_mismatch(at::ScalarType sent, int64_t num_sent,
                                            at::ScalarType wanted, int64_t num_wanted) {
  if (sent != wanted) return "the dtypes differ";
  if (num_sent != num_wanted) return "the sizes differ";
  return std::nullopt;
}

std::string disagreement(const std::string& reason, const Called& one, const Called& other,
                         uint64_t sequence, const std::string& group, bool message) {
  return cat(reason, ": rank ", one.rank, " called ", one.text, ", rank ", other.rank, " called ",
             other.text, ", both as ", message ? "message #" : "operation #", sequence,
             message ? " of their pair on " : " on ", group,
             message ? "" : "; every rank must make the same calls in the same order");
}

}  // namespace yoke::comm
