// SPDX-License-Identifier: Apache-2.0
#include "yoke/flow/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "yoke/flow/flow_test.h"

namespace yoke::flow {
namespace {

namespace fs = std::filesystem;

// A folder that goes away.
struct Folder {
  fs::path path = fs::temp_directory_path() / cat("yoke-flow-config-", ::getpid());
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
  fs::path write(const std::string& name, const std::string& text) const {
    std::ofstream(path / name) << text;
    return path / name;
  }
};

Config read(const Folder& folder, const std::string& text) {
  return read_config(folder.write("my.toml", text));
}

// ---- every key ----

struct Section {
  std::string name;
  std::vector<std::string> lines;
};

// One of every section; the first node is the one whose keys are tried.
std::vector<Section> sections() {
  std::vector<Section> all{{"flow", {"devices = \"cpu:4\""}},
                           {"node", {"name = \"n\"", "model = \"mlp:2,2\""}}};
  for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "m", "o"})
    all.push_back({"node", {cat("name = \"", name, "\""), "model = \"same\""}});
  for (const char* name : {"p", "q", "r"})
    all.push_back(
        {"node", {cat("name = \"", name, "\""), "model = \"mlp:2,2\"", "role = \"train\""}});
  const std::vector<Section> patterns{
      {"edge", {"from = \"a\"", "to = \"b\""}},
      {"input", {"port = \"in:FP32[n,2]\""}},
      {"output", {"port = \"out\"", "from = \"e\""}},
      {"ensemble", {"name = \"ens\"", "nodes = [\"a\", \"b\"]"}},
      {"chain", {"nodes = [\"b\", \"c\"]"}},
      {"exchange",
       {"name = \"talk\"", "from = [\"d\", \"e\"]", "into = [\"f\", \"g\"]",
        "nodes = [\"p\", \"q\"]"}},
      {"broadcast_weights", {"source = \"p\"", "nodes = [\"q\"]"}},
      {"loop", {"name = \"again\"", "nodes = [\"h\"]"}},
      {"branch",
       {"name = \"pick\"", "when = \"a\"", "then = [\"i\"]", "else = [\"j\"]", "then_gives = \"i\"",
        "else_gives = \"j\""}},
      {"data_parallel", {"name = \"copies\"", "nodes = [\"k\"]", "devices = [\"0\", \"1\"]"}},
      {"subgraph", {"name = \"sub\"", "path = \"sub.toml\""}},
      {"colocate", {"nodes = [\"a\", \"b\"]"}},
      {"separate", {"nodes = [\"c\", \"d\"]"}}};
  all.insert(all.end(), patterns.begin(), patterns.end());
  return all;
}

// Where a key is given (and others of its section after it), the first section of its kind has it.
std::string flow_with(const std::string& key = "", const std::string& value = "") {
  const size_t dot = key.find('.');
  const auto given = split(key.substr(dot + 1) + " = " + value, '\n');
  const auto name_of = [](const std::string& line) { return line.substr(0, line.find(" = ")); };
  bool placed = key.empty();
  std::string text;
  for (const auto& section : sections()) {
    text += section.name == "flow" ? "[flow]\n" : cat("[[", section.name, "]]\n");
    const bool here = !placed && section.name == key.substr(0, dot);
    if (here) text += join(given, "\n") + "\n";
    for (const auto& line : section.lines)
      if (!here || std::ranges::count(given, name_of(line), name_of) == 0) text += line + "\n";
    placed = placed || here;
  }
  return text;
}

const Node& node(const Config& config, const std::string& name) {
  return config.graph.nodes()[size_t(config.graph.find(name))];
}
int place(const Config& config, const std::string& name) { return config.graph.find(name); }
bool has_node(const Config& config, const std::string& name) {
  return std::ranges::count(config.graph.nodes(), name, &Node::name) == 1;
}
const Edge* edge(const Config& config, const std::string& from, const std::string& to) {
  for (const auto& edge : config.graph.edges())
    if (config.graph.nodes()[size_t(edge.from)].name == from &&
        config.graph.nodes()[size_t(edge.to)].name == to)
      return &edge;
  return nullptr;
}
const Region& region(const Config& config, const std::string& name) {
  return *std::ranges::find(config.graph.regions(), name, &Region::name);
}
std::vector<std::string> inside(const Config& config, const std::string& name, int arm = 0) {
  std::vector<std::string> found;
  for (const auto& node : config.graph.nodes())
    if (node.region >= 0 && config.graph.regions()[size_t(node.region)].name == name &&
        node.arm == arm)
      found.push_back(node.name);
  return found;
}
std::vector<std::string> names(const Config& config, const std::vector<int>& nodes) {
  std::vector<std::string> found;
  for (const int node : nodes) found.push_back(config.graph.nodes()[size_t(node)].name);
  return found;
}
// Of weights or gradients, by its name.
const Exchange* trade(const Config& config, const std::string& name = "talk") {
  for (const auto& exchange : config.graph.exchanges())
    if (exchange.name == name) return &exchange;
  return nullptr;
}
Tensors weights(const Config& config, const std::string& name) {
  return node(config, name).open(at::kCPU).weights;
}
using Names = std::vector<std::string>;

