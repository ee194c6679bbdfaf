// SPDX-License-Identifier: Apache-2.0
// Four ranks, each a thread, add up their numbers; then, of two, one leaves
// without a word, and the other is told so at once.
#include <ATen/ATen.h>

#include <iostream>

#include "yoke/yoke.h"

int main() {
  yoke::comm::run_ranks(4, [](yoke::comm::Communicator& comm) {
    const at::Tensor numbers = at::full({3}, comm.rank() + 1, at::kFloat);
    comm.all_reduce(numbers).wait();
    if (comm.rank() == 0) std::cout << "1 + 2 + 3 + 4 = " << numbers[0].item<float>() << "\n";
  });

  try {
    yoke::comm::run_ranks(2, [](yoke::comm::Communicator& comm) {
      if (comm.rank() == 0) comm.barrier();
    });
  } catch (const yoke::Error& error) {
    std::cout << "as it should be: " << error.what() << "\n";
  }
}
