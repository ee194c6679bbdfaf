// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/config.h"

#include <arpa/inet.h>

#include <algorithm>
#include <set>

#include "yoke/base/error.h"
#include "yoke/config/keys.h"
#include "yoke/net/address.h"
#include "yoke/plan/port.h"

namespace yoke::serve {
namespace {

using config::Fields;

Fields server_fields(ServerConfig& serve) {
  Fields fields{
      {"serve", "http", &serve.http, "address of REST; port 0: a free one"},
      {"serve", "grpc", &serve.grpc, "address of gRPC; empty: none"},
      {"serve", "metrics", &serve.metrics, "address of the metrics; empty: none"},
      {"serve", "workers", &serve.workers, "what replicas are", "processes threads"},
      {"serve", "drain_s", &serve.drain_s, "seconds that requests have to finish at the end", 0},
      {"serve", "grace_s", &serve.grace_s,
       "seconds between saying not ready and taking no more requests", 0},
      {"serve", "start_s", &serve.start_s, "seconds that a replica has to be ready", 0},
      {"serve", "stuck_s", &serve.stuck_s,
       "seconds; a batch that takes longer, and 4 x as long as any lately, is stuck", 0},
      {"serve", "threads", &serve.threads, "that read and answer; 0: as the cores are", 0},
      {"serve", "max_connections", &serve.max_connections,
       "of clients at once over HTTP; 0: as many as tenants may have requests, and 1024", 0},
      {"serve", "max_body_mb", &serve.max_body_mb, "MiB of one request", 1},
      {"serve", "max_queue_mb", &serve.max_queue_mb,
       "MiB of requests that a tenant may have waiting; one alone may have more", 1},
      {"serve", "slab_mb", &serve.slab_mb, "MiB that a batch and its outputs may take", 1},
      {"serve", "idle_s", &serve.idle_s, "seconds a client may be silent within a request", 0},
      {"serve", "tls_cert", &serve.tls_cert, "PEM file of certificates; empty: no TLS"},
      {"serve", "tls_key", &serve.tls_key, "PEM file of the key"},
      {"serve", "trust_tenant_header", &serve.trust_tenant_header,
       "a header yoke-tenant says whose a request is, where it has no key"},
      {"serve", "admin_key_sha256", &serve.admin_key_sha256,
       "of keys that may change what is served"},
      {"serve", "models", &serve.models, "folders that models may be loaded from at run time"},
      {"serve", "access_log", &serve.access_log, "a file, - for stderr; empty: none"},
      {"serve", "trace", &serve.trace,
       "a file that gets the times of the last batches at the end, for yoke trace; empty: none"},
      {"serve", "policy", &serve.policy, "whose turn it is; all but fair are for comparison",
       "fair fifo priority round_robin"},
      {"serve", "poison", &serve.poison, "overwrite memory that is free; for tests"},
      {"serve", "insecure", &serve.insecure, "listen beyond this host without keys"},
  };
  return fields;
}

Fields model_fields(ModelConfig& model) {
  return {
      {"model", "name", &model.name, "what clients call it; empty: from the path"},
      {"model", "path", &model.path, "a .pt, .pt2, run, checkpoint or Hugging Face folder"},
      {"model", "version", &model.version, "a number"},
      {"model", "devices", &model.devices, "auto, cpu:2, cuda:0-3, cuda:0x2"},
      {"model", "replicas", &model.replicas, "how many; 0: one on each device", 0},
      {"model", "batch", &model.batch, "most rows computed at once; 0: 32; 1: each request alone",
       0},
      {"model", "precision", &model.precision, "of the computation", "fp32 bf16 fp16"},
      {"model", "input", &model.input, "what it takes, as \"x:FP32[-1,3,224,224]\""},
      {"model", "output", &model.output, "what it gives"},
      {"model", "stateful", &model.stateful, "an instance for each sequence_id"},
      {"model", "sequence_idle_s", &model.sequence_idle_s,
       "seconds without a request after which a sequence is forgotten; 0: never", 0},
      {"model", "tokenizer", &model.tokenizer,
       "of a model of words: a tokenizer.json, a .model, bytes; empty: its own"},
      {"model", "record", &model.record,
       "on a GPU, send the kernels of a batch as one, recorded at the start where that can be"},
  };
}

Fields tenant_fields(TenantConfig& tenant) {
  return {
      {"tenant", "name", &tenant.name, "who it is"},
      {"tenant", "key_sha256", &tenant.key_sha256, "of its key: see yoke serve key new"},
      {"tenant", "guaranteed", &tenant.guaranteed, "part of the devices' time it always has", 0},
      {"tenant", "ceiling", &tenant.ceiling, "part it never has more of", 0},
      {"tenant", "weight", &tenant.weight, "among those who take what others leave", 0},
      {"tenant", "lendable", &tenant.lendable, "part of its guarantee that others may use", 0},
      {"tenant", "burst", &tenant.burst, "seconds of unused share that are kept", 0},
      {"tenant", "max_queue", &tenant.max_queue, "requests that it may have waiting", 1},
      {"tenant", "exclusive_batch", &tenant.exclusive_batch, "its rows meet nobody else's"},
      {"tenant", "devices", &tenant.devices, "for it alone; empty: it shares those of all"},
  };
}

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == text.npos;
}

}  // namespace