struct Case {
  std::string key, value;
  std::function<bool(const Config&)> holds;
};

void add_edge_cases(std::vector<Case>& cases, const std::string& section, const std::string& from,
                    const std::string& to) {
  const auto add = [&](const char* key, const std::string& value, auto holds) {
    cases.push_back({cat(section, ".", key), value, [=](const Config& config) {
                       const auto* found = edge(config, from, to);
                       return found != nullptr && holds(found->options);
                     }});
  };
  using E = const EdgeOptions&;
  add("capacity", "3", [](E e) { return e.capacity == 3; });
  add("transport", "\"alias\"", [](E e) { return e.transport == Transport::Alias; });
  add("transport", "\"copy\"", [](E e) { return e.transport == Transport::Copy; });
  add("transport", "\"send\"", [](E e) { return e.transport == Transport::Send; });
  add("transport", "\"host\"", [](E e) { return e.transport == Transport::Host; });
  add("policy", "\"latest\"", [](E e) { return e.policy == Policy::Latest; });
  add("policy", "\"drop\"", [](E e) { return e.policy == Policy::Drop; });
  add("staleness", "2", [](E e) { return e.staleness == 2; });
  add("initial", "0.5", [](E e) { return e.initial == 0.5; });
  add("initial_shape", "[4, 2]", [](E e) { return e.initial_shape == std::vector<int64_t>{4, 2}; });
  add("every", "5", [](E e) { return e.every == 5; });
  if (section == "exchange") return;  // no gradients cross one
  add("gradients", "\"true\"", [](E e) { return e.gradients == true; });
  add("gradients", "\"false\"", [](E e) { return e.gradients == false; });
}

