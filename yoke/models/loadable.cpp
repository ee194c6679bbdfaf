// SPDX-License-Identifier: Apache-2.0
#include "yoke/models/loadable.h"

#include <c10/core/InferenceMode.h>
#include <caffe2/serialize/inline_container.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/inliner.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "yoke/base/error.h"
#include "yoke/base/mutex.h"
#include "yoke/base/text.h"
#include "yoke/models/whole.h"
#include "yoke/parallel/device_code.h"

namespace yoke::models {
namespace {

using std::filesystem::path;

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// The names of a zip file's parts.
std::vector<std::string> parts_of(const path& file) {
  try {
    caffe2::serialize::PyTorchStreamReader reader(file.string());
    return reader.getAllRecords();
  } catch (const std::exception& error) {
    fail(Kind::Io, "'", file.string(), "' is neither .pt nor .pt2: ", first_line(error));
  }
}

bool has_part(const std::vector<std::string>& parts, const std::string& text) {
  return std::ranges::any_of(parts, [&](const auto& part) { return part.find(text) != part.npos; });
}

// Lists, dictionaries and objects within attributes hold more of them.
void flatten(const c10::IValue& value, std::vector<c10::IValue>& flat) {
  if (value.isModule()) return;  // its own attributes are listed
  if (value.isList()) {
    for (const auto& item : value.toListRef()) flatten(item, flat);
  } else if (value.isTuple()) {
    for (const auto& item : value.toTupleRef().elements()) flatten(item, flat);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) flatten(item.value(), flat);
  } else if (value.isObject()) {
    for (const auto& item : value.toObjectRef().slots()) flatten(item, flat);
  } else {
    flat.push_back(value);
  }
}

bool sets_attributes(at::ArrayRef<const torch::jit::Block*> blocks) {
  for (const auto* block : blocks)
    for (const auto* node : block->nodes())
      if (node->kind() == c10::prim::SetAttr || sets_attributes(node->blocks())) return true;
  return false;
}

// What lies in an attribute is written in place: a buffer, or a list that grows.
bool writes_attributes(at::ArrayRef<const torch::jit::Block*> blocks,
                       const torch::jit::AliasDb& aliases) {
  for (const auto* block : blocks)
    for (const auto* node : block->nodes()) {
      if (node->kind() == c10::prim::GetAttr && !node->output()->type()->is_module() &&
          aliases.hasWriters(node->output()))
        return true;
      if (writes_attributes(node->blocks(), aliases)) return true;
    }
  return false;
}

// It is used, not trained: what batch norms do then is not looked at.
void decide_mode(torch::jit::Graph& graph, at::ArrayRef<torch::jit::Block*> blocks) {
  for (auto* block : blocks)
    for (auto* node : block->nodes()) {
      decide_mode(graph, node->blocks());
      if (node->kind() != c10::prim::GetAttr || node->s(c10::attr::name) != "training") continue;
      const torch::jit::WithInsertPoint before(node);
      node->output()->replaceAllUsesWith(graph.insertConstant(false));
    }
}

class Script final : public Loadable {
 public:
  Script(const path& file, torch::jit::Module module, const LoadOptions& options)
      : Loadable(file.string(), "pytorch_torchscript"), module_(std::move(module)) {
    module_.eval();
    const auto place = [&](const at::Tensor& tensor) {
      if (options.dtype != at::kFloat && at::isFloatingType(tensor.scalar_type()))
        tensor.set_data(tensor.to(options.dtype));
      bytes_ += tensor.nbytes();
    };
    for (const auto& tensor : module_.parameters()) place(tensor);
    for (const auto& tensor : module_.buffers()) place(tensor);
    for (const auto& argument : inputs_of(module_, name_)) {
      const std::string type = argument.type()->str();
      if (type != "Tensor" && type != "str[]" && type != "int" && type != "float" && type != "bool")
        fail(Kind::Io, "forward() of '", name_, "' takes ", type, " as '", argument.name(),
             "', and tensors, numbers and List[str] alone can be given");
      inputs_.push_back({.name = argument.name()});
      types_.push_back(type);
    }
    declared_ = !options.inputs.empty();
    outputs_ = options.outputs;
    if (declared_) declare(options.inputs);
  }

  c10::IValue call(std::vector<c10::IValue> inputs) override {
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = as_argument(i, std::move(inputs[i]));
    return module_.forward(std::move(inputs));
  }

  std::vector<c10::IValue> state() const override {
    std::vector<c10::IValue> flat;
    for (const auto& attribute : module_.attributes()) flatten(attribute, flat);
    return flat;
  }

  bool sets_state() const override {
    auto graph = module_.get_method("forward").graph()->copy();
    torch::jit::Inline(*graph);
    decide_mode(*graph, graph->block());
    torch::jit::ConstantPropagation(graph);
    return sets_attributes(graph->block()) ||
           writes_attributes(graph->block(), torch::jit::AliasDb(graph));
  }

