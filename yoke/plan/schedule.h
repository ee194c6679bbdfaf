// SPDX-License-Identifier: Apache-2.0
// A pipeline schedule as data: what every rank does, in its order. A stage is a run of layers; its
// work on one micro-batch is a forward and a backward, and a backward may be cut into the gradient
// of its input, which the stage before is waiting for, and that of its weights, which is not urgent
// (Qi et al., ICLR 2024). Generators (generate.h) make the computation, passes (passes.h) add what
// is between ranks, check.h proves it right, simulate.h tells what it costs; all without torch.
// Values: every rank makes an equal one.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace yoke::plan {

enum class Act {
  F,           // forward
  I,           // backward, of the input
  W,           // backward, of the weights
  B,           // I and W at once
  SendF,       // this stage's output, to the stage after it
  RecvF,       // this stage's input, from the stage before it
  SendB,       // the gradient of this stage's input, to the stage before it
  RecvB,       // the gradient of this stage's output, from the stage after it
  Unshard,     // the stage's parameters are gathered (ZeRO 3)
  Reshard,     // and dropped
  ReduceGrad,  // the stage's gradients are reduced over the replicas
  Recompute,   // forward again, of what was not kept
  OptStep,     // the optimizer, once for a rank
};

struct Action {
  int stage = -1;  // -1: of the whole rank
  Act act = Act::F;
  int micro = -1;  // -1: of no micro-batch
  auto operator<=>(const Action&) const = default;

  bool computes() const { return act <= Act::B; }
  bool takes_time() const { return computes() || act == Act::Recompute; }
  // Whether it has a stage and a micro-batch exactly if its kind wants them.
  bool well_formed() const;
  bool is_backward() const { return act == Act::I || act == Act::B; }  // gives a gradient away
  bool is_message() const { return act >= Act::SendF && act <= Act::RecvB; }
};

constexpr int kMaxStages = 64 * 32, kMaxMicro = 4096;

std::string to_text(const Action& action);  // "2F0", "3SEND_F1", "0REDUCE_GRAD", "OPT_STEP"
std::optional<Action> parse_action(std::string_view text);

struct Schedule {
  std::string name = {};
  int num_micro = 0;
  std::vector<int> rank_of = {};               // by stage
  std::vector<std::vector<Action>> rows = {};  // by rank
  bool operator==(const Schedule&) const = default;

  int num_ranks() const { return int(rows.size()); }
  int num_stages() const { return int(rank_of.size()); }
  int chunks() const { return rows.empty() ? 0 : num_stages() / num_ranks(); }  // stages of a rank
  size_t num_actions() const;
};

// A comment line with the name, then a line for each rank: "0F0,0SEND_F0,0F1,…". Read back it is
// the same schedule. Reading tells the line and the word that it does not understand (Kind::Usage).
std::string to_csv(const Schedule& schedule);
Schedule parse_csv(std::string_view text);

}  // namespace yoke::plan
