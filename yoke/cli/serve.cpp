// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/serve.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <iostream>
#include <sstream>

#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/cli/environment.h"
#include "yoke/cli/serve_usage.h"
#include "yoke/cli/unpacked.h"
#include "yoke/flow/config.h"
#include "yoke/net/http.h"
#include "yoke/observe/json_lines.h"
#include "yoke/runner/flow_model.h"
#include "yoke/runner/open_runner.h"
#include "yoke/serve/grpc_front.h"
#include "yoke/serve/http_front.h"
#include "yoke/serve/keys.h"
#include "yoke/serve/stand_in.h"

namespace yoke::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> words = {}, inputs = {}, outputs = {};
  std::string devices = {}, port_file = {}, url = {}, key = {}, ca = {}, tenant = {};
  std::optional<int64_t> batch = {}, replicas = {};
  bool insecure = false, keys = false, json = false, dry_run = false;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(Kind::Io, "cannot read '", path, "'");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string name_of(const std::string& path) {
  if (serve::is_stand_in(path)) return "stand-in";
  fs::path file = fs::absolute(path).lexically_normal();
  if (file.filename().empty()) file = file.parent_path();
  return fs::is_directory(file) ? file.filename().string() : file.stem().string();
}

serve::Config read_config(const Options& options) {
  std::vector<std::string> overrides, paths;
  for (const auto& word : options.words) {
    const size_t equals = word.find('=');
    const bool is_key = equals != word.npos && !serve::is_stand_in(word) && !fs::exists(word);
    (is_key ? overrides : paths).push_back(word);
  }
  serve::Config config;
  for (auto& path : paths)  // a flow is a model, and its file not a server's config
    if (fs::path(path).filename() == "flow.toml") path = fs::absolute(path).parent_path().string();
  const bool has_file = paths.size() == 1 && paths[0].ends_with(".toml");
  if (has_file) {
    for (const auto& [flag, given] : {std::pair("input", !options.inputs.empty()),
                                      std::pair("output", !options.outputs.empty()),
                                      std::pair("devices", !options.devices.empty()),
                                      std::pair("replicas", options.replicas.has_value()),
                                      std::pair("batch", options.batch.has_value())})
      if (given)
        fail(Kind::Usage, "--", flag, " does not go with a config: write ", flag,
             " = … into its [[model]]");
    config = serve::parse_config(read_file(paths[0]), paths[0], overrides);
    if (config.models.empty() && config.serve.models.empty())
      fail(Kind::Config, "'", paths[0],
           "' names nothing to serve: wanted sections [[model]], or "
           "serve.models, folders of models that are loaded later");
  } else {
    config = serve::parse_config("", "the command line", overrides);
  }
  if (!has_file) {
    for (const auto& path : paths) {
      if (path.ends_with(".toml"))
        fail(Kind::Usage, "'", path, "' is a config: give it alone, its models are named in it");
      config.models.push_back({.path = path});
    }
    if (config.models.empty())
      fail(Kind::Usage,
           "nothing to serve: name model files, runs or a config, as yoke serve runs/first");
    const bool declares = !options.inputs.empty() || !options.outputs.empty();
    if (declares && config.models.size() > 1)
      fail(Kind::Usage, options.inputs.empty() ? "--output" : "--input",
           " is of one model; write a config for several");
    config.models[0].input = options.inputs;
    config.models[0].output = options.outputs;
    for (auto& model : config.models) {
      if (!options.devices.empty()) model.devices = options.devices;
      model.batch = options.batch.value_or(0);
      model.replicas = options.replicas.value_or(0);
    }
  }
  for (auto& model : config.models)
    if (model.name.empty()) model.name = name_of(model.path);
  config.serve.insecure |= options.insecure;
  serve::check(config);
  return config;
}

uint64_t bytes_of_flow(fs::path folder) {
  std::error_code ignored;
  uint64_t sum = 0;
  if (!fs::is_directory(folder, ignored)) folder = folder.parent_path();
  for (const auto& entry : fs::recursive_directory_iterator(folder, ignored))
    for (const auto* ending : {".pt", ".pt2", ".safetensors"})
      if (entry.path().extension() == ending) sum += entry.file_size(ignored);
  return sum;
}

