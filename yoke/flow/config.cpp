// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/config.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "yoke/config/keys.h"
#include "yoke/flow/words.h"

namespace yoke::flow {
namespace {

using config::Field;
using config::Fields;
using config::List;
using config::Numbers;
using config::Words;

struct NodeSection {
  std::string name, model, weights, role = "infer", optimizer = "sgd", loss, weights_of, init;
  int64_t device = -1, phase = 0;
  List replicas;
  Words input, output;
  double lr = 0.1, momentum = 0, weight_decay = 0, ms = 0;
  bool in_place = false;
};

struct EdgeSection {
  std::string from, to, transport = "auto", policy = "block", gradients = "auto";
  int64_t capacity = 0, staleness = 0, every = 1;
  double initial = 0;
  List initial_shape;
};

struct InputSection {
  std::string port;
  Words to;
  int64_t device = -1;
};

struct OutputSection {
  std::string port, from;
  int64_t device = -1;
};

struct EnsembleSection {
  std::string name, input, merge = "mean";
  Words nodes;
  Numbers weights;
  int64_t device = -1;
  EdgeSection edge;
};

struct ChainSection {
  Words nodes;
  EdgeSection edge;
};

struct ExchangeSection {
  std::string name, what = "outputs", topology = "all_to_all", reduce = "mean";
  Words from, into, nodes;
  EdgeSection edge;
};

struct BroadcastSection {
  std::string source;
  Words nodes;
  int64_t every = 1;
};

struct LoopSection {
  std::string name, until;
  Words nodes, carry;
  int64_t most = 100;
};

struct BranchSection {
  std::string name, when, then_gives, else_gives;
  Words then_nodes, else_nodes;
  int64_t device = -1;
};

struct SplitSection {
  std::string name;
  Words nodes, devices;
};

struct SubgraphSection {
  std::string name, path;
  List devices;
};

struct GroupSection {
  Words nodes;
};

Fields edge_fields(const char* section, EdgeSection& edge) {
  return {
      {section, "capacity", &edge.capacity, "values that wait at most; 0: as many as suit", 0},
      {section, "transport", &edge.transport, "how a value gets there",
       "auto alias copy send host"},
      {section, "gradients", &edge.gradients, "whether they go back over it", "auto true false"},
      {section, "policy", &edge.policy, "when it is full: wait, keep the latest, drop the new",
       "block latest drop"},
      {section, "staleness", &edge.staleness, "rounds of delay, exactly", 0},
      {section, "initial", &edge.initial, "what the values before the first round are made of"},
      {section, "initial_shape", &edge.initial_shape, "and their shape", 1},
      {section, "every", &edge.every, "rounds; in between the last value serves again", 1}};
}

struct Sections {
  FlowConfig flow;
  std::vector<NodeSection> nodes;
  std::vector<EdgeSection> edges;
  std::vector<InputSection> inputs;
  std::vector<OutputSection> outputs;
  std::vector<EnsembleSection> ensembles;
  std::vector<ChainSection> chains;
  std::vector<ExchangeSection> exchanges;
  std::vector<BroadcastSection> broadcasts;
  std::vector<LoopSection> loops;
  std::vector<BranchSection> branches;
  std::vector<SplitSection> splits;
  std::vector<SubgraphSection> subgraphs;
  std::vector<GroupSection> together, apart;
};

Fields flow_fields(FlowConfig& flow) {
  return {
      {"flow", "name", &flow.name, "in messages"},
      {"flow", "devices", &flow.devices,
       "cpu:2, cuda:0-3, cuda:0x2, auto; nodes name them by their places from 0"},
      {"flow", "rounds", &flow.rounds, "how many `run` makes", 1},
      {"flow", "seed", &flow.seed, "of all that is drawn", 0},
      {"flow", "log_every", &flow.log_every, "rounds between lines; 0: ten lines in all", 0},
      {"flow", "timeout_s", &flow.timeout_s, "the longest wait for a queue where nothing moves",
       0.001},
      {"flow", "memory_gb", &flow.memory_gb, "of each device; 0: what it has", 0},
      {"flow", "threads", &flow.threads, "of LibTorch for each device; 0: the cores divided", 0}};
}

Fields node_fields(NodeSection& node) {
  return {{"node", "name", &node.name, "of its own"},
          {"node", "model", &node.model,
           "a file or folder of a model, or a word (see `yoke flow words`)"},
          {"node", "weights", &node.weights, "begins with these, that --save has written"},
          {"node", "device", &node.device, "its place in flow.devices; -1: chosen", -1},
          {"node", "replicas", &node.replicas,
           "several devices: the rows are cut over a copy on each", 0},
          {"node", "role", &node.role,
           "infer (gradients stop), train (it has an optimizer), frozen (they pass)",
           "infer train frozen"},
          {"node", "input", &node.input, "ports in the model's order: x:FP32[b,4], x, 2*x"},
          {"node", "output", &node.output, "likewise"},
          {"node", "loss", &node.loss, "the output that is to become small"},
          {"node", "weights_of", &node.weights_of, "computes with that node's weights"},
          {"node", "init", &node.init, "drawn as a node of that name would be"},
          {"node", "optimizer", &node.optimizer, "of a node that is trained", "sgd adamw"},
          {"node", "lr", &node.lr, "its learning rate", 0},
          {"node", "momentum", &node.momentum, "of sgd", 0},
          {"node", "weight_decay", &node.weight_decay, "", 0},
          {"node", "phase", &node.phase, "later ones start when all before is done", 0},
          {"node", "in_place", &node.in_place, "it writes into its first input"},
          {"node", "ms", &node.ms, "of a firing, for the simulation", 0}};
}

template <typename Section>
config::Repeated repeated(const char* name, std::vector<Section>& sections,
                          std::function<Fields(Section&)> fields) {
  return {name, [&sections](size_t count) { sections.resize(count); },
          [&sections, fields](size_t index) { return fields(sections[index]); }};
}

std::vector<config::Repeated> all_sections(Sections& all) {
  const auto with_edge = [](Fields fields, const char* section, EdgeSection& edge) {
    for (auto& field : edge_fields(section, edge)) fields.push_back(field);
    return fields;
  };
  return {
      repeated<NodeSection>("node", all.nodes, node_fields),
      repeated<EdgeSection>("edge", all.edges,
                            [=](EdgeSection& edge) {
                              return with_edge(
                                  {{"edge", "from", &edge.from, "an output: a.y, or a"},
                                   {"edge", "to", &edge.to, "an input: b.x, or b"}},
                                  "edge", edge);
                            }),
      repeated<InputSection>(
          "input", all.inputs,
          [](InputSection& input) {
            return Fields{{"input", "port", &input.port, "what the flow is given: x:FP32[b,4]"},
                          {"input", "to", &input.to, "inputs of nodes that get it"},
                          {"input", "device", &input.device, "where it arrives", -1}};
          }),
      repeated<OutputSection>("output", all.outputs,
                              [](OutputSection& output) {
                                return Fields{
                                    {"output", "port", &output.port,
                                     "what the flow gives: y:FP32[b,3], or y"},
                                    {"output", "from", &output.from, "the output of a node"},
                                    {"output", "device", &output.device, "where it leaves", -1}};
                              }),
      repeated<EnsembleSection>(
          "ensemble", all.ensembles,
          [=](EnsembleSection& e) {
            return with_edge(
                {{"ensemble", "name", &e.name, "of what it gives: NAME.y"},
                 {"ensemble", "input", &e.input,
                  "the output that all its nodes get; none: they have their own"},
                 {"ensemble", "nodes", &e.nodes, "whose first outputs are merged"},
                 {"ensemble", "merge", &e.merge,
                  "mean, vote, weighted, stack, concat, or a node with an input for each"},
                 {"ensemble", "weights", &e.weights, "of weighted: [0.5, 0.5]"},
                 {"ensemble", "device", &e.device, "where they are merged", -1}},
                "ensemble", e.edge);
          }),
      repeated<ChainSection>("chain", all.chains,
                             [=](ChainSection& chain) {
                               return with_edge(
                                   {{"chain", "nodes", &chain.nodes, "each gives to the next"}},
                                   "chain", chain.edge);
                             }),
      repeated<ExchangeSection>(
          "exchange", all.exchanges,
          [=](ExchangeSection& e) {
            return with_edge(
                {{"exchange", "name", &e.name, "of its own"},
                 {"exchange", "what", &e.what, "is traded", "outputs features weights gradients"},
                 {"exchange", "from", &e.from, "of outputs and features: the outputs"},
                 {"exchange", "into", &e.into,
                  "and the inputs that get what the others gave, stacked"},
                 {"exchange", "nodes", &e.nodes, "of weights and gradients: whose"},
                 {"exchange", "topology", &e.topology, "who gets what", "all_to_all ring"},
                 {"exchange", "reduce", &e.reduce, "of weights and gradients", "mean sum"}},
                "exchange", e.edge);
          }),
      repeated<BroadcastSection>("broadcast_weights", all.broadcasts,
                                 [](BroadcastSection& b) {
                                   return Fields{
                                       {"broadcast_weights", "source", &b.source, "whose weights"},
                                       {"broadcast_weights", "nodes", &b.nodes,
                                        "get them at the end of a round"},
                                       {"broadcast_weights", "every", &b.every, "rounds", 1}};
                                 }),
      repeated<LoopSection>(
          "loop", all.loops,
          [](LoopSection& loop) {
            return Fields{
                {"loop", "name", &loop.name, "in messages and figures"},
                {"loop", "nodes", &loop.nodes, "that run again and again"},
                {"loop", "carry", &loop.carry, "from one turn to the next: [\"b.y -> a.x\"]"},
                {"loop", "until", &loop.until, "this output of one of them is not 0"},
                {"loop", "most", &loop.most, "turns at most", 1}};
          }),
      repeated<BranchSection>(
          "branch", all.branches,
          [](BranchSection& b) {
            return Fields{
                {"branch", "name", &b.name, "of what it gives: NAME.y"},
                {"branch", "when", &b.when, "this output is not 0, `then` runs, else `else`"},
                {"branch", "then", &b.then_nodes, "nodes"},
                {"branch", "else", &b.else_nodes, "nodes"},
                {"branch", "then_gives", &b.then_gives, "the output that leaves"},
                {"branch", "else_gives", &b.else_gives, "the output that leaves"},
                {"branch", "device", &b.device, "where it leaves", -1}};
          }),
      repeated<SplitSection>(
          "data_parallel", all.splits,
          [](SplitSection& s) {
            return Fields{
                {"data_parallel", "name", &s.name, "of what it takes and gives: NAME.x, NAME.y"},
                {"data_parallel", "nodes", &s.nodes,
                 "of each copy; one without an edge to its first input follows the one before it"},
                {"data_parallel", "devices", &s.devices,
                 "of each copy's nodes: [\"0,1\", \"2,3\"]"}};
          }),
      repeated<SubgraphSection>(
          "subgraph", all.subgraphs,
          [](SubgraphSection& s) {
            return Fields{{"subgraph", "name", &s.name,
                           "its inputs and outputs are NAME.port, its nodes NAME/node"},
                          {"subgraph", "path", &s.path, "of its TOML file"},
                          {"subgraph", "devices", &s.devices, "of this flow, for its own", 0}};
          }),
      repeated<GroupSection>("colocate", all.together,
                             [](GroupSection& g) {
                               return Fields{{"colocate", "nodes", &g.nodes, "on one device"}};
                             }),
      repeated<GroupSection>("separate", all.apart,
                             [](GroupSection& g) {
                               return Fields{{"separate", "nodes", &g.nodes, "each on its own"}};
                             }),
  };
}

EdgeOptions options_of(const EdgeSection& edge) {
  const std::map<std::string, Transport> transports{{"auto", Transport::Auto},
                                                    {"alias", Transport::Alias},
                                                    {"copy", Transport::Copy},
                                                    {"send", Transport::Send},
                                                    {"host", Transport::Host}};
  const std::map<std::string, Policy> policies{
      {"block", Policy::Block}, {"latest", Policy::Latest}, {"drop", Policy::Drop}};
  EdgeOptions options{.capacity = edge.capacity,
                      .transport = transports.at(edge.transport),
                      .policy = policies.at(edge.policy),
                      .staleness = edge.staleness,
                      .initial = edge.initial,
                      .initial_shape = edge.initial_shape,
                      .every = edge.every};
  if (edge.gradients != "auto") options.gradients = edge.gradients == "true";
  return options;
}

std::vector<int> as_ints(const List& list) { return {list.begin(), list.end()}; }

// `within`: what the names of its nodes begin with where the flow is one within another.
void add_node(Graph& graph, const NodeSection& node, const std::filesystem::path& folder,
              const std::string& within) {
  const std::map<std::string, Role> roles{
      {"infer", Role::Infer}, {"train", Role::Train}, {"frozen", Role::Frozen}};
  NodeOptions options{
      .device = int(node.device),
      .replicas = as_ints(node.replicas),
      .role = roles.at(node.role),
      .inputs = node.input,
      .outputs = node.output,
      .optimizer = {.kind = node.optimizer == "adamw" ? OptimizerOptions::Kind::AdamW
                                                      : OptimizerOptions::Kind::Sgd,
                    .lr = node.lr,
                    .momentum = node.momentum,
                    .weight_decay = node.weight_decay},
      .loss = node.loss,
      .weights_of = node.weights_of,
      .phase = int(node.phase),
      .in_place = node.in_place,
      .ms = node.ms};
  if (node.name.empty()) fail(Kind::Config, "a node wants a name");
  if (!node.weights_of.empty() && node.model.empty()) {
    if (std::ranges::count(graph.nodes(), node.weights_of, &Node::name) == 0)
      fail(Kind::Config, "node '", node.name, "': weights_of '", node.weights_of,
           "' is no node that comes before it in the file; put that one first");
    const auto& owner = graph.nodes()[size_t(graph.find(node.weights_of))];
    if (options.inputs.empty()) options.inputs = owner.options.inputs;
    if (options.outputs.empty()) options.outputs = owner.options.outputs;
    graph.node(node.name, owner.open, options);
    return;
  }
  if (node.model.empty())
    fail(Kind::Config, "node '", node.name,
         "' wants a model: a file, or a word of `yoke flow words`");
  const std::string key = node.init.empty() ? within + node.name : node.init;
  const auto begun = [&](Open open) {
    return node.weights.empty() ? open : with_weights(open, (folder / node.weights).string());
  };
  if (const auto word = find_word(node.model, graph.options().seed, key)) {
    if (options.inputs.empty()) options.inputs = word->inputs;
    if (options.outputs.empty()) options.outputs = word->outputs;
    const auto want = [&](const char* side, const Words& got, const Words& has) {
      if (got.size() != has.size())
        fail(Kind::Config, "node '", node.name, "': '", node.model, "' has ", has.size(), " ", side,
             "s (", join(has, ", "), "), got ", got.size(), " names for them");
    };
    want("input", options.inputs, word->inputs);
    want("output", options.outputs, word->outputs);
    if (options.loss.empty() && std::ranges::count(options.outputs, word->loss) > 0)
      options.loss = word->loss;
    graph.node(node.name, begun(word->open), options);
    return;
  }
  const auto path = folder / node.model;
  const auto close = nearest(node.model.substr(0, node.model.find(':')), word_names());
  if (!std::filesystem::exists(path))
    fail(Kind::Config, "node '", node.name, "': there is no file ", path.string(), ", and '",
         node.model, "' is no word of `yoke flow words`",
         close.empty() ? "" : cat("; did you mean ", join(close, " or "), "?"));
  const auto ports = [&](const Words& texts) {
    std::vector<plan::Port> result;
    for (const auto& text : texts)
      if (text.find(':') != text.npos) result.push_back(plan::parse_port(text));
    return result.size() == texts.size() ? result : std::vector<plan::Port>();
  };
  graph.node(node.name, begun(file(path.string(), ports(node.input), ports(node.output))), options);
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file) fail(Kind::Config, "cannot read ", path.string());
  text << file.rdbuf();
  return text.str();
}

std::pair<std::string, std::string> parse_carry(const std::string& text) {
  const size_t arrow = text.find(" -> ");
  if (arrow == text.npos)
    fail(Kind::Config, "loop.carry: '", text, "' wants the form \"b.y -> a.x\"");
  return {text.substr(0, arrow), text.substr(arrow + 4)};
}

std::vector<std::vector<int>> lists(const Words& words) {
  std::vector<std::vector<int>> result;
  for (const auto& word : words) {
    result.emplace_back();
    for (const auto& part : split(word, ',')) {
      const auto number = parse_int(part);
      if (!number || *number < 0 || *number > INT32_MAX)
        fail(Kind::Config, "data_parallel.devices: got '", part, "' in \"", word,
             "\", wanted places in flow.devices from 0, as \"0,1\"");
      result.back().push_back(int(*number));
    }
  }
  return result;
}

// Ensembles and branches, each after those that it names.
void make_in_order(Graph& graph, const Sections& all) {
  struct Pattern {
    std::string name;
    Words needs;
    std::function<void()> make;
  };
  std::vector<Pattern> patterns;
  for (const auto& e : all.ensembles) {
    patterns.push_back({e.name, e.nodes, [&] {
                          graph.ensemble(e.name, e.input,
                                         {.nodes = e.nodes,
                                          .merge = e.merge,
                                          .weights = e.weights,
                                          .device = int(e.device),
                                          .edge = options_of(e.edge)});
                        }});
    patterns.back().needs.push_back(e.input);
  }
  for (const auto& b : all.branches) {
    patterns.push_back({b.name, {b.when, b.then_gives, b.else_gives}, [&] {
                          graph.branch(b.name, {.when = b.when,
                                                .then = b.then_nodes,
                                                .otherwise = b.else_nodes,
                                                .then_gives = b.then_gives,
                                                .otherwise_gives = b.else_gives,
                                                .device = int(b.device)});
                        }});
    for (const auto* nodes : {&b.then_nodes, &b.else_nodes})
      patterns.back().needs.insert(patterns.back().needs.end(), nodes->begin(), nodes->end());
  }
  while (!patterns.empty()) {
    const auto waits = [&](const Pattern& pattern) {
      return std::ranges::any_of(pattern.needs, [&](const std::string& need) {
        const auto other =
            std::ranges::find(patterns, need.substr(0, need.rfind('.')), &Pattern::name);
        return other != patterns.end() && &*other != &pattern;
      });
    };
    const auto found = std::ranges::find_if_not(patterns, waits);
    const auto next = found == patterns.end() ? patterns.begin() : found;  // in a circle: it tells
    next->make();
    patterns.erase(next);
  }
}

// Whose output leaves the copies: the last node, or the outermost branch of theirs that it is in.
std::string last_of(const Words& nodes, const Sections& all) {
  std::string last = nodes.back();
  size_t most = 0;
  for (const auto& b : all.branches) {
    Words arms = b.then_nodes;
    arms.insert(arms.end(), b.else_nodes.begin(), b.else_nodes.end());
    const auto is_listed = [&](const auto& node) { return std::ranges::count(nodes, node) > 0; };
    if (arms.size() <= most || std::ranges::count(arms, nodes.back()) == 0 ||
        !std::ranges::all_of(arms, is_listed))
      continue;
    most = arms.size();
    last = b.name;
  }
  return last;
}

Config read_config(const std::filesystem::path& given, const std::vector<std::string>& overrides,
                   const topo::Host* host, const std::string& within, std::set<std::string> outer) {
  const auto path = std::filesystem::is_directory(given) ? given / "flow.toml" : given;
  if (!outer.insert(std::filesystem::weakly_canonical(path).string()).second)
    fail(Kind::Config, path.string(), " is a sub-graph of itself");
  Sections all;
  auto fields = flow_fields(all.flow);
  const auto sections = all_sections(all);
  config::read_toml(fields, read(path), path.string(), sections);
  for (const auto& text : overrides) config::read_override(fields, text);
  config::check(fields);
  const auto folder = path.parent_path();

  std::vector<topo::Device> devices;
  try {
    devices =
        topo::parse_devices(all.flow.devices == "auto" && !host ? "cpu" : all.flow.devices, host);
  } catch (const Error& error) {
    fail(Kind::Config, "flow.devices: ", error.what());
  }
  Config config{.flow = all.flow,
                .graph = Graph({.name = all.flow.name,
                                .devices = devices,
                                .seed = uint64_t(all.flow.seed),
                                .memory_gb = all.flow.memory_gb,
                                .host = host ? std::make_shared<topo::Host>(*host) : nullptr})};
  auto& graph = config.graph;
  for (const auto& input : all.inputs) graph.input(input.port, {}, int(input.device));
  for (const auto& node : all.nodes) add_node(graph, node, folder, within);
  for (const auto& sub : all.subgraphs)
    graph.subgraph(
        sub.name,
        read_config(folder / sub.path,
                    {cat("flow.devices=", all.flow.devices), cat("flow.seed=", all.flow.seed)},
                    host, cat(within, sub.name, "/"), outer)
            .graph,
        as_ints(sub.devices));
  // Named by edges that come before the copies do.
  for (const auto& s : all.splits)
    if (!s.nodes.empty()) graph.name_ports(s.name, s.nodes.front(), last_of(s.nodes, all));
  make_in_order(graph, all);
  for (const auto& chain : all.chains) graph.chain(chain.nodes, options_of(chain.edge));
  for (const auto& e : all.exchanges) {
    if (e.what == "outputs" || e.what == "features") {
      graph.exchange(e.name, {.from = e.from,
                              .into = e.into,
                              .ring = e.topology == "ring",
                              .edge = options_of(e.edge)});
    } else {
      graph.exchange(
          {.what = e.what == "weights" ? Exchange::What::Weights : Exchange::What::Gradients,
           .name = e.name,
           .ring = e.topology == "ring",
           .sum = e.reduce == "sum",
           .every = e.edge.every,
           .staleness = e.edge.staleness},
          e.nodes);
    }
  }
  for (const auto& b : all.broadcasts) graph.broadcast_weights(b.source, b.nodes, b.every);
  for (const auto& edge : all.edges) {
    if (edge.from.empty() || edge.to.empty())
      fail(Kind::Config, "edge: wanted from and to, got '", edge.from, "' and '", edge.to, "'");
    graph.edge(edge.from, edge.to, options_of(edge));
  }
  for (const auto& input : all.inputs)
    for (const auto& to : input.to) graph.edge(input.port.substr(0, input.port.find(':')), to);
  for (const auto& loop : all.loops) {
    Graph::Loop options{.nodes = loop.nodes, .until = loop.until, .most = loop.most};
    for (const auto& text : loop.carry) options.carry.push_back(parse_carry(text));
    graph.loop(loop.name, options);
  }
  for (const auto& output : all.outputs) graph.output(output.port, output.from, int(output.device));
  for (const auto& s : all.splits)
    graph.data_parallel(s.name, {.nodes = s.nodes, .devices = lists(s.devices)});
  for (const auto& g : all.together) graph.colocate(g.nodes);
  for (const auto& g : all.apart) graph.separate(g.nodes);
  return config;
}

}  // namespace

Config read_config(const std::filesystem::path& path, const std::vector<std::string>& overrides,
                   const topo::Host* host) {
  try {
    return read_config(path, overrides, host, "", {});
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.starts_with(path.string())) throw;
    fail(error.kind(), path.string(), ": ", text);
  }
}

bool is_flow(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) return std::filesystem::exists(path / "flow.toml");
  return path.filename() == "flow.toml";
}

std::string describe_keys() {
  Sections all;
  std::string text = config::describe(flow_fields(all.flow));
  for (const auto& section : all_sections(all)) {
    section.resize(1);
    text += config::describe(section.fields(0));
  }
  return text;
}

}  // namespace yoke::flow
