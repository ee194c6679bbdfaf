// SPDX-License-Identifier: Apache-2.0
// What the trace of `yoke serve` (serve.trace) tells of replicas that share a GPU: how long it
// waits between two batches, and which copies run while another replica computes.
#pragma once

#include <string>

namespace yoke::cli {

struct BatchTimes {
  int batches = 0;
  double idle_us = 0;  // between two batches of a replica, the median; of the replicas the longest
  double model_us = 0, copy_in_us = 0, copy_out_us = 0;  // medians
  double inputs_us = 0, outputs_us = 0;                  // of a batch before and after the model
  double beside = 0;  // of the time of copies, the part in which another replica's kernels run
};

// Of the last batches of each replica. Throws Kind::Io where it is no such trace.
BatchTimes read_batch_times(const std::string& trace);

}  // namespace yoke::cli
