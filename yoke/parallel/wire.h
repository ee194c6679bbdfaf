// SPDX-License-Identifier: Apache-2.0
// How gradients travel. A wire may send them in fewer bits than they are summed up in.
#pragma once

#include <memory>

#include "yoke/comm/communicator.h"

namespace yoke::parallel {

class Wire {
 public:
  virtual ~Wire() = default;
  // The sum over the ranks of every element of `full`, in place.
  virtual comm::Work all_reduce(const comm::Communicator& comm, const at::Tensor& full) const = 0;
  // This rank's part of it into `shard`, which may be its own part of `full`.
  virtual comm::Work reduce_scatter(const comm::Communicator& comm, const at::Tensor& shard,
                                    const at::Tensor& full) const = 0;
};

std::shared_ptr<const Wire> plain_wire();
// Half the bytes: rounded to bfloat16 before they are sent; local, shm and mpi sum them in float32.
std::shared_ptr<const Wire> bf16_wire();
// Half the bytes and three more bits: rounded to float16 after a scaling, the same on all ranks,
// that brings the largest gradient of the bucket to where the sum just fits. Waits for the ranks.
std::shared_ptr<const Wire> fp16_wire();

}  // namespace yoke::parallel