uint64_t bytes_of(const std::string& path) {
  std::error_code ignored;
  if (flow::is_flow(path)) return bytes_of_flow(path);
  if (!fs::is_directory(path, ignored)) {
    const auto size = fs::file_size(path, ignored);
    return ignored ? 0 : uint64_t(size);
  }
  uint64_t largest = 0;  // of a run, that of one checkpoint
  std::map<fs::path, uint64_t> folders;
  for (const auto& entry : fs::recursive_directory_iterator(path, ignored))
    if (entry.path().extension() == ".safetensors")
      largest = std::max(largest, folders[entry.path().parent_path()] += entry.file_size(ignored));
  return largest;
}

// That it says itself: it has a part on each. None for all else.
std::vector<topo::Device> devices_of_flow(const std::string& path, const topo::Host& host) {
  if (!flow::is_flow(path)) return {};
  const auto text = flow::read_config(path, {}, &host).flow.devices;
  return text == "auto" ? std::vector<topo::Device>{} : topo::parse_devices(text, &host);
}

// A replica of a flow is the set of devices that it names: one, where nobody says how many.
void settle_replicas(serve::ModelConfig& model, const topo::Host& host) {
  const auto own = devices_of_flow(model.path, host);
  if (own.empty()) return;
  if (model.replicas == 0) model.replicas = 1;
  std::vector<topo::Device> first;
  for (int64_t i = 0; i < model.replicas; ++i) first.push_back(runner::replica_devices(own, i)[0]);
  const std::string text = topo::to_text(first);
  if (model.devices != serve::ModelConfig().devices && model.devices != text)
    fail(Kind::Config, "model '", model.name, "' is a flow, which names its own devices (",
         topo::to_text(own), "), got devices = ", model.devices,
         "; change flow.devices, or make it auto");
  model.devices = text;
}

// Files that are larger than what their devices have left are refused before anything is started.
void check_memory(const std::vector<serve::ModelConfig>& models, const topo::Host& host) {
  std::map<std::string, uint64_t> needed;
  for (const auto& model : models) {
    const auto devices = topo::parse_devices(model.devices, &host);
    const size_t count = model.replicas > 0 ? size_t(model.replicas) : devices.size();
    const uint64_t bytes = bytes_of(model.path) / (model.precision == "fp32" ? 1 : 2);
    const auto own = devices_of_flow(model.path, host);
    for (size_t i = 0; i < count; ++i) {
      if (own.empty()) needed[topo::to_text(devices[i % devices.size()])] += bytes;
      for (const auto& device : runner::replica_devices(own, int64_t(i)))
        needed[topo::to_text(device)] += bytes / own.size();
    }
  }
  for (const auto& [name, bytes] : needed) {
    const auto device = topo::parse_devices(name, &host)[0];
    const uint64_t there = device.kind == topo::DeviceKind::Cuda
                               ? host.gpus[size_t(device.index)].free_bytes
                               : host.available_memory_bytes;
    if (there > 0 && bytes > there)
      fail(Kind::Config, "the models on ", name, " have ", bytes_text(bytes),
           " of weights, and it has ", bytes_text(there),
           " left: take fewer replicas, other devices, or precision = \"bf16\"");
  }
}

std::string placement(const serve::PoolView& view) {
  std::ostringstream out;
  char line[256];
  const auto row = [&](const auto&... cells) {
    std::snprintf(line, sizeof(line), "%-16s %7s %-10s %-20s %-5s %6s %10s %11s  %s\n", cells...);
    out << line;
  };
  row("model", "replica", "device", "platform", "bits", "batch", "weights", "difference",
      "ready in");
  for (const auto& model : view.models)
    for (const auto& replica : view.replicas) {
      if (replica.model != model.name || replica.version != model.version || !model.facts) continue;
      const auto& facts = *model.facts;
      const std::string batch = facts.batch == 0 ? "whole" : std::to_string(facts.batch);
      char difference[32] = "-";
      if (facts.difference >= 0)
        std::snprintf(difference, sizeof(difference), "%.2g", facts.difference);
      const std::string name = model.version == "1" ? model.name : model.name + "/" + model.version;
      row(name.c_str(), std::to_string(replica.number).c_str(), replica.device.c_str(),
          facts.platform.c_str(), facts.precision.c_str(), batch.c_str(),
          bytes_text(facts.bytes).c_str(), difference,
          duration_text(Duration(int64_t(facts.load_s * 1e9))).c_str());
    }
  return out.str();
}