std::vector<Case> all_cases(const Folder& folder) {
  using C = const Config&;
  save_weights(word("mlp:2,2", "kept")(at::kCPU), (folder.path / "n.safetensors").string());
  std::vector<Case> cases{
      {"flow.name", "\"mine\"", [](C c) { return c.graph.options().name == "mine"; }},
      {"flow.devices", "\"cpu:5\"", [](C c) { return c.graph.options().devices.size() == 5; }},
      {"flow.rounds", "7", [](C c) { return c.flow.rounds == 7; }},
      {"flow.seed", "9",
       [](C c) {
         return c.graph.options().seed == 9 &&
                weights(c, "n")[0].equal(find_word("mlp:2,2", 9, "n")->open(at::kCPU).weights[0]);
       }},
      {"flow.log_every", "3", [](C c) { return c.flow.log_every == 3; }},
      {"flow.timeout_s", "2.5", [](C c) { return c.flow.timeout_s == 2.5; }},
      {"flow.memory_gb", "1.5", [](C c) { return c.graph.options().memory_gb == 1.5; }},
      {"flow.threads", "2", [](C c) { return c.flow.threads == 2; }},

      {"node.name", "\"other\"", [](C c) { return has_node(c, "other"); }},
      {"node.model", "\"mlp:2,3\"", [](C c) { return weights(c, "n")[0].size(0) == 3; }},
      {"node.weights", "\"n.safetensors\"",
       [](C c) { return weights(c, "n")[0].equal(word("mlp:2,2", "kept")(at::kCPU).weights[0]); }},
      {"node.device", "2", [](C c) { return node(c, "n").options.device == 2; }},
      {"node.replicas", "[1, 3]",
       [](C c) {
         return node(c, "n").options.replicas == std::vector<int>{1, 3};
       }},
      {"node.role", "\"train\"", [](C c) { return node(c, "n").options.role == Role::Train; }},
      {"node.role", "\"frozen\"", [](C c) { return node(c, "n").options.role == Role::Frozen; }},
      {"node.input", "[\"2*u:FP32[b,2]\"]",
       [](C c) {
         const auto& port = node(c, "n").inputs[0];
         return port.port.name == "u" && port.tokens == 2 && port.declared;
       }},
      {"node.output", "[\"2*w\"]",
       [](C c) {
         const auto& port = node(c, "n").outputs[0];
         return port.port.name == "w" && port.tokens == 2;
       }},
      {"node.loss", "\"y\"", [](C c) { return node(c, "n").options.loss == "y"; }},
      {"node.weights_of", "\"p\"", [](C c) { return node(c, "n").options.weights_of == "p"; }},
      {"node.init", "\"other\"",
       [](C c) { return weights(c, "n")[0].equal(word("mlp:2,2", "other")(at::kCPU).weights[0]); }},
      {"node.optimizer", "\"adamw\"",
       [](C c) { return node(c, "n").options.optimizer.kind == OptimizerOptions::Kind::AdamW; }},
      {"node.lr", "0.25", [](C c) { return node(c, "n").options.optimizer.lr == 0.25; }},
      {"node.momentum", "0.9", [](C c) { return node(c, "n").options.optimizer.momentum == 0.9; }},
      {"node.weight_decay", "0.01",
       [](C c) { return node(c, "n").options.optimizer.weight_decay == 0.01; }},
      {"node.phase", "2", [](C c) { return node(c, "n").options.phase == 2; }},
      {"node.in_place", "true", [](C c) { return node(c, "n").options.in_place; }},
      {"node.ms", "1.5", [](C c) { return node(c, "n").options.ms == 1.5; }},

      {"edge.from", "\"c\"", [](C c) { return edge(c, "c", "b") != nullptr; }},
      {"edge.to", "\"m\"", [](C c) { return edge(c, "a", "m") != nullptr; }},
      {"input.port", "\"given:INT64[3]\"",
       [](C c) {
         return has_node(c, "given") && node(c, "given").feeds == "given" &&
                node(c, "given").outputs[0].port.type == plan::Type::Int64;
       }},
      {"input.to", "[\"m\", \"o\"]",
       [](C c) { return edge(c, "in", "m") != nullptr && edge(c, "in", "o") != nullptr; }},
      {"input.device", "3", [](C c) { return node(c, "in").options.device == 3; }},
      {"output.port", "\"result\"",
       [](C c) { return has_node(c, "result") && node(c, "result").gives == "result"; }},
      {"output.from", "\"d\"", [](C c) { return edge(c, "d", "out") != nullptr; }},
      {"output.device", "3", [](C c) { return node(c, "out").options.device == 3; }},

      {"ensemble.name", "\"mix\"", [](C c) { return has_node(c, "mix"); }},
      {"ensemble.input", "\"e\"\nnodes = [\"m\", \"o\"]",
       [](C c) { return edge(c, "e", "m") != nullptr && edge(c, "e", "o") != nullptr; }},
      {"ensemble.nodes", "[\"m\", \"o\"]",
       [](C c) { return edge(c, "m", "ens") != nullptr && edge(c, "o", "ens") != nullptr; }},
      {"ensemble.merge", "\"stack\"", [](C c) { return node(c, "ens").what == "stack"; }},
      {"ensemble.weights", "[0.25, 2]\nmerge = \"weighted\"",
       [](C c) {
         const auto one = at::ones({1});
         return number(node(c, "ens").open(at::kCPU).run({one, one}, 0)[0]) == 2.25;
       }},
      {"ensemble.device", "3", [](C c) { return node(c, "ens").options.device == 3; }},
      {"chain.nodes", "[\"c\", \"m\", \"o\"]",
       [](C c) { return edge(c, "c", "m") != nullptr && edge(c, "m", "o") != nullptr; }},

      {"exchange.name", "\"chat\"", [](C c) { return has_node(c, "chat-f"); }},
      {"exchange.what", "\"features\"\nname = \"chat\"",
       [](C c) { return has_node(c, "chat-f") && trade(c, "chat") == nullptr; }},
      {"exchange.what", "\"weights\"",
       [](C c) {
         return trade(c) && trade(c)->what == Exchange::What::Weights && !has_node(c, "talk-f");
       }},
      {"exchange.what", "\"gradients\"",
       [](C c) { return trade(c) && trade(c)->what == Exchange::What::Gradients; }},
      {"exchange.from", "[\"d\", \"m\"]", [](C c) { return edge(c, "m", "talk-f") != nullptr; }},
      {"exchange.into", "[\"f\", \"m\"]", [](C c) { return edge(c, "talk-m", "m") != nullptr; }},
      {"exchange.nodes", "[\"q\", \"r\"]\nwhat = \"weights\"",
       [](C c) {
         return trade(c) && names(c, trade(c)->nodes) == Names{"q", "r"};
       }},
      {"exchange.topology", "\"ring\"",
       [](C c) {
         return edge(c, "d", "g") != nullptr && edge(c, "e", "f") != nullptr &&
                !has_node(c, "talk-f");
       }},
      {"exchange.reduce", "\"sum\"\nwhat = \"gradients\"",
       [](C c) { return trade(c) && trade(c)->sum; }},
      {"exchange.reduce", "\"mean\"\nwhat = \"gradients\"",
       [](C c) { return trade(c) && !trade(c)->sum; }},
      {"exchange.every", "4\nwhat = \"weights\"",
       [](C c) { return trade(c) && trade(c)->every == 4; }},
      {"exchange.staleness", "2\nwhat = \"gradients\"",
       [](C c) { return trade(c) && trade(c)->staleness == 2; }},
      {"exchange.gradients", "\"false\"\ntopology = \"ring\"",
       [](C c) { return edge(c, "d", "g") && edge(c, "d", "g")->options.gradients == false; }},
      {"broadcast_weights.source", "\"r\"",
       [](C c) { return c.graph.exchanges()[0].source == place(c, "r"); }},
      {"broadcast_weights.nodes", "[\"r\"]",
       [](C c) {
         return names(c, c.graph.exchanges()[0].nodes) == Names{"p", "r"};
       }},
      {"broadcast_weights.every", "6", [](C c) { return c.graph.exchanges()[0].every == 6; }},

      {"loop.name", "\"turns\"", [](C c) { return inside(c, "turns") == Names{"h"}; }},
      {"loop.nodes", "[\"h\", \"m\"]",
       [](C c) {
         return inside(c, "again") == Names{"h", "m"};
       }},
      {"loop.carry", "[\"h.y -> h.x\"]",
       [](C c) { return edge(c, "h", "h") && edge(c, "h", "h")->carried; }},
      {"loop.until", "\"h\"",
       [](C c) {
         return region(c, "again").decides == std::pair{place(c, "h"), 0};
       }},
      {"loop.most", "8", [](C c) { return region(c, "again").most == 8; }},
      {"branch.name", "\"way\"",
       [](C c) {
         return has_node(c, "way") && inside(c, "way") == Names{"i", "way"};
       }},
      {"branch.when", "\"e\"",
       [](C c) {
         return region(c, "pick").decides == std::pair{place(c, "e"), 0};
       }},
      {"branch.then", "[\"i\", \"m\"]",
       [](C c) {
         return inside(c, "pick") == Names{"i", "m", "pick"};
       }},
      {"branch.else", "[\"j\", \"m\"]",
       [](C c) {
         return inside(c, "pick", 1) == Names{"j", "m", "pick-else"};
       }},
      {"branch.then_gives", "\"m\"\nthen = [\"i\", \"m\"]",
       [](C c) { return edge(c, "m", "pick") != nullptr; }},
      {"branch.else_gives", "\"m\"\nelse = [\"j\", \"m\"]",
       [](C c) { return edge(c, "m", "pick-else") != nullptr; }},
      {"branch.device", "2", [](C c) { return node(c, "pick").options.device == 2; }},
      {"data_parallel.name", "\"both\"", [](C c) { return has_node(c, "both-split"); }},
      {"data_parallel.nodes", "[\"m\"]",
       [](C c) { return has_node(c, "m@1") && !has_node(c, "k@1"); }},
      {"data_parallel.devices", "[\"3\", \"2\", \"1\"]",
       [](C c) {
         return has_node(c, "k@2") && node(c, "k").options.device == 3 &&
                node(c, "k@1").options.device == 2 && node(c, "k@2").options.device == 1;
       }},
      {"subgraph.name", "\"part\"", [](C c) { return has_node(c, "part/s"); }},
      {"subgraph.path", "\"other.toml\"", [](C c) { return has_node(c, "sub/t"); }},
      {"subgraph.devices", "[3]", [](C c) { return node(c, "sub/s").options.device == 3; }},
      {"colocate.nodes", "[\"m\", \"o\"]",
       [](C c) {
         return names(c, c.graph.together().back()) == Names{"m", "o"};
       }},
      {"separate.nodes", "[\"m\", \"o\"]",
       [](C c) {
         return names(c, c.graph.apart().back()) == Names{"m", "o"};
       }},
  };
  add_edge_cases(cases, "edge", "a", "b");
  add_edge_cases(cases, "chain", "b", "c");
  add_edge_cases(cases, "exchange", "e", "talk-f");
  add_edge_cases(cases, "ensemble", "a", "ens");
  return cases;
}

