// SPDX-License-Identifier: Apache-2.0
// What a pipeline and its optimizer have, as pieces of named tensors that no plan shows through:
//   model/3.up.weight, optimizer/exp_avg/3.up.weight, optimizer/steps/3.up.weight
// Collective: save_state(), load_state(), by all ranks of the pipeline.
#pragma once

#include "yoke/checkpoint/saved.h"
#include "yoke/checkpoint/saver.h"
#include "yoke/parallel/optimizer.h"
#include "yoke/parallel/pipeline.h"

namespace yoke::train {

// `values` are the caller's.
void save_state(parallel::Pipeline& pipeline, parallel::Optimizer& optimizer, int64_t step,
                checkpoint::Strings values, checkpoint::Saver& saver);
// The model and the optimizer go on where they were saved, under whatever plan.
void load_state(parallel::Pipeline& pipeline, parallel::Optimizer& optimizer,
                const checkpoint::Saved& saved);

}  // namespace yoke::train