constexpr int kSignals[] = {SIGTERM, SIGINT, SIGHUP};  // that end or change a server
pthread_t main_thread;

sigset_t our_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kSignals) sigaddset(&set, signal);
  return set;
}

// Waits for one of them; 0 at the deadline.
int wait_signal(Time deadline) {
  const sigset_t set = our_signals();
  const auto left = std::max(Duration::zero(), deadline - SteadyClock().now()).count();
  const timespec time{.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
  const int signal = ::sigtimedwait(&set, nullptr, &time);
  return signal > 0 ? signal : 0;
}

// They wait for the main thread. A library's thread that has let them in hands them on to it.
void block_signals() {
  const sigset_t set = our_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  main_thread = ::pthread_self();
  struct sigaction action {};
  action.sa_handler = [](int signal) { ::pthread_kill(main_thread, signal); };
  action.sa_flags = SA_RESTART;
  for (const int signal : kSignals) ::sigaction(signal, &action, nullptr);
}

// They are of all tenants: where there are keys they want an admin's, as Prometheus sends it.
std::optional<net::HttpResponse> refuse_metrics(const serve::Service& service,
                                                std::string_view authorization) {
  if (!service.has_keys()) return std::nullopt;  // this host alone asks, or insecure was said
  try {
    const auto key = serve::bearer_key(authorization);
    service.check_admin(service.identify(key, "", /*must_be_tenant=*/false), "/metrics");
    return std::nullopt;
  } catch (const serve::Refused& why) {
    return net::HttpResponse{.status = serve::http_status(why.outcome.status),
                             .body = why.outcome.text + "\n"};
  }
}

std::unique_ptr<serve::Runner> open_model(const serve::ReplicaSpec& spec) {
  return runner::open_runner(spec, [] { return read_visible_host(read_environment()); });
}

// The file is there whole, or is as it was.
void write_file(const fs::path& path, const std::string& text) {
  const auto refuse = [&](const std::string& why) {
    fail(Kind::Io, "cannot write '", path.string(), "': ", why);
  };
  std::error_code failure;
  const auto before = fs::status(path, failure);
  const bool other = fs::exists(before) && !fs::is_regular_file(before);  // as /dev/stdout
  const fs::path to = other ? path : fs::weakly_canonical(path, failure);
  if (to.empty()) refuse(failure.message());
  const fs::path part = other ? path : fs::path(to.string() + ".part");
  errno = 0;
  std::ofstream file(part, std::ios::binary);
  file << text;
  file.close();
  if (!file) refuse(std::strerror(errno));
  if (other) return;
  if (fs::exists(before)) fs::permissions(part, before.permissions(), failure);
  fs::rename(part, to, failure);
  if (failure) refuse(failure.message());
}

// So that one tenant whose requests all wait leaves connections to others.
int64_t most_connections(const serve::Config& config) {
  if (config.serve.max_connections > 0) return config.serve.max_connections;
  int64_t most = 1024;
  for (const auto& tenant : config.tenants) most += tenant.max_queue;
  return config.tenants.empty() ? most + serve::TenantConfig{}.max_queue : most;
}

int serve(const Options& options) {
  if (options.keys) {
    std::cout << serve::describe_keys();
    return 0;
  }
  auto config = read_config(options);
  const auto host = read_visible_host(read_environment());
  for (auto& model : config.models) {
    if (!serve::is_stand_in(model.path) && !fs::exists(model.path))
      fail(Kind::Usage, "model '", model.name, "': there is no '", model.path, "'");
    settle_replicas(model, host);
  }
  check_memory(config.models, host);
  if (options.dry_run) {
    for (const auto& model : config.models) std::cout << serve::to_toml(model);
    return 0;
  }
  block_signals();
  raise_file_limit();
  // Compiled packages unpack themselves below TMPDIR, and check their inputs only when told to.
  Unpacked unpacked(/*watched=*/true);
  ::setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
  const observe::Log log({}, /*rank=*/-1);
  observe::Registry metrics;
  if (config.serve.grpc == serve::ServerConfig{}.grpc && !serve::has_grpc()) {
    config.serve.grpc.clear();
    log.info(
        "gRPC is left out: this program has none; with an address of its own, as "
        "serve.grpc=127.0.0.1:0, it says why");
  }
  const auto& told = config.serve;
  const int cores = std::max(1, host.num_usable_cpus);
  const int threads = told.threads > 0 ? int(told.threads) : std::clamp(cores / 2, 1, 8);
  serve::PoolOptions pool{.slab_bytes = uint64_t(config.serve.slab_mb) << 20,
                          .max_queue_bytes = uint64_t(config.serve.max_queue_mb) << 20,
                          .poison = config.serve.poison,
                          .policy = told.policy,
                          .trace = told.trace.empty() ? 0ul : 100'000ul,
                          .own_thread = threads > 1,  // one alone does both without changing over
                          .start_timeout = Duration(int64_t(config.serve.start_s * 1e9)),
                          .stuck_floor = Duration(int64_t(config.serve.stuck_s * 1e9)),
                          .host = &host};
  if (config.serve.workers == "threads")
    pool.workers.open = open_model;
  else
    pool.workers.command = {"/proc/self/exe", "serve-worker"};
  serve::Service service(config, pool, log, metrics,
                         {.reread = [options] { return read_config(options); },
                          .prepare =
                              [](serve::ModelConfig& model) {
                                const auto now = read_visible_host(read_environment());
                                settle_replicas(model, now);
                                check_memory({model}, now);
                              }});
  // Bound before the models are ready: who asks is told that they are not.
  serve::HttpFront http(
      service, {.address = told.http,
                .threads = told.threads > 0 ? int(told.threads) : std::clamp(cores / 2, 1, 8),
                .max_connections = most_connections(config),
                .max_body_bytes = size_t(told.max_body_mb) << 20,
                .max_held_bytes = size_t(told.max_queue_mb) << 20,
                .idle = Duration(int64_t(told.idle_s * 1e9)),
                .tls_cert = told.tls_cert,
                .tls_key = told.tls_key});
  std::optional<serve::GrpcFront> grpc;
  if (!told.grpc.empty())
    grpc.emplace(service, serve::GrpcOptions{
                              .address = told.grpc,
                              .tls_cert = told.tls_cert.empty() ? "" : read_file(told.tls_cert),
                              .tls_key = told.tls_key.empty() ? "" : read_file(told.tls_key),
                              .max_body_bytes = told.max_body_mb << 20,
                              .max_unread_bytes = size_t(told.max_queue_mb) << 20,
                              .idle = Duration(int64_t(told.idle_s * 1e9))});
  std::optional<net::HttpServer> metrics_server;
  if (!told.metrics.empty())
    metrics_server.emplace(net::Listener(net::parse_address(told.metrics)),
                           std::map<std::string, net::HttpHandler>{
                               {"/metrics", [&](const net::HttpRequest& asked) {
                                  if (auto refused = refuse_metrics(service, asked.authorization))
                                    return *refused;
                                  service.pool().view();  // brings the gauges up to date
                                  std::ostringstream text;
                                  metrics.write_prometheus(text);
                                  return net::HttpResponse{
                                      .content_type = observe::Registry::kContentType,
                                      .body = text.str()};
                                }}});
  const std::string metrics_address = metrics_server ? net::to_text(metrics_server->address()) : "";
  const Time late = SteadyClock().now() + Duration(int64_t(told.start_s * 1e9));
  while (!service.pool().all_loaded()) {
    service.pool().check_loading();
    if (SteadyClock().now() > late)
      fail(Kind::Timeout, "the models were not ready within serve.start_s = ", told.start_s, " s");
    const int signal = wait_signal(SteadyClock().now() + std::chrono::milliseconds(20));
    if (signal != 0 && signal != SIGHUP) return 128 + signal;
  }
  std::cerr << placement(service.pool().view());
  const std::string scheme = told.tls_cert.empty() ? "http" : "https";
  std::cerr << "serving on " << scheme << "://" << http.address();
  if (grpc) std::cerr << ", gRPC on " << grpc->address();
  if (metrics_server) std::cerr << ", metrics on http://" << metrics_address << "/metrics";
  std::cerr << "\n";
  if (!options.port_file.empty())
    write_file(options.port_file, observe::JsonObject({{"http", http.address()},
                                                       {"grpc", grpc ? grpc->address() : ""},
                                                       {"metrics", metrics_address},
                                                       {"pid", int(::getpid())}})
                                          .text() +
                                      "\n");
  int signal = 0;
  while (signal == 0 || signal == SIGHUP) {
    signal = wait_signal(SteadyClock().now() + std::chrono::seconds(60));
    if (signal != SIGHUP) continue;
    try {
      service.reload();
    } catch (const std::exception& error) {
      log.error(cat("the config was not taken: ", error.what()));
    }
  }
  // Not ready, a moment for balancers to see it, no more requests, and then the rest is finished.
  service.begin_drain();
  log.info("ends when all requests are answered; a second signal ends at once",
           {{"drain_s", told.drain_s}});
  const auto at = [](double seconds) {
    return SteadyClock().now() + Duration(int64_t(seconds * 1e9));
  };
  const auto second = [&](Time deadline, const auto& over) {
    while (!over() && SteadyClock().now() < deadline)
      if (const int again = wait_signal(SteadyClock().now() + std::chrono::milliseconds(5));
          again == SIGTERM || again == SIGINT)
        return again;
    return 0;
  };
  // At once means at once: workers end with this process.
  const auto end_at_once = [&](int signal) {
    unpacked.remove();
    ::_exit(128 + signal);
  };
  if (const int again = second(at(told.grace_s), [] { return false; })) end_at_once(again);
  service.pool().stop_accepting();
  const Time deadline = at(told.drain_s);
  if (const int again = second(deadline, [&] { return service.pool().drain({}); }))
    end_at_once(again);
  const bool all = service.pool().drain({});
  auto closing = std::async(std::launch::async, [&] {
    http.shut_down(deadline);
    if (grpc) grpc->shut_down(deadline);
  });
  const auto closed = [&] {
    return closing.wait_for(Duration::zero()) == std::future_status::ready;
  };
  if (const int again = second(Time::max(), closed)) end_at_once(again);
  closing.get();
  if (!told.trace.empty()) write_file(told.trace, service.pool().trace());
  if (!all) log.error("requests were left without an answer when serve.drain_s was over");
  return all ? 0 : 1;
}

void inspect(const Options& options) {
  const std::string& path = options.url;
  const auto facts = runner::inspect(path);
  std::cout << "platform   " << facts.platform << "\n";
  std::cout << "weights    " << bytes_text(facts.bytes) << "\n";
  const auto list = [](const char* what, const std::vector<plan::Port>& ports, bool declared) {
    for (const auto& port : ports)
      std::cout << what << "  "
                << (declared ? port.text() : port.name + " (type and shape unknown)") << "\n";
  };
  list("input    ", facts.inputs, facts.declared);
  list("output   ", facts.outputs, true);
  for (const auto& note : facts.notes) std::cout << "note       " << note << "\n";
  serve::ModelConfig model{.name = name_of(path), .path = path};
  for (const auto& port : facts.inputs)
    model.input.push_back(facts.declared ? port.text() : port.name + ":FP32[-1,3,224,224]");
  for (const auto& port : facts.outputs) model.output.push_back(port.text());
  const std::string file = "model.toml";
  if (fs::exists(file)) {
    std::cerr << "yoke: " << file << " is there already and stays as it is\n";
    return;
  }
  std::string text = serve::to_toml(model);
  if (!facts.declared) text = "# Complete the types and shapes of the inputs.\n" + text;
  if (const size_t at = text.find("\ninput = []"); !facts.declared && at != text.npos)
    text.replace(at, 11,
                 "\n# input = [\"x:FP32[-1,3,224,224]\"]  # of each its name, type and sizes");
  write_file(file, text);
  std::cout << "written    " << file << (facts.declared ? "" : "; complete its input")
            << "; then: yoke serve " << file << "\n";
}

void make_key(const Options& options) {
  const std::string key = serve::new_key();
  const auto show = [&] { std::cout << "key        " << key << "\n"; };
  const std::string digest = serve::sha256(key);
  if (options.words.empty()) {
    show();
    std::cout << "key_sha256 " << digest << "\n";
    std::cerr
        << "yoke: the key is shown this once; put its digest into [[tenant]] key_sha256, or of an "
           "admin into serve.admin_key_sha256\n";
    return;
  }
  const std::string& path = options.words[0];
  if (options.tenant == "admin")
    fail(Kind::Usage, "an admin is no tenant: yoke serve key new admin, without a config, makes a ",
         "key; put its digest into serve.admin_key_sha256");
  std::string text = fs::exists(path) ? read_file(path) : "";
  const auto before = serve::parse_config(text, path);
  if (std::ranges::count(before.tenants, options.tenant, &serve::TenantConfig::name))
    fail(Kind::Usage, "'", path, "' has a tenant '", options.tenant,
         "' already; yoke serve key new ", options.tenant, " makes a key to put there by hand");
  if (!text.empty() && !text.ends_with('\n')) text += "\n";
  text += cat("\n[[tenant]]\nname = ", observe::json_quote(options.tenant), "\nkey_sha256 = \"",
              digest, "\"\n");
  write_file(path, text);
  show();
  std::cerr << "yoke: the key is shown this once; " << path << " has its digest\n";
}

}  // namespace

