// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/bench_server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/base/process.h"
#include "yoke/base/text.h"
#include "yoke/serve/load.h"

namespace yoke::cli {
namespace {

namespace fs = std::filesystem;

constexpr auto kPoll = std::chrono::milliseconds(5);
constexpr const char* kAdmin = "Authorization: Bearer bench\r\n";
constexpr const char* kAdminDigest =
    "1b32c28cb38c05480eccc1bd60ff97029b57a05c96718b96dad7e9d84894f549";

Time now() { return SteadyClock().now(); }

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Process {
  pid_t parent = 0;
  double cpu_seconds = 0;
};

std::map<pid_t, Process> all_processes() {
  std::map<pid_t, Process> found;
  const double tick = 1.0 / double(::sysconf(_SC_CLK_TCK));
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const auto pid = parse_int(entry.path().filename().string());
    if (!pid) continue;
    const std::string text = read_file(entry.path() / "stat");
    const size_t name = text.rfind(')');  // a name may have anything in it
    if (name == text.npos) continue;
    std::istringstream rest(text.substr(name + 1));
    std::string word;
    std::vector<std::string> words;
    while (words.size() < 13 && rest >> word) words.push_back(word);
    if (words.size() < 13) continue;
    found[pid_t(*pid)] = {pid_t(std::stol(words[1])),
                          (std::stod(words[11]) + std::stod(words[12])) * tick};
  }
  return found;
}

}  // namespace

std::string own_program() { return "/proc/self/exe"; }

BenchServer::BenchServer(std::vector<std::string> command, Duration patience) {
  const fs::path port_file = scratch_.path() / "ports", log = scratch_.path() / "log";
  command.insert(command.end(), {"--port-file", port_file.string()});
  auto arguments = c_strings(command);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) fail(Kind::Io, "cannot start ", command[0], ": ", std::strerror(errno));
  if (pid_ == 0) {  // only what is safe between fork and exec
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);  // a benchmark that is killed leaves no servers
    const int in = ::open("/dev/null", O_RDONLY);
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (::getppid() != parent || ::dup2(in, 0) < 0 || ::dup2(out, 1) < 0 || ::dup2(out, 2) < 0)
      ::_exit(127);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::setpgid(pid_, pid_);  // whoever comes first
  const Time deadline = now() + patience;
  while (true) {
    const std::string text = read_file(port_file);
    if (text.ends_with('\n')) {
      const auto ports = nlohmann::json::parse(text);
      for (const auto& [protocol, address] : ports.items())
        if (address.is_string() && !address.get<std::string>().empty())
          addresses_[protocol] = net::parse_address(address.get<std::string>());
      return;
    }
    const bool ended = wait(kPoll).has_value();
    if (!ended && now() < deadline) continue;
    const std::string words = last_words();
    if (!ended) ::kill(-pid_, SIGKILL), wait(std::chrono::seconds(10));
    fail(ended ? Kind::Io : Kind::Timeout, join(command, " "),
         ended ? cat(" ended with ", *exit_code_) : " was not ready in time", ": ", words);
  }
}

BenchServer::~BenchServer() {
  if (!exit_code_) {
    resume();
    ::kill(pid_, SIGTERM);
    wait(std::chrono::seconds(5));
  }
  ::kill(-pid_, SIGKILL);  // what it left
  wait(std::chrono::seconds(10));
}

const net::Address& BenchServer::address(const std::string& protocol) const {
  const auto found = addresses_.find(protocol);
  if (found == addresses_.end()) fail(Kind::Usage, "this server does not speak ", protocol);
  return found->second;
}

double BenchServer::cpu_seconds() const {
  const auto processes = all_processes();
  double sum = 0;
  for (const auto& [pid, process] : processes)
    for (pid_t up = pid; up > 1 && processes.contains(up); up = processes.at(up).parent)
      if (up == pid_) {
        sum += process.cpu_seconds;
        break;
      }
  return sum;
}

void BenchServer::signal(int number) const {
  if (!exit_code_) ::kill(pid_, number);
}

void BenchServer::pause() const {
  if (!exit_code_) ::kill(-pid_, SIGSTOP);
}
void BenchServer::resume() const {
  if (!exit_code_) ::kill(-pid_, SIGCONT);
}

std::optional<int> BenchServer::wait(Duration patience) {
  const Time deadline = now() + patience;
  while (!exit_code_) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_)
      exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    else if (now() >= deadline)
      break;
    else
      std::this_thread::sleep_for(std::min<Duration>(kPoll, patience));
  }
  return exit_code_;
}

std::string BenchServer::last_words() const {
  const std::string text = read_file(scratch_.path() / "log");
  return text.substr(text.size() > 2000 ? text.size() - 2000 : 0);
}

YokeServer::YokeServer(const std::string& models_and_tenants, const std::string& serve_keys) {
  const fs::path config = scratch_.path() / "serve.toml";
  std::ofstream(config) << "[serve]\nhttp = \"127.0.0.1:0\"\ngrpc = \""
                        << (serve_keys.find("grpc =") == serve_keys.npos ? "127.0.0.1:0" : "")
                        << "\"\nmetrics = \"127.0.0.1:0\"\naccess_log = \"\"\n"
                        << "max_connections = 4096\ntrust_tenant_header = true\n"
                        << "admin_key_sha256 = [\"" << kAdminDigest << "\"]\n"
                        << serve_keys << models_and_tenants;
  server_.emplace(std::vector<std::string>{own_program(), "serve", config.string()});
}

std::string YokeServer::get(const std::string& path) const {
  return serve::get(server_->http(), path, kAdmin);
}

std::map<std::string, double> YokeServer::device_seconds() const {
  const std::string text = serve::get(server_->address("metrics"), "/metrics", kAdmin);
  std::map<std::string, double> found;
  for (const auto& line : split(text, '\n')) {
    const size_t begin = line.find("tenant=\""), end = line.find('"', begin + 8);
    if (line.starts_with("yoke_tenant_device_seconds_total{") && begin != line.npos)
      found[line.substr(begin + 8, end - begin - 8)] = std::stod(line.substr(line.rfind(' ')));
  }
  return found;
}

std::vector<pid_t> YokeServer::worker_pids() const {
  const auto view = nlohmann::json::parse(get("/v2/yoke/view"));
  std::vector<pid_t> pids;
  for (const auto& replica : view.at("replicas"))
    if (const auto pid = replica.at("pid").get<pid_t>(); pid > 0) pids.push_back(pid);
  return pids;
}

std::string stand_in_model(const std::string& name, const std::string& how, int replicas,
                           int batch) {
  return cat("\n[[model]]\nname = \"", name, "\"\npath = \"stand-in:", how,
             "\"\ndevices = \"cpu:", replicas, "\"\nreplicas = ", replicas, "\nbatch = ", batch,
             "\n");
}

}  // namespace yoke::cli
