// SPDX-License-Identifier: Apache-2.0
// Servers in other processes, for `yoke bench serve`: our own, the echo, the peers. Each writes its
// addresses to a file when it is ready. Owns: the process and all it started, which end with this.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/cli/scratch.h"
#include "yoke/net/address.h"

namespace yoke::cli {

// This program, also where it has been built anew meanwhile.
std::string own_program();

class BenchServer {
 public:
  // `--port-file FILE` is put after the command. Throws Kind::Io with the server's last words where
  // it ends or is not ready in time.
  explicit BenchServer(std::vector<std::string> command,
                       Duration patience = std::chrono::seconds(90));
  ~BenchServer();
  BenchServer(const BenchServer&) = delete;
  BenchServer& operator=(const BenchServer&) = delete;

  bool has(const std::string& protocol) const { return addresses_.contains(protocol); }
  const net::Address& http() const { return address("http"); }
  const net::Address& address(const std::string& protocol) const;
  pid_t pid() const { return pid_; }
  // Processor time of it and of all it started that still runs.
  double cpu_seconds() const;
  void signal(int number) const;
  // Stops it and all it started, so that it takes no time from others, until it is resumed.
  void pause() const;
  void resume() const;
  std::optional<int> wait(Duration patience);  // for its end: the exit code, 128+n after signal n
  std::string last_words() const;

 private:
  const Scratch scratch_;
  pid_t pid_ = 0;
  std::optional<int> exit_code_;
  std::map<std::string, net::Address> addresses_;
};

// `yoke serve` with this config, to which addresses and the rest that benchmarks need are added.
class YokeServer {
 public:
  explicit YokeServer(const std::string& models_and_tenants, const std::string& serve_keys = {});
  BenchServer* operator->() { return &*server_; }
  BenchServer& operator*() { return *server_; }
  std::string get(const std::string& path) const;  // as an admin
  // Device seconds so far, by tenant.
  std::map<std::string, double> device_seconds() const;
  std::vector<pid_t> worker_pids() const;  // of the replicas that are ready

 private:
  const Scratch scratch_;
  std::optional<BenchServer> server_;
};

// A [[model]] of sleeping replicas.
std::string stand_in_model(const std::string& name, const std::string& how, int replicas,
                           int batch = 1);

}  // namespace yoke::cli
