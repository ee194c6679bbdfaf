// SPDX-License-Identifier: Apache-2.0
// Comparing the ranks' calls before they are launched, through the store: slow, and it waits for
// the peers even inside backward, but it names both sides of a mistake.
#include "yoke/comm/nccl/rank.h"
#include "yoke/comm/signature.h"

namespace yoke::comm {

void NcclRank::compare(const NcclPending& pending) {
  const NcclGroup& group = *pending.group;
  auto key = [&](const NcclPending::Part& part, int rank) {
    const Operation& op = part.operation;
    if (!op.point_to_point()) return cat("nccl/", group.name, "/", part.sequence, "/", rank);
    // Both sides of a message count the messages of their pair.
    const bool by_sender = (rank == group.rank) == (op.kind == OpKind::Send);
    const int other = rank == group.rank ? op.root : group.rank;
    return cat("nccl/", group.name, "/", by_sender ? rank : other, ">", by_sender ? other : rank,
               "/", part.sequence, by_sender ? "/send" : "/recv");
  };
  for (const auto& part : pending.parts)
    world().store().set(key(part, group.rank), encode(part.operation));
  for (const auto& part : pending.parts) {
    for (int other = 0; other < group.size(); ++other) {
      const bool concerned = !part.operation.point_to_point() || other == part.operation.root;
      if (other == group.rank || !concerned) continue;
      const Operation theirs = decode(fetch(key(part, other)));
      if (part.operation.point_to_point())
        compare_message(group, part, theirs);
      else if (const auto reason = mismatch(theirs, other, part.operation, group.rank))
        call_off(Kind::Comm, disagreement(*reason, {rank_, part.operation.text()},
                                          {group.members[size_t(other)], theirs.text()},
                                          part.sequence, group.name));
    }
  }
}

void NcclRank::compare_message(const NcclGroup& group, const NcclPending::Part& part,
                               const Operation& theirs) {
  const at::Tensor &a = part.operation.subject(), &b = theirs.subject();
  if (const auto reason = message_mismatch(a.scalar_type(), a.numel(), b.scalar_type(), b.numel()))
    call_off(Kind::Comm, disagreement(*reason, {rank_, part.operation.text()},
                                      {group.members[size_t(part.operation.root)], theirs.text()},
                                      part.sequence, group.name, /*message=*/true));
}

}  // namespace yoke::comm
