// SPDX-License-Identifier: Apache-2.0
// The world that a launcher has started: all add up their ranks, and rank 0 tells who they are.
//   torchrun --no-python --nproc-per-node 4 02_world      srun -n 4 02_world
//   mpirun -n 4 02_world  (MPICH's wants YOKE_PORT)        02_world          (alone)
// Arguments: rank threads in each process (1), steps of 10 ms to go on for (1).
#include <ATen/ATen.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <thread>

#include "yoke/yoke.h"

int main(int argc, char** argv) try {
  const auto launch = yoke::topo::discover(yoke::topo::environment_of(environ));
  const int steps = argc > 2 ? std::atoi(argv[2]) : 1;
  const yoke::comm::StopSignal stop;
  yoke::comm::JoinOptions options;
  options.ranks = argc > 1 ? std::atoi(argv[1]) : 1;
  options.meet_timeout = std::chrono::seconds(30);
  options.stop = &stop;
  auto run = [&](yoke::comm::Communicator& comm) {
    const at::Tensor sum = at::full({1}, comm.rank(), at::kLong);
    comm.all_reduce(sum).wait();
    const at::Tensor processes = at::zeros({comm.size()}, at::kLong);
    comm.all_gather(processes, at::full({1}, ::getpid(), at::kLong)).wait();
    if (comm.rank() == 0) {
      std::cout << yoke::topo::to_text(launch) << "\n"
                << comm.size() << " ranks over " << comm.capabilities().backend << ", sum "
                << sum.item<int64_t>() << ", processes";
      for (int r = 0; r < comm.size(); ++r) std::cout << " " << processes[r].item<int64_t>();
      std::cout << std::endl;
    }
    for (int step = 0, signal = 0; step < steps && signal == 0; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      signal = stop.agreed(comm);
      if (signal != 0 && comm.rank() == 0)
        std::cout << "asked to stop by signal " << signal << "\n";
    }
  };
  yoke::comm::run_world(launch, run, options);
} catch (const yoke::Error& error) {
  std::cerr << error.what() << "\n";
  return yoke::exit_code(error.kind());
}