void add_serve(CLI::App& app) {
  auto* verb = app.add_subcommand("serve", "Replicas of models over REST and gRPC, with tenants");
  auto options = std::make_shared<Options>();
  verb->add_option(
      "MODELS", options->words,
      "Model files (.pt, .pt2), runs, checkpoints, Hugging Face folders or flows; or one "
      "TOML file; then section.key=value on top of it");
  verb->add_option("--input", options->inputs,
                   "What the model takes, as 'x:FP32[-1,3,224,224]'; once for each, with the names "
                   "of its arguments")
      ->allow_extra_args(false);
  verb->add_option("--output", options->outputs, "What it gives; once for each")
      ->allow_extra_args(false);
  verb->add_option("--devices", options->devices, "cpu:2, cuda:0-3, cuda:0x2, auto");
  verb->add_option("--replicas", options->replicas, "How many; 0: one on each device");
  verb->add_option("--batch", options->batch, "Most rows computed at once; 1: each request alone");
  verb->add_option("--port-file", options->port_file,
                   "Gets the addresses as JSON when the server is ready");
  verb->add_flag("--insecure", options->insecure, "Listen beyond this host without keys");
  verb->add_flag("--keys", options->keys, "Print every key of a config, and what it is");
  verb->add_flag("--dry-run", options->dry_run, "Check the config and print the models");
  verb->footer(
      "Model files are programs: serve those alone whose origin you trust.\n"
      "Signals: SIGTERM and SIGINT finish what was accepted and exit 0, a second one ends at "
      "once; SIGHUP reads the tenants again.");
  auto* look = verb->add_subcommand("inspect", "What a model file tells, and a model.toml for it");
  look->add_option("PATH", options->url, "The file or folder")->required();
  look->callback([options] { inspect(*options); });
  auto* key = verb->add_subcommand("key", "Keys of tenants");
  auto* fresh = key->add_subcommand("new", "Make a key; its SHA-256 is all that is stored");
  key->require_subcommand(1);
  fresh->add_option("TENANT", options->tenant, "Whose it is")->required();
  fresh->add_option("CONFIG", options->words, "A config that the tenant is added to")
      ->expected(0, 1);
  fresh->callback([options] { make_key(*options); });
  auto* usage = verb->add_subcommand("usage", "Requests, rows and device seconds of each tenant");
  usage->add_option("URL", options->url, "Of a server, as http://127.0.0.1:8000")->required();
  usage->add_option("--key", options->key, "A tenant's key, or an admin's for all")
      ->envname("YOKE_KEY");
  usage->add_option("--ca", options->ca, kCaHelp);
  usage->add_flag("--json", options->json, "As JSON");
  usage->callback(
      [options] { print_usage(options->url, options->key, options->ca, options->json); });
  verb->require_subcommand(0, 1);
  verb->callback([options, verb] {
    if (!verb->get_subcommands().empty()) return;
    if (const int code = serve(*options)) throw CLI::RuntimeError(code);
  });
  auto* worker = app.add_subcommand("serve-worker")->group("");
  worker->callback([] {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Unpacked unpacked(/*watched=*/false);
    serve::run_worker(net::Descriptor(3), open_model);
    unpacked.remove();
    ::_exit(0);  // taking a GPU apart may hang
  });
}

}  // namespace yoke::cli
