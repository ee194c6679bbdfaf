// SPDX-License-Identifier: Apache-2.0
// An ordinary module, trained by two ranks. Change .zero from 0 (replicas) to 1, 2 or 3 and less of
// it is kept on every rank; the losses stay the same.
#include <torch/nn.h>

#include <iostream>

#include "yoke/yoke.h"

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(first(x))).squeeze(1); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(2, 32))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(32, 1))};
};

int main() {
  const at::Tensor x = at::rand({256, 2}) * 4 - 2, y = (x.select(1, 0) * x.select(1, 1)).sin();
  yoke::comm::run_ranks(2, [&](yoke::comm::Communicator& comm) {
    Net net;
    yoke::parallel::DataParallel dp(net, comm, {.zero = 1});
    yoke::parallel::AdamW optimizer(dp, {{.lr = 0.01, .clip = 1.0}});
    const int64_t part = 256 / comm.size(), begin = comm.rank() * part;
    for (int step = 1; step <= 200; ++step) {
      const at::Tensor mine = x.narrow(0, begin, part), want = y.narrow(0, begin, part);
      const at::Tensor loss = (net.forward(mine) - want).square().sum();
      dp.backward(loss, double(part));
      const auto info = optimizer.step();
      if (comm.rank() == 0 && step % 50 == 0)
        std::cout << "step " << step << "   loss of rank 0 " << loss.item<float>() / double(part)
                  << "   gradient norm " << info.grad_norm() << "\n";
    }
  });
}
