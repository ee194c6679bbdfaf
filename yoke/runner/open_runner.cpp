// SPDX-License-Identifier: Apache-2.0
#include "yoke/runner/open_runner.h"

#include "yoke/base/error.h"
#include "yoke/flow/config.h"
#include "yoke/models/whole.h"
#include "yoke/runner/model_runner.h"
#include "yoke/serve/stand_in.h"

namespace yoke::runner {

std::unique_ptr<serve::Runner> open_runner(const serve::ReplicaSpec& spec,
                                           const ReadHost& read_host) {
  if (serve::is_stand_in(spec.path)) return serve::open_stand_in(spec);
  return std::make_unique<ModelRunner>(spec, read_host);
}

serve::Facts inspect(const std::string& path) {
  if (serve::is_stand_in(path)) return serve::open_stand_in({.path = path})->facts();
  serve::Facts facts;
  if (flow::is_flow(path)) {
    const FlowModel flow(path, {}, topo::read_host());
    facts.platform = flow.platform();
    facts.inputs = flow.inputs();
    facts.outputs = flow.outputs();
    facts.declared = flow.declared();
    facts.bytes = flow.bytes();
    return facts;
  }
  const auto kind = models::kind_of(path);
  models::Architecture architecture = models::ScriptOptions();
  if (kind == models::FileKind::Folder) architecture = models::open_model(path).architecture;
  if (!std::holds_alternative<models::ScriptOptions>(architecture)) {
    const auto model = models::make_model(architecture);
    facts.platform = "yoke";
    facts.inputs = {model.input};
    facts.outputs = {model.output};
    facts.bytes = uint64_t(model.num_parameters) * sizeof(float);
  } else if (kind != models::FileKind::Package) {
    const auto model = models::open_loadable(path);
    facts.platform = model->platform();
    facts.inputs = model->inputs();
    facts.declared = false;
    facts.bytes = model->bytes();
    facts.notes.emplace_back(kDeclareNote);
    if (model->sets_state())
      facts.notes.push_back(
          cat("forward() sets its own attributes, or writes into them", kStatefulNote));
  } else {
    facts.platform = "torch_aoti";
    facts.declared = false;
    facts.bytes = std::filesystem::file_size(path);
    facts.notes.emplace_back("it says neither what it takes nor what it gives: declare its inputs");
    for (const auto& [key, value] : models::package_metadata(path))
      if (!value.empty()) facts.notes.push_back(key + " " + value);
  }
  return facts;
}

}  // namespace yoke::runner
