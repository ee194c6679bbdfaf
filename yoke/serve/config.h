// SPDX-License-Identifier: Apache-2.0
// What is served, to whom, and where: the config of `yoke serve`.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "yoke/serve/fair_share.h"

namespace yoke::serve {

struct ServerConfig {
  std::string http = "127.0.0.1:8000", grpc = "127.0.0.1:8001", metrics = "127.0.0.1:8002";
  std::string workers = "processes";
  double drain_s = 30, grace_s = 0;
  double start_s = 120;         // for a worker to be ready
  double stuck_s = 10;          // that a batch may take at least
  int64_t threads = 0;          // that read and answer HTTP; 0: as the cores are
  int64_t max_connections = 0;  // 0: what all tenants may have waiting, and 1024 more
  int64_t max_body_mb = 256, slab_mb = 1024;
  int64_t max_queue_mb = 1024;  // of what one tenant has waiting
  double idle_s = 60;           // for a client to say something
  std::string tls_cert = {}, tls_key = {};
  bool trust_tenant_header = false;
  std::vector<std::string> admin_key_sha256 = {};
  std::vector<std::string> models = {};  // folders that models may be loaded from at run time
  std::string access_log = {};           // a file, - for stderr, empty for none
  std::string trace = {};                // a file that gets the last batches at the end
  std::string policy = "fair";           // others are for comparison
  bool poison = false;                   // overwrite slabs that are free (for tests)
  bool insecure = false;                 // others than this host may come without keys
};

struct ModelConfig {
  std::string name = {}, path = {};
  std::string version = "1";
  std::string devices = "auto";
  int64_t replicas = 0;  // 0: one on each device
  int64_t batch = 0;     // 0: 32, or what the file allows; 1: each request alone
  std::string precision = "fp32";
  std::vector<std::string> input = {}, output = {};
  bool stateful = false;
  double sequence_idle_s = 60;  // until a sequence that nobody ends is forgotten; 0: never
  std::string tokenizer = {};
  bool record = true;
};

struct TenantConfig {
  std::string name = {};
  std::string key_sha256 = {};
  double guaranteed = 0, ceiling = 1, weight = 1, lendable = 1, burst = 0.1;
  int64_t max_queue = 1024;
  bool exclusive_batch = false;
  std::string devices = {};  // of its own
  Share share() const;
};

struct Config {
  ServerConfig serve = {};
  std::vector<ModelConfig> models = {};
  std::vector<TenantConfig> tenants = {};
};

// Throws Kind::Config. Paths of models are relative to `where`'s folder.
Config parse_config(const std::string& text, const std::filesystem::path& where,
                    const std::vector<std::string>& overrides = {});
// Throws Kind::Config for what does not go together: names, shares, addresses and keys.
void check(const Config& config);
bool is_loopback(const std::string& host);  // a name or number that no other host can have
bool is_local(const std::string& address);  // reached from this host alone
std::string describe_keys();
std::string to_toml(const ModelConfig& model);  // a section, to be completed

}  // namespace yoke::serve
