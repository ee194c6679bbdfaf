// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/environment.h"

#include <sys/resource.h>
#include <unistd.h>

namespace yoke::cli {

topo::Environment read_environment() { return topo::environment_of(environ); }

void raise_file_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

topo::Host read_visible_host(const topo::Environment& environment) {
  topo::HostOptions options;
  const auto visible = environment.find("CUDA_VISIBLE_DEVICES");
  if (visible != environment.end()) options.cuda_visible_devices = visible->second;
  return topo::read_host(options);
}

double peak_flops(const topo::Host& host, const topo::Device& device, bool in_16_bits) {
  const auto index = size_t(device.index);
  if (device.kind != topo::DeviceKind::Cuda || index >= host.gpus.size()) return 0;
  return topo::peak_flops(host.gpus[index].name, in_16_bits);
}

}  // namespace yoke::cli
