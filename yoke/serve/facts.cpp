// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/facts.h"

#include <nlohmann/json.hpp>

namespace yoke::serve {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ReplicaSpec, number, path, device, threads, inputs, outputs,
                                   batch, precision, stateful, tokenizer, record, timed)

namespace {

using nlohmann::json;

std::vector<std::string> texts(const std::vector<plan::Port>& ports) {
  std::vector<std::string> result;
  for (const auto& port : ports) result.push_back(port.text());
  return result;
}

std::vector<plan::Port> ports(const json& texts) {
  std::vector<plan::Port> result;
  for (const auto& text : texts) result.push_back(plan::parse_port(text.get<std::string>()));
  return result;
}

}  // namespace

std::string to_json(const ReplicaSpec& spec) { return json(spec).dump(); }
ReplicaSpec parse_spec(const std::string& text) { return json::parse(text).get<ReplicaSpec>(); }

std::string to_json(const Facts& facts) {
  return json{{"platform", facts.platform},
              {"inputs", texts(facts.inputs)},
              {"outputs", texts(facts.outputs)},
              {"declared", facts.declared},
              {"batch", facts.batch},
              {"pure", facts.pure},
              {"stateful", facts.stateful},
              {"has_words", facts.has_words},
              {"buckets", facts.buckets},
              {"pads", facts.pads},
              {"bytes", facts.bytes},
              {"precision", facts.precision},
              {"difference", facts.difference},
              {"load_s", facts.load_s},
              {"longest_s", facts.longest_s},
              {"notes", facts.notes}}
      .dump();
}

Facts parse_facts(const std::string& text) {
  const json from = json::parse(text);
  return {.platform = from.at("platform"),
          .inputs = ports(from.at("inputs")),
          .outputs = ports(from.at("outputs")),
          .declared = from.at("declared"),
          .batch = from.at("batch"),
          .pure = from.at("pure"),
          .stateful = from.at("stateful"),
          .has_words = from.at("has_words"),
          .buckets = from.at("buckets"),
          .pads = from.at("pads"),
          .bytes = from.at("bytes"),
          .precision = from.at("precision"),
          .difference = from.at("difference"),
          .load_s = from.at("load_s"),
          .longest_s = from.at("longest_s"),
          .notes = from.at("notes")};
}

}  // namespace yoke::serve