// A word is what it is: other numbers of ports are a mistake of the file.
TEST(FlowConfig, AWordHasItsPorts) {
  const Folder folder;
  const auto text = [](const std::string& ports) {
    return cat("[[node]]\nname = \"n\"\nmodel = \"cross_entropy\"\n", ports);
  };
  EXPECT_TRUE(has(error_of([&] { read(folder, text("input = [\"x\"]")); }),
                  "'cross_entropy' has 2 inputs (x, label), got 1 names for them"));
  EXPECT_TRUE(has(error_of([&] { read(folder, text("output = [\"a\", \"b\"]")); }),
                  "'cross_entropy' has 1 outputs (loss), got 2 names for them"));
}

// Copies of one sub-graph differ as nodes of other names do, and follow the seed of the whole.
TEST(FlowConfig, ASubgraphDrawsByItsNameAndTheWholesSeed) {
  const Folder folder;
  folder.write("sub.toml", "[[node]]\nname = \"n\"\nmodel = \"mlp:2,2\"\n");
  const auto config = read(folder,
                           "[flow]\nseed = 7\n[[subgraph]]\nname = \"one\"\npath = \"sub.toml\"\n"
                           "[[subgraph]]\nname = \"two\"\npath = \"sub.toml\"\n");
  for (const std::string name : {"one/n", "two/n"})
    EXPECT_TRUE(at::equal(weights(config, name)[0],
                          find_word("mlp:2,2", 7, name)->open(at::kCPU).weights[0]));
}

