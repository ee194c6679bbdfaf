// SPDX-License-Identifier: Apache-2.0
// `yoke doctor`: what this machine has for Yoke, what is missing, and how to get it. The findings
// are data, made from what is passed in.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "yoke/topo/host.h"
#include "yoke/topo/launch.h"

namespace CLI {
class App;
}

namespace yoke::cli {

enum class Health { Ok, Warn, Missing };  // Missing: something needed, nothing will run without it

struct Finding {
  std::string name = {};
  Health health = Health::Ok;
  std::string detail = {};
  std::string todo = {};  // empty when there is nothing to do
};

struct Machine {
  topo::Host host = {};
  topo::Environment environment = {};
  topo::OpenLibrary open = topo::open_library;
  std::string torch_version = {};
  bool torch_has_cuda = false;  // in this program, not only on the disk
};

std::vector<Finding> examine(const Machine& machine);

void print_text(std::ostream& out, const std::vector<Finding>& findings);
void print_json(std::ostream& out, const std::vector<Finding>& findings);  // one object a line

// Ends with exit code 1 if something is missing.
void add_doctor(CLI::App& app);

}  // namespace yoke::cli