  std::unique_ptr<Loadable> copy() const override {
    auto other = std::make_unique<Script>(*this);
    c10::IValue::HashIdentityIValueMap shared;
    for (const auto& tensor : module_.parameters()) shared.emplace(tensor, tensor);
    other->module_ = torch::jit::Module(module_._ivalue()->deepcopy(shared));
    return other;
  }

 private:
  void declare(const std::vector<Port>& told) {
    std::set<std::string> known;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      auto& input = inputs_[i];
      known.insert(input.name);
      const auto found = std::ranges::find(told, input.name, &Port::name);
      if (found == told.end())
        fail(Kind::Usage, "forward() of '", name_, "' takes '", input.name,
             "', which no input was declared for: declare it as ", input.name, ":FP32[…]");
      if ((types_[i] == "str[]") != (found->type == plan::Type::Bytes))
        fail(Kind::Usage, "forward() of '", name_, "' takes ", types_[i], " as '", input.name,
             "', and it was declared as ", found->wanted(), "; BYTES is List[str] there");
      input = *found;
    }
    for (const auto& input : told)
      if (!known.contains(input.name))
        fail(Kind::Usage, "forward() of '", name_, "' takes no '", input.name, "'; it takes ",
             join({known.begin(), known.end()}, ", "));
  }

  c10::IValue as_argument(size_t i, c10::IValue value) const {
    const std::string& type = types_[i];
    const bool strings = type == "str[]";
    if (strings != value.isList())
      fail(Kind::Usage, "'", name_, "': input '", inputs_[i].name, "' is ", type, ", and got ",
           value.isList() ? "BYTES" : "a tensor");
    if (strings || type == "Tensor") return value;
    const at::Tensor& tensor = value.toTensor();
    if (tensor.numel() != 1)
      fail(Kind::Usage, "'", name_, "': input '", inputs_[i].name, "' is ", type,
           ": wanted one element, got ", tensor.numel());
    const at::Scalar number = tensor.item();
    if (type == "int") return number.toLong();
    return type == "float" ? c10::IValue(number.toDouble()) : c10::IValue(number.toBool());
  }

  torch::jit::Module module_;
  std::vector<std::string> types_ = {};  // of the arguments
};

// What of the processor's features a package was compiled for is not there.
std::string missing_feature(const std::string& wanted) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> have;
  for (std::string line; have.empty() && std::getline(file, line);)
    if (line.starts_with("flags") || line.starts_with("Features"))
      for (const auto& word : split(line, ' ')) have.insert(word);
  for (std::string word : split(wanted, ' ')) {
    std::ranges::transform(word, word.begin(), [](unsigned char c) { return char(tolower(c)); });
    if (word == "avx512") word = "avx512f";
    if ((word.starts_with("avx") || word.starts_with("amx")) && !have.contains(word)) return word;
  }
  return "";
}

class Package final : public Loadable {
 public:
  Package(const path& file, const LoadOptions& options) : Loadable(file.string(), "torch_aoti") {
    if (options.inputs.empty())
      fail(Kind::Io, "'", name_,
           "' is compiled and checks no input itself: declare them, as "
           "input = [\"x:FP32[-1,3,224,224]\"] in a config, or --input 'x:FP32[-1,3,224,224]'");
    if (options.dtype != at::kFloat)
      fail(Kind::Usage, "'", name_, "' is compiled, and its precision with it");
    inputs_ = options.inputs;
    outputs_ = options.outputs;
    bytes_ = std::filesystem::file_size(file);
    auto metadata = package_metadata(file);
    try {
      check_machine(metadata, options.device);
      // LibTorch reads the description of each package into the same static object.
      static Mutex one_at_a_time;
      const MutexLock lock(one_at_a_time);
      // What it was compiled for it checks only where it is told so before it is first run.
      ::setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);
      // It unpacks below TMPDIR, and clears up when it ends.
      loader_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
          file.string(), "model", /*run_single_threaded=*/false, /*num_runners=*/1,
          options.device.has_index() ? options.device.index() : c10::DeviceIndex(-1));
    } catch (const std::exception& error) {
      const auto& capability = metadata["AOTI_COMPUTE_CAPABILITY"];
      fail(Kind::Io, "'", name_, "' cannot be loaded: ", first_line(error),
           capability.empty() ? "" : "; it was compiled for compute capability ", capability);
    }
  }

  c10::IValue call(std::vector<c10::IValue> inputs) override {
    std::vector<at::Tensor> tensors;
    for (const auto& input : inputs) tensors.push_back(input.toTensor());
    return loader_->run(tensors);
  }

 private:
  static void check_machine(std::map<std::string, std::string>& metadata, at::Device device) {
    const auto same = [&](const char* key, const std::string& here) {
      const auto& made_for = metadata[key];
      if (!made_for.empty() && made_for != here)
        fail(Kind::Io, "it was compiled for ", made_for, ", and is to run on ", here,
             "; compile it there");
    };
    same("AOTI_DEVICE_KEY", device.is_cuda() ? "cuda" : "cpu");
    if (device.is_cuda())
      same("AOTI_COMPUTE_CAPABILITY", std::to_string(parallel::architecture_of(device)));
    utsname host = {};
    if (::uname(&host) == 0) same("AOTI_MACHINE", host.machine);
    const auto missing = missing_feature(metadata["AOTI_CPU_ISA"]);
    if (!missing.empty())
      fail(Kind::Io, "it was compiled for ", metadata["AOTI_CPU_ISA"],
           ", and this processor has no ", missing, "; compile it here");
  }
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
};