TEST(FlowConfig, EveryKeyHasItsEffect) {
  const Folder folder;
  folder.write("sub.toml", "[[node]]\nname = \"s\"\nmodel = \"same\"\ndevice = 0\n");
  folder.write("other.toml", "[[node]]\nname = \"t\"\nmodel = \"same\"\n");
  const auto plain = read(folder, flow_with());
  std::set<std::string> tried;
  for (const auto& [key, value, holds] : all_cases(folder)) {
    tried.insert(key);
    EXPECT_FALSE(holds(plain)) << key << " = " << value << " is so without the key";
    const auto error = error_of(
        [&] { EXPECT_TRUE(holds(read(folder, flow_with(key, value)))) << key << " = " << value; });
    EXPECT_EQ(error, "no error") << key << " = " << value;
  }
  for (const auto& line : split(describe_keys(), '\n')) {
    const std::string key = line.substr(0, line.find(" = "));
    EXPECT_TRUE(key.empty() || tried.contains(key)) << "no case for " << key;
  }
}

// None is cut to the bits of a smaller one, of which 4294967296 has 0.
TEST(FlowConfig, IntegersThatDoNotFitAreRefusedByKey) {
  const Folder folder;
  folder.write("sub.toml", "[[node]]\nname = \"s\"\nmodel = \"same\"\n");
  for (const std::string key :
       {"node.device", "node.replicas", "node.phase", "input.device", "output.device",
        "ensemble.device", "branch.device", "subgraph.devices"}) {
    const bool list = key.ends_with("s");
    const auto text =
        error_of([&] { read(folder, flow_with(key, list ? "[0, 4294967296]" : "4294967296")); });
    EXPECT_TRUE(has(text, key + ": got ") && has(text, "4294967296") &&
                has(text, "wanted at most 2147483647"))
        << key << ": " << text;
  }
  const auto text = error_of(
      [&] { read(folder, flow_with("data_parallel.devices", "[\"0\", \"4294967296\"]")); });
  EXPECT_TRUE(has(text, "data_parallel.devices: got '4294967296'") &&
              has(text, "places in flow.devices"))
      << text;
}

