// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/flow_file.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/environment.h"
#include "yoke/models/port.h"

namespace yoke::cli {

flow::Config read_flow(const FlowFile& file) {
  const auto host = read_visible_host(read_environment());
  auto overrides = file.overrides;
  if (file.rounds) overrides.push_back(cat("flow.rounds=", *file.rounds));
  return flow::read_config(file.path, overrides, &host);
}

flow::Compiled compile_flow(const FlowFile& file, const flow::Graph& graph) {
  try {
    return flow::compile(graph);
  } catch (const Error& error) {
    fail(error.kind(), file.path, ": ", error.what());
  }
}

flow::Tensors parse_inputs(const std::vector<std::string>& inputs, const flow::Executor& executor) {
  flow::Tensors values;
  std::set<std::string> given;
  for (const auto& input : inputs) {
    const std::string name = input.substr(0, input.find('='));
    if (name == input || std::ranges::count(executor.inputs(), name) == 0)
      fail(Kind::Usage, "--input ", input, ": wanted NAME=NUMBERS with a name of ",
           join(executor.inputs(), ", "));
    if (!given.insert(name).second) fail(Kind::Usage, "--input ", name, " is given twice");
  }
  for (const auto& port : executor.input_ports()) {
    const std::string* text = nullptr;
    for (const auto& input : inputs)
      if (input.starts_with(port.name + "=")) text = &input;
    if (text == nullptr)
      fail(Kind::Usage, "the flow takes ", join(executor.inputs(), ", "),
           "; give each as --input '", port.name, "=1,2;3,4' (rows with semicolons)");
    std::vector<double> numbers;
    const auto rows = split(text->substr(port.name.size() + 1), ';');
    for (const auto& row : rows) {
      if (split(row, ',').size() != split(rows[0], ',').size())
        fail(Kind::Usage, "--input ", *text, ": rows of different lengths");
      for (const auto& word : split(row, ',')) {
        char* end = nullptr;
        numbers.push_back(std::strtod(word.c_str(), &end));
        if (word.empty() || *end != '\0')
          fail(Kind::Usage, "--input ", *text, ": '", word, "' is no number");
      }
    }
    const auto count = int64_t(rows.size());
    auto value = at::tensor(numbers).reshape({count, -1}).to(models::dtype_of(port.type));
    if (port.shape.size() == 1) value = value.reshape({-1});
    if (port.shape.size() > 2) {
      auto sizes = port.sizes();
      sizes[0] = count;
      const auto wanted = plan::num_elements(sizes);
      if (wanted != value.numel())
        fail(Kind::Usage, "--input ", *text, ": got ", value.numel(), " numbers in ", count,
             " rows, wanted ", port.wanted());
      value = value.reshape(sizes);
    }
    if (!port.shape.empty() && !port.holds(models::type_of(value.scalar_type()), value.sizes()))
      fail(Kind::Usage, "--input ", *text, ": wanted ", port.wanted(), ", got ",
           plan::to_text(models::type_of(value.scalar_type()), value.sizes()));
    values.push_back(value);
  }
  return values;
}

}  // namespace yoke::cli
