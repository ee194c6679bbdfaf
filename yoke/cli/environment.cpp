// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/environment.h"

#include <unistd.h>

namespace yoke::cli {

topo::Environment read_environment() {
  topo::Environment environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals != text.npos) environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

topo::Host read_visible_host(const topo::Environment& environment) {
  topo::HostOptions options;
  const auto visible = environment.find("CUDA_VISIBLE_DEVICES");
  if (visible != environment.end()) options.cuda_visible_devices = visible->second;
  return topo::read_host(options);
}

}  // namespace yoke::cli