TEST(FlowConfig, WeightsOfANodeWithoutAModelAreItsModelToo) {
  const Folder folder;
  const auto config = read(folder, R"(
[[node]]
name = "owner"
model = "mlp:2,3"
input = ["u"]
output = ["v"]
[[node]]
name = "again"
weights_of = "owner"
)");
  ASSERT_EQ(node(config, "again").inputs.size(), 1u);
  EXPECT_EQ(node(config, "again").inputs[0].port.name, "u");
  EXPECT_EQ(node(config, "again").outputs[0].port.name, "v");
  EXPECT_TRUE(weights(config, "again")[0].equal(weights(config, "owner")[0]));
  EXPECT_TRUE(has(error_of([&] {
                    read(folder,
                         "[[node]]\nname = \"again\"\nweights_of = \"owner\"\n"
                         "[[node]]\nname = \"owner\"\nmodel = \"mlp:2,3\"\n");
                  }),
                  "node 'again': weights_of 'owner' is no node that comes before it"));
}

// ---- the same as in C++ ----

// What the devices do, and what each channel holds.
std::string text_of(const Graph& graph) {
  const auto compiled = compile(graph);
  std::string text = plan::to_text(compiled.program) + compiled.placement();
  for (const auto* part : plan::with_parts(compiled.program))
    for (const auto& channel : part->channels)
      text += cat(part->name, ": ", channel.name, " ", channel.capacity, " ", channel.initial,
                  channel.waits ? "" : " loose", "\n");
  return text;
}

TEST(FlowConfig, TheSameFlowInCppIsTheSameProgram) {
  const Folder folder;
  folder.write("sub.toml", R"(
[[input]]
port = "x"
to = ["s"]
[[node]]
name = "s"
model = "scale:by=3"
device = 0
[[output]]
port = "y"
from = "s"
)");
  const auto config = read(folder, R"(
[flow]
name = "same"
devices = "cpu:3"
[[input]]
port = "x:FP32[b,2]"
to = ["sub.x", "gate"]
[[node]]
name = "data"
model = "spirals:batch=32"
device = 0
[[node]]
name = "ann"
model = "mlp:2,8,3"
device = 0
role = "train"
optimizer = "adamw"
[[node]]
name = "bob"
model = "mlp:2,8,3"
device = 1
role = "train"
[[node]]
name = "ann_loss"
model = "cross_entropy"
device = 0
[[node]]
name = "bob_loss"
model = "mutual"
device = 1
phase = 1
[[node]]
name = "gate"
model = "above"
device = 2
[[node]]
name = "one"
model = "mlp:2,3"
device = 0
[[node]]
name = "two"
model = "mlp:2,3"
device = 1
[[node]]
name = "large"
model = "mlp:3,3"
replicas = [0, 2]
[[node]]
name = "half"
model = "scale:by=0.5"
device = 1
[[node]]
name = "small"
model = "settled:by=0.1"
device = 2
[[subgraph]]
name = "sub"
path = "sub.toml"
devices = [2]
[[ensemble]]
name = "mix"
input = "sub.y"
nodes = ["one", "two"]
merge = "weighted"
weights = [0.5, 0.5]
device = 1
[[chain]]
nodes = ["data", "ann", "ann_loss"]
capacity = 3
[[exchange]]
name = "talk"
from = ["ann", "bob"]
into = ["said", "bob_loss.peers"]
staleness = 1
initial_shape = [32, 3]
[[exchange]]
name = "average"
what = "weights"
nodes = ["ann", "bob"]
every = 4
[[broadcast_weights]]
source = "one"
nodes = ["two"]
[[node]]
name = "said"
model = "same"
[[edge]]
from = "data.x"
to = "bob"
transport = "send"
[[edge]]
from = "bob"
to = "bob_loss.x"
[[edge]]
from = "data.label"
to = "ann_loss.label"
[[edge]]
from = "data.label"
to = "bob_loss.label"
[[edge]]
from = "mix"
to = "large"
[[edge]]
from = "large"
to = "half"
[[edge]]
from = "large"
to = "small.old"
[[edge]]
from = "half"
to = "small.new"
[[loop]]
name = "halve"
nodes = ["half", "small"]
carry = ["small.y -> half.x", "small.y -> small.old"]
until = "small.done"
most = 9
[[output]]
port = "y"
from = "small.y"
[[output]]
port = "above"
from = "gate"
[[colocate]]
nodes = ["said", "gate"]
[[separate]]
nodes = ["said", "one"]
)");

  Graph sub({.devices = topo::parse_devices("cpu:3")});
  sub.input("x", {});
  flow::add(sub, "s", "scale:by=3", {.device = 0});
  sub.edge("x", "s");
  sub.output("y", "s");
  Graph graph({.name = "same", .devices = topo::parse_devices("cpu:3")});
  graph.input("x:FP32[b,2]", {});
  const auto add = [&](const std::string& name, const std::string& text, NodeOptions options) {
    flow::add(graph, name, text, options);
  };
  add("data", "spirals:batch=32", {.device = 0});
  add("ann", "mlp:2,8,3",
      {.device = 0, .role = Role::Train, .optimizer = {.kind = OptimizerOptions::Kind::AdamW}});
  add("bob", "mlp:2,8,3", {.device = 1, .role = Role::Train});
  add("ann_loss", "cross_entropy", {.device = 0});
  add("bob_loss", "mutual", {.device = 1, .phase = 1});
  add("gate", "above", {.device = 2});
  add("one", "mlp:2,3", {.device = 0});
  add("two", "mlp:2,3", {.device = 1});
  add("large", "mlp:3,3", {.replicas = {0, 2}});
  add("half", "scale:by=0.5", {.device = 1});
  add("small", "settled:by=0.1", {.device = 2});
  add("said", "same", {});
  graph.subgraph("sub", sub, {2});
  graph.ensemble(
      "mix", "sub.y",
      {.nodes = {"one", "two"}, .merge = "weighted", .weights = {0.5, 0.5}, .device = 1});
  graph.chain({"data", "ann", "ann_loss"}, {.capacity = 3});
  graph.exchange("talk", {.from = {"ann", "bob"},
                          .into = {"said", "bob_loss.peers"},
                          .edge = {.staleness = 1, .initial_shape = {32, 3}}});
  graph.exchange({.name = "average", .every = 4}, {"ann", "bob"});
  graph.broadcast_weights("one", {"two"});
  graph.edge("data.x", "bob", {.transport = Transport::Send});
  graph.edge("bob", "bob_loss.x");
  graph.edge("data.label", "ann_loss.label");
  graph.edge("data.label", "bob_loss.label");
  graph.edge("mix", "large");
  graph.edge("large", "half");
  graph.edge("large", "small.old");
  graph.edge("half", "small.new");
  graph.edge("x", "sub.x");
  graph.edge("x", "gate");
  graph.loop("halve", {.nodes = {"half", "small"},
                       .carry = {{"small.y", "half.x"}, {"small.y", "small.old"}},
                       .until = "small.done",
                       .most = 9});
  graph.output("y", "small.y");
  graph.output("above", "gate");
  graph.colocate({"said", "gate"});
  graph.separate({"said", "one"});
  EXPECT_EQ(text_of(config.graph), text_of(graph));
  check(compile(graph));
}