Share TenantConfig::share() const {
  return {.guaranteed = guaranteed,
          .ceiling = ceiling,
          .weight = weight,
          .lendable = lendable,
          .burst = Duration(int64_t(burst * 1e9))};
}

Config parse_config(const std::string& text, const std::filesystem::path& where,
                    const std::vector<std::string>& overrides) {
  Config config;
  auto fields = server_fields(config.serve);
  for (auto& field : fields) field.from = where.string() + ": ";
  const auto of = [](auto& list, auto make) {
    return std::pair([&list](size_t count) { list.resize(count); },
                     [&list, make](size_t i) { return make(list[i]); });
  };
  const auto models = of(config.models, model_fields);
  const auto tenants = of(config.tenants, tenant_fields);
  config::read_toml(
      fields, text, where.string(),
      {{"model", models.first, models.second}, {"tenant", tenants.first, tenants.second}});
  for (const auto& word : overrides) config::read_override(fields, word);
  config::check(fields);
  for (auto& model : config.models)
    if (!model.path.empty() && model.path.find(':') == model.path.npos)
      model.path = (where.parent_path() / model.path).lexically_normal().string();
  return config;
}

void check(const Config& config) {
  const auto& serve = config.serve;
  std::set<std::string> names;
  for (auto model : config.models) {
    config::check(model_fields(model));
    if (model.path.empty())
      fail(Kind::Config, "model '", model.name, "' has no path; say path = \"model.pt\"");
    if (!names.insert(model.name + "/" + model.version).second)
      fail(Kind::Config, "there are two models '", model.name, "' of version ", model.version,
           "; give them names or versions of their own");
    if (model.name.empty() || model.name.find('/') != model.name.npos)
      fail(Kind::Config, "'", model.name, "' is no name for a model: it has no slash");
    if (model.version.empty() || model.version.find_first_not_of("0123456789") != std::string::npos)
      fail(Kind::Config, "model '", model.name, "': version is a number, got '", model.version,
           "'");
    for (const auto* ports : {&model.input, &model.output})
      for (const auto& text : *ports) plan::parse_port(text);
  }
  std::vector<std::pair<std::string, Share>> shares;
  names.clear();
  for (const auto& tenant : config.tenants) {
    if (tenant.name.empty()) fail(Kind::Config, "a tenant has no name");
    if (!names.insert(tenant.name).second)
      fail(Kind::Config, "there are two tenants '", tenant.name, "'");
    if (!tenant.key_sha256.empty() && !is_digest(tenant.key_sha256))
      fail(Kind::Config, "tenant '", tenant.name, "': key_sha256 is 64 digits 0-9 a-f, got '",
           tenant.key_sha256, "'; yoke serve key new ", tenant.name, " makes one");
    if (tenant.devices.empty()) shares.emplace_back(tenant.name, tenant.share());
  }
  check_shares(shares);
  for (const auto& digest : serve.admin_key_sha256)
    if (!is_digest(digest))
      fail(Kind::Config, "serve.admin_key_sha256: wanted 64 digits 0-9 a-f, got '", digest, "'");
  if (serve.tls_cert.empty() != serve.tls_key.empty())
    fail(Kind::Config, "serve.tls_cert and serve.tls_key go together");
  const bool keys =  // that are asked for
      !serve.trust_tenant_header && std::ranges::any_of(config.tenants, [](const auto& tenant) {
        return !tenant.key_sha256.empty();
      });
  for (const auto* address : {&serve.http, &serve.grpc, &serve.metrics})
    if (!address->empty() && !is_local(*address) && !keys && !serve.insecure)
      fail(Kind::Config, "'", *address, "' is reached from other hosts, and ",
           serve.trust_tenant_header ? "with serve.trust_tenant_header whoever asks says whose the "
                                       "request is: leave that out"
                                     : "no tenant has a key: make one by yoke serve key new",
           ", or say --insecure");
}

bool is_loopback(const std::string& host) {
  in_addr number{};
  if (::inet_pton(AF_INET, host.c_str(), &number) == 1) return ntohl(number.s_addr) >> 24 == 127;
  return host == "::1" || host == "localhost";
}

bool is_local(const std::string& address) { return is_loopback(net::parse_address(address).host); }

std::string describe_keys() {
  Config usual;
  ModelConfig model;
  TenantConfig tenant;
  return config::describe(server_fields(usual.serve)) + config::describe(model_fields(model)) +
         config::describe(tenant_fields(tenant));
}

std::string to_toml(const ModelConfig& model) {
  ModelConfig copy = model;
  return "[" + config::to_toml(model_fields(copy)).replace(0, 8, "[model]]\n");
}

}  // namespace yoke::serve
