// SPDX-License-Identifier: Apache-2.0
// From operations to NCCL's calls. What is only moved goes as bytes. What NCCL cannot reduce as the
// contract wants it (int16, products of complex numbers; its min and max drop NaN) is moved to
// where the result is wanted and folded there. Which way an operation takes depends on sizes and
// dtype alone, since all ranks must take the same.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "yoke/comm/nccl/rank.h"

namespace yoke::comm {
namespace {

struct Reduction {
  NcclType type;
  NcclOp op;
  int64_t width = 1;  // NCCL's elements for each of ours

  size_t count(const at::Tensor& tensor) const { return size_t(tensor.numel() * width); }
};

// Nothing: NCCL has no such reduction.
std::optional<Reduction> reduction_of(at::ScalarType type, ReduceOp op) {
  const bool extreme = op == ReduceOp::Min || op == ReduceOp::Max;
  if (extreme && c10::isFloatingType(type)) return std::nullopt;
  if (op == ReduceOp::Product && c10::isComplexType(type)) return std::nullopt;
  const NcclOp same = op == ReduceOp::Sum    ? NcclOp::Sum
                      : op == ReduceOp::Mean ? NcclOp::Mean
                      : op == ReduceOp::Min  ? NcclOp::Min
                      : op == ReduceOp::Max  ? NcclOp::Max
                                             : NcclOp::Product;
  switch (type) {
    case at::kBool:  // as logic: any, all
      return Reduction{NcclType::Uint8,
                       op == ReduceOp::Min || op == ReduceOp::Product ? NcclOp::Min : NcclOp::Max};
    case at::kByte:
      return Reduction{NcclType::Uint8, same};
    case at::kChar:
      return Reduction{NcclType::Int8, same};
    case at::kInt:
      return Reduction{NcclType::Int32, same};
    case at::kLong:
      return Reduction{NcclType::Int64, same};
    case at::kHalf:
      return Reduction{NcclType::Float16, same};
    case at::kBFloat16:
      return Reduction{NcclType::Bfloat16, same};
    case at::kFloat:
      return Reduction{NcclType::Float32, same};
    case at::kDouble:
      return Reduction{NcclType::Float64, same};
    case at::kComplexFloat:
      return Reduction{NcclType::Float32, same, 2};
    case at::kComplexDouble:
      return Reduction{NcclType::Float64, same, 2};
    default:
      return std::nullopt;
  }
}

bool even(const std::vector<at::Tensor>& pieces) {
  return std::ranges::all_of(pieces, [&](const auto& p) { return p.numel() == pieces[0].numel(); });
}

const char* begin(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

// Equal pieces as one run of memory: their own where they lie so, else an uninitialised one.
at::Tensor one_run(const std::vector<at::Tensor>& pieces) {
  bool joined = true;
  for (size_t i = 1; i < pieces.size(); ++i)
    joined = joined && begin(pieces[i]) == begin(pieces[i - 1]) + pieces[i - 1].nbytes();
  if (joined) return pieces[0];  // only its address is used
  return at::empty({int64_t(pieces.size()), pieces[0].numel()}, pieces[0].options());
}

void copy(void* to, const void* from, size_t bytes, NcclApi::Stream stream) {
  if (to == from || bytes == 0) return;
  const auto status = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  if (status != cudaSuccess) fail(Kind::Device, "cudaMemcpyAsync: ", cudaGetErrorString(status));
}

void run_copies(const std::vector<Operation::Copy>& copies) {
  for (const auto& [from, to] : copies) to.copy_(from, /*non_blocking=*/true);
}

}  // namespace

void NcclRank::launch(const std::shared_ptr<NcclPending>& pending) {
  NcclGroup& group = *pending->group;
  in_flight_.push_back(pending);
  if (world().options().check) compare(*pending);
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAStreamGuard guard(
      c10::cuda::getStreamFromExternal(group.stream, device_.index()));
  if (pending->mark) cuda_wait(*pending->mark, device_);
  for (const auto& part : pending->parts) run_copies(part.operation.before);
  const Operation& operation = pending->parts[0].operation;
  if (operation.point_to_point())
    messages(pending);
  else if (operation.kind == OpKind::Split)
    pending->formed = split(group, *pending);
  else
    collective(group, operation);
  if (pending->open == 0) finish_launch(*pending);
}

void NcclRank::finish_launch(NcclPending& pending) {
  for (const auto& part : pending.parts) run_copies(part.operation.after);
  pending.done = cuda_mark(device_);
  pending.stage.store(NcclPending::Stage::Launched, std::memory_order_release);
  for (const auto& [operation, sequence, ticket] : pending.parts) {
    const bool message = operation.point_to_point();
    process_->note_launch({pending.group->id, rank_, message ? operation.kind : OpKind::Barrier,
                           message ? operation.root : -1},
                          sequence);
  }
}

// The calls as one: none of them waits for another's turn.
void NcclRank::call(const NcclGroup& group, const std::string& what,
                    const std::function<void()>& calls) {
  check(api().group_start(), group.comm, what);
  try {
    calls();
  } catch (...) {
    api().group_end();
    throw;
  }
  check(api().group_end(), group.comm, what);
  settle(group, what);
}

void NcclRank::collective(const NcclGroup& group, const Operation& operation) {
  if (operation.kind == OpKind::Barrier) {
    void* token = group.token.mutable_data_ptr();
    call(group, "barrier", [&] {
      check(api().all_reduce(token, token, 1, NcclType::Float32, NcclOp::Sum, group.comm,
                             group.stream),
            group.comm, "barrier");
    });
  } else if (!operation.reduce) {
    exchange(group, operation);
  } else if (reduction_of(operation.subject().scalar_type(), *operation.reduce)) {
    reduce(group, operation);
  } else {
    fold(group, operation);
  }
}

void NcclRank::exchange(const NcclGroup& group, const Operation& op) {
  const std::string what = to_string(op.kind);
  auto checked = [&](NcclResult result) { check(result, group.comm, what); };
  const int me = group.rank;
  if (op.kind == OpKind::Broadcast) {
    const at::Tensor& tensor = op.outputs[0];
    if (tensor.numel() == 0) return;
    return call(group, what, [&] {
      checked(api().broadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.nbytes(),
                              NcclType::Uint8, op.root, group.comm, group.stream));
    });
  }
  if (op.kind == OpKind::AllGather && even(op.outputs)) {
    const size_t bytes = op.inputs[0].nbytes();
    if (bytes == 0) return;
    const at::Tensor run = one_run(op.outputs);
    call(group, what, [&] {
      checked(api().all_gather(op.inputs[0].const_data_ptr(), run.mutable_data_ptr(), bytes,
                               NcclType::Uint8, group.comm, group.stream));
    });
    if (!run.is_same(op.outputs[0]))
      for (size_t r = 0; r < op.outputs.size(); ++r)
        copy(op.outputs[r].mutable_data_ptr(), begin(run) + r * bytes, bytes, group.stream);
    return;
  }
  // What this rank has for rank r, and where what it has for us goes; null: nothing.
  auto given = [&](int r) -> const at::Tensor* {
    if (op.inputs.empty() || (op.kind == OpKind::Gather && r != op.root)) return nullptr;
    return &op.inputs[op.inputs.size() == 1 ? 0 : size_t(r)];
  };
  auto taken = [&](int r) -> const at::Tensor* {
    if (op.outputs.empty() || (op.kind == OpKind::Scatter && r != op.root)) return nullptr;
    return &op.outputs[op.outputs.size() == 1 ? 0 : size_t(r)];
  };
  call(group, what, [&] {
    for (int r = 0; r < group.size(); ++r) {
      if (r == me) continue;
      if (const auto* piece = given(r); piece && piece->numel() > 0)
        checked(api().send(piece->const_data_ptr(), piece->nbytes(), NcclType::Uint8, r, group.comm,
                           group.stream));
      if (const auto* piece = taken(r); piece && piece->numel() > 0)
        checked(api().recv(piece->mutable_data_ptr(), piece->nbytes(), NcclType::Uint8, r,
                           group.comm, group.stream));
    }
  });
  if (given(me) && taken(me))
    copy(taken(me)->mutable_data_ptr(), begin(*given(me)), given(me)->nbytes(), group.stream);
}

void NcclRank::reduce(const NcclGroup& group, const Operation& op) {
  const std::string what = to_string(op.kind);
  const auto how = *reduction_of(op.subject().scalar_type(), *op.reduce);
  auto checked = [&](NcclResult result) { check(result, group.comm, what); };
  const at::Tensor& input = op.inputs[0];
  void* output = op.outputs.empty() ? nullptr : op.outputs[0].mutable_data_ptr();
  if (op.kind != OpKind::ReduceScatter) {
    if (input.numel() == 0) return;
    return call(group, what, [&] {
      checked(op.kind == OpKind::AllReduce
                  ? api().all_reduce(input.const_data_ptr(), output, how.count(input), how.type,
                                     how.op, group.comm, group.stream)
                  : api().reduce(input.const_data_ptr(), output, how.count(input), how.type, how.op,
                                 op.root, group.comm, group.stream));
    });
  }
  if (!even(op.inputs))
    return call(group, what, [&] {
      for (int r = 0; r < group.size(); ++r) {
        const at::Tensor& piece = op.inputs[size_t(r)];
        if (piece.numel() > 0)
          checked(api().reduce(piece.const_data_ptr(), r == group.rank ? output : nullptr,
                               how.count(piece), how.type, how.op, r, group.comm, group.stream));
      }
    });
  if (input.numel() == 0) return;
  const at::Tensor run = one_run(op.inputs);
  if (!run.is_same(input))
    for (size_t r = 0; r < op.inputs.size(); ++r)
      copy(static_cast<char*>(run.mutable_data_ptr()) + r * input.nbytes(), begin(op.inputs[r]),
           input.nbytes(), group.stream);
  call(group, what, [&] {
    checked(api().reduce_scatter(run.const_data_ptr(), output, how.count(input), how.type, how.op,
                                 group.comm, group.stream));
  });
}

void NcclRank::fold(const NcclGroup& group, const Operation& op) {
  const at::Tensor& sample = op.subject();
  Operation moves{.kind = op.kind == OpKind::AllReduce ? OpKind::AllGather
                          : op.kind == OpKind::Reduce  ? OpKind::Gather
                                                       : OpKind::AllToAll,
                  .root = op.root,
                  .inputs = op.inputs};
  if (!op.outputs.empty())
    moves.outputs = at::empty({group.size(), sample.numel()}, sample.options()).unbind(0);
  exchange(group, moves);
  if (op.outputs.empty() || sample.numel() == 0) return;
  for (auto& piece : moves.outputs) piece = piece.view(sample.sizes());
  const at::Tensor folded = cuda_fold(moves.outputs, *op.reduce);
  copy(op.outputs[0].mutable_data_ptr(), begin(folded), folded.nbytes(), group.stream);
}

void NcclRank::messages(const std::shared_ptr<NcclPending>& pending) {
  const NcclGroup& group = *pending->group;
  const std::string what = to_string(pending->parts[0].operation.kind);
  call(group, what, [&] {
    for (const auto& [op, sequence, ticket] : pending->parts) {
      const at::Tensor& tensor = op.subject();
      if (op.root == group.rank || tensor.numel() == 0) continue;
      check(op.kind == OpKind::Send
                ? api().send(tensor.const_data_ptr(), tensor.nbytes(), NcclType::Uint8, op.root,
                             group.comm, group.stream)
                : api().recv(tensor.mutable_data_ptr(), tensor.nbytes(), NcclType::Uint8, op.root,
                             group.comm, group.stream),
            group.comm, what);
    }
  });
  for (const auto& part : pending->parts)
    if (part.operation.root == group.rank) message_to_self(part, pending);
}

// NCCL would want both halves in one call.
void NcclRank::message_to_self(const NcclPending::Part& part,
                               const std::shared_ptr<NcclPending>& pending) {
  NcclGroup& group = *pending->group;
  const bool sends = part.operation.kind == OpKind::Send;
  auto& answers = sends ? group.self_recvs : group.self_sends;
  if (answers.empty()) {
    (sends ? group.self_sends : group.self_recvs).emplace_back(part.operation, pending);
    ++pending->open;
    return;
  }
  const auto [answer, owner] = std::move(answers.front());
  answers.pop_front();
  compare_message(group, part, answer);
  const Operation &send = sends ? part.operation : answer, &recv = sends ? answer : part.operation;
  copy(recv.outputs[0].mutable_data_ptr(), begin(send.inputs[0]), send.inputs[0].nbytes(),
       group.stream);
  if (--owner->open == 0 && owner != pending) finish_launch(*owner);
}

}  // namespace yoke::comm