// ---- regions within regions ----

std::string node_text(const std::string& name, const std::string& model, int device) {
  return cat("[[node]]\nname = \"", name, "\"\nmodel = \"", model, "\"\ndevice = ", device, "\n");
}
const char* const kBegin = "[flow]\ndevices = \"cpu:2\"\n[[input]]\nport = \"x:FP32[n]\"\n";

// For some numbers, what the flow gives for them.
void expect_gives(const Folder& folder, const std::string& text, const std::vector<double>& given,
                  const std::function<double(double)>& wanted) {
  const auto error = error_of([&] {
    Executor executor(compile(read(folder, text).graph), {.timeout = std::chrono::seconds(60)});
    for (const double x : given)
      EXPECT_EQ(number(executor.step({at::full({2}, x)})[0]), wanted(x)) << x;
  });
  EXPECT_EQ(error, "no error");
}

TEST(FlowConfig, ALoopInAnArmOfABranch) {
  const Folder folder;
  for (const int device : {0, 1}) {
    const std::string text = kBegin + node_text("gate", "above:than=10", 0) +
                             node_text("half", "scale:by=0.5", device) +
                             node_text("twice", "scale:by=2", 1 - device) + R"(
[[edge]]
from = "x"
to = "gate"
[[edge]]
from = "x"
to = "half"
[[edge]]
from = "x"
to = "twice"
[[loop]]
name = "halve"
nodes = ["half"]
carry = ["half -> half"]
most = 3
[[branch]]
name = "pick"
when = "gate"
then = ["half"]
then_gives = "half"
else = ["twice"]
else_gives = "twice"
[[output]]
port = "y"
from = "pick"
)";
    expect_gives(folder, text, {16, 1, 32, 10, 11},
                 [](double x) { return x > 10 ? x / 8 : x * 2; });
  }
}