class Ours final : public Loadable {
 public:
  Ours(const path& folder, Architecture architecture, const LoadOptions& options)
      : Loadable(folder.string(), "yoke"),
        model_(std::move(architecture), options.device, options.dtype) {
    inputs_ = {model_.model().input};
    outputs_ = {model_.model().output};
    bytes_ = uint64_t(model_.model().num_parameters) * c10::elementSize(options.dtype);
  }

  c10::IValue call(std::vector<c10::IValue> inputs) override {
    return model_.forward(inputs[0].toTensor());
  }
  const Whole* whole() const override { return &model_; }

 private:
  const Whole model_;
};

}  // namespace

std::vector<at::Tensor> Loadable::run(const std::vector<at::Tensor>& inputs) {
  if (inputs.size() != inputs_.size())
    fail(Kind::Usage, "'", name_, "' takes ", inputs_.size(), " inputs, got ", inputs.size());
  if (declared_)
    for (size_t i = 0; i < inputs.size(); ++i) check(inputs_[i], inputs[i], "'" + name_ + "'");
  const c10::InferenceMode no_gradients;
  const c10::IValue result = call({inputs.begin(), inputs.end()});
  if (result.isTensor()) return {result.toTensor()};
  if (result.isTensorList()) return result.toTensorVector();
  std::vector<at::Tensor> tensors;
  if (result.isTuple())
    for (const auto& part : result.toTupleRef().elements())
      if (part.isTensor()) tensors.push_back(part.toTensor());
  if (tensors.empty())
    fail(Kind::Usage, "forward() of '", name_, "' gives ", result.tagKind(), ", not tensors");
  return tensors;
}

FileKind kind_of(const path& file) {
  if (!std::filesystem::exists(file)) fail(Kind::Io, "there is no '", file.string(), "'");
  if (std::filesystem::is_directory(file)) return FileKind::Folder;
  const auto parts = parts_of(file);
  if (has_part(parts, "aotinductor/")) return FileKind::Package;
  if (has_part(parts, "models/model.json") || has_part(parts, "serialized_exported_program.json"))
    fail(Kind::Io, "'", file.string(),
         "' is an export that is not compiled; in Python: torch._inductor.aoti_compile_and_package("
         "torch.export.load('",
         file.string(), "'), package_path='compiled.pt2')");
  if (has_part(parts, "constants.pkl")) return FileKind::Script;
  if (has_part(parts, "data.pkl"))
    fail(Kind::Io, "'", file.string(),
         "' has weights alone, without a program; save the module by "
         "torch.jit.script(module).save(path)");
  fail(Kind::Io, "'", file.string(), "' is neither TorchScript nor a compiled .pt2");
}

std::map<std::string, std::string> package_metadata(const path& file) {
  caffe2::serialize::PyTorchStreamReader reader(file.string());
  for (const auto& name : reader.getAllRecords()) {
    if (!name.ends_with("wrapper_metadata.json")) continue;
    const auto [data, size] = reader.getRecord(name);
    const auto* text = static_cast<const char*>(data.get());
    const auto json = nlohmann::json::parse(text, text + size, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) return json.get<std::map<std::string, std::string>>();
  }
  return {};
}

std::unique_ptr<Loadable> open_loadable(const path& file, const LoadOptions& options) {
  const auto kind = kind_of(file);
  if (kind == FileKind::Package) return std::make_unique<Package>(file, options);
  if (kind == FileKind::Script)
    return std::make_unique<Script>(file, open_script(file.string(), options.device), options);
  auto architecture = open_model(file).architecture;
  auto* script = std::get_if<ScriptOptions>(&architecture);
  if (!script) return std::make_unique<Ours>(file, std::move(architecture), options);
  script->device = options.device;
  return std::make_unique<Script>(file, open_script(*script), options);
}

}  // namespace yoke::models