TEST(FlowConfig, ABranchInALoop) {
  const Folder folder;
  for (const int device : {0, 1}) {
    const std::string text =
        kBegin + node_text("start", "same", 0) + node_text("gate", "above:than=10", 0) +
        node_text("half", "scale:by=0.5", device) + node_text("triple", "scale:by=3", 1 - device) +
        R"(
[[loop]]
name = "again"
nodes = ["start", "gate", "half", "triple"]
carry = ["pick -> start"]
most = 5
[[branch]]
name = "pick"
when = "gate"
then = ["half"]
then_gives = "half"
else = ["triple"]
else_gives = "triple"
[[edge]]
from = "x"
to = "start"
[[edge]]
from = "start"
to = "gate"
[[edge]]
from = "start"
to = "half"
[[edge]]
from = "start"
to = "triple"
[[output]]
port = "y"
from = "pick"
)";
    expect_gives(folder, text, {1, 16, 7, 40}, [](double x) {
      for (int turn = 0; turn < 5; ++turn) x = x > 10 ? x / 2 : x * 3;
      return x;
    });
  }
}

TEST(FlowConfig, CopiesAreNamedByTheirPorts) {
  const Folder folder;
  const std::string text = kBegin + node_text("front", "scale:by=2", -1) +
                           node_text("back", "scale:by=3", -1) + node_text("after", "same", 0) +
                           R"(
[[chain]]
nodes = ["x", "copies", "after"]
[[output]]
port = "y"
from = "after"
[[data_parallel]]
name = "copies"
nodes = ["front", "back"]
devices = ["0,1", "1,0"]
)";
  std::string by_ports = text;
  const std::string chain = "[[chain]]\nnodes = [\"x\", \"copies\", \"after\"]\n";
  by_ports.replace(by_ports.find(chain), chain.size(),
                   "[[edge]]\nfrom = \"x\"\nto = \"copies.x\"\n"
                   "[[ensemble]]\nname = \"mean\"\nnodes = [\"copies\"]\n"
                   "[[edge]]\nfrom = \"mean\"\nto = \"after\"\n");
  for (const auto& flow : {text, by_ports})
    expect_gives(folder, flow, {1, 5}, [](double x) { return 6 * x; });
}

// What an ensemble takes and what it merges may be of patterns that are told after it.
TEST(FlowConfig, EnsemblesAndBranchesMayBeOfEachOther) {
  const Folder folder;
  std::string text = kBegin + std::string("to = [\"gate\", \"small\", \"large\"]\n");
  for (const auto& [name, model] : {std::pair{"gate", "above:than=10"},
                                    {"small", "scale:by=2"},
                                    {"large", "scale:by=10"},
                                    {"half", "scale:by=0.5"},
                                    {"twice", "scale:by=2"}})
    text += node_text(name, model, 0);
  text += R"(
[[ensemble]]
name = "last"
nodes = ["mix", "pick"]
merge = "weighted"
weights = [1, 100]
[[ensemble]]
name = "mix"
input = "pick"
nodes = ["half", "twice"]
merge = "weighted"
weights = [1, 1]
[[branch]]
name = "pick"
when = "gate"
then = ["large"]
then_gives = "large"
else = ["small"]
else_gives = "small"
[[output]]
port = "y"
from = "last"
)";
  expect_gives(folder, text, {4, 16}, [](double x) { return (x > 10 ? 10 * x : 2 * x) * 102.5; });
}

TEST(FlowConfig, ALoopInALoopInEitherOrder) {
  const Folder folder;
  const std::string inner = R"(
[[loop]]
name = "inner"
nodes = ["half"]
carry = ["half -> half"]
most = 3
)",
                    outer = R"(
[[loop]]
name = "outer"
nodes = ["start", "half", "six"]
carry = ["six -> start"]
most = 2
)";
  for (const auto& loops : {inner + outer, outer + inner}) {
    const std::string text = kBegin + node_text("start", "same", 0) +
                             node_text("half", "scale:by=0.5", 1) +
                             node_text("six", "scale:by=6", 0) + loops + R"(
[[chain]]
nodes = ["x", "start", "half", "six"]
[[output]]
port = "y"
from = "six"
)";
    expect_gives(folder, text, {64, 1}, [](double x) { return x / 8 * 6 / 8 * 6; });
  }
}

}  // namespace
}  // namespace yoke::flow
