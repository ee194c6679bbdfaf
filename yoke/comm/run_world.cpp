// SPDX-License-Identifier: Apache-2.0
#include "yoke/comm/run_world.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "yoke/base/text.h"
#include "yoke/comm/hub.h"
#include "yoke/comm/nccl/backend.h"
#include "yoke/comm/shm/backend.h"
#include "yoke/comm/side_channel.h"
#include "yoke/net/resolve.h"
#include "yoke/observe/log.h"

namespace yoke::comm {
namespace {

// A port made from a job's id may be taken: then it is one of the next ones.
constexpr int kPortsToTry = 8;
constexpr Duration kPatience = std::chrono::seconds(5);  // then it is told who is waited for

Place this_place() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  // Processes that see each other in /proc can share memory.
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, boot);
  std::array<char, 64> pids{};
  if (::readlink("/proc/self/ns/pid", pids.data(), pids.size() - 1) < 0) pids[0] = '\0';
  return {host.data(), ::getpid(), cat(boot, "/", pids.data())};
}

// The place where the processes meet: found by all, opened by process 0 unless it is there.
struct Meeting {
  std::unique_ptr<Hub> hub = {};
  HubFinder finder = {};
};

std::vector<net::Address> candidates(const topo::LaunchInfo& launch) {
  std::vector<net::Address> result;
  for (int i = 0; i < (launch.port_from_job ? kPortsToTry : 1); ++i)
    result.push_back({launch.address, uint16_t(*launch.port + i)});
  return result;
}

std::unique_ptr<Hub> open_hub(const std::vector<net::Address>& at, const HubOptions& options) {
  for (const auto& address : at) try {
      return std::make_unique<Hub>(address, options);
    } catch (const Error& error) {
      if (&address == &at.back())
        fail(Kind::Comm, "the processes cannot meet: ", error.what(),
             "; set YOKE_PORT to a free port on the first host");
    }
  return nullptr;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

Meeting arrange(const topo::LaunchInfo& launch, const HubOptions& hub_options,
                const BackendFactory& backend) {
  const bool first = launch.rank == 0;
  auto always = [](std::vector<net::Address> addresses) {
    return [addresses = std::move(addresses)] { return addresses; };
  };
  if (!launch.hub.empty())
    return {nullptr, {always({net::parse_address(launch.hub)}), /*with_process_0=*/false}};
  if (launch.store_is_running) {
    // torchrun's own store, on the host of process 0, says where.
    const auto store =
        connect_tcp_store(launch.address, uint16_t(launch.port.value_or(0)), hub_options.timeout);
    const std::string key = cat("yoke/hub/", launch.restart_count);
    if (first) {
      auto hub = open_hub({{"", 0}}, hub_options);
      store->set(key, std::to_string(hub->address().port));
      const net::Address mine{"127.0.0.1", hub->address().port};
      return {std::move(hub), {always({mine})}};
    }
    // Asked anew each time: a former round of the job may have left its own word there.
    return {nullptr, {[=, host = launch.address, timeout = hub_options.timeout] {
              const auto port = parse_int(store->get(key, timeout));
              return std::vector<net::Address>{{host, uint16_t(port.value_or(0))}};
            }}};
  }
  if (launch.address.empty()) {
    if (!backend.share)
      fail(Kind::Usage, "no address of process 0 (", to_string(launch.launcher),
           " does not tell): set YOKE_ADDRESS and YOKE_PORT, the same for all, or "
           "use the mpi backend");
    auto hub = first ? open_hub({{"", 0}}, hub_options) : nullptr;
    const std::string text =
        backend.share(hub ? join(net::own_hosts(), " ") + cat(" ", hub->address().port) : "");
    auto words = split(text, ' ');
    const auto port = uint16_t(parse_int(words.back()).value_or(0));
    words.pop_back();
    std::vector<net::Address> addresses;
    for (const auto& host : words) addresses.push_back({host, port});
    return {std::move(hub), {always(addresses)}};
  }
  if (!launch.port)
    fail(Kind::Usage, to_string(launch.launcher), " names the host ", launch.address,
         " but no port to meet at: set YOKE_PORT, the same for all processes");
  auto addresses = candidates(launch);
  if (!first) return {nullptr, {always(addresses)}};
  auto listen = addresses;
  if (!is_loopback(launch.address))
    for (auto& address : listen) address.host = "";  // every interface
  auto hub = open_hub(listen, hub_options);
  const net::Address mine{"127.0.0.1", hub->address().port};
  return {std::move(hub), {always({mine})}};
}

BackendFactory choose_backend(const World& world, const RunOptions& run) {
  if (run.backend) return run.backend;
  if (!run.devices.empty() && run.devices[0].kind == topo::DeviceKind::Cuda) return nccl_backend();
  for (int rank = 0; rank < world.size(); ++rank)
    if (world.place(rank).machine != world.place(0).machine)
      fail(Kind::Usage, "CPU ranks on several hosts (", world.place(0).host, ", ",
           world.place(rank).host,
           ") need the mpi backend: link yoke::comm_mpi and choose mpi_backend()");
  return shm_backend();
}

}  // namespace

void run_world(const topo::LaunchInfo& launch, const std::function<void(Communicator&)>& run,
               const JoinOptions& options) {
  const int ranks = options.run.devices.empty() ? options.ranks : int(options.run.devices.size());
  if (launch.world_size == 1 && launch.hub.empty()) return run_ranks(ranks, run, options.run);

  Meeting meeting = arrange(
      launch,
      {.num_processes = launch.world_size, .job = launch.job_id, .timeout = options.meet_timeout},
      options.run.backend);
  meeting.finder.cancelled = [&, start = SteadyClock().now(), told = false]() mutable {
    if (!told && SteadyClock().now() - start > kPatience) {
      told = true;
      observe::Log({}, launch.rank)
          .warning(
              "still on the way to process 0",
              {{"at", cat(launch.address, ":", launch.port.value_or(0))},
               {"gives_up_after_s",
                std::chrono::duration_cast<std::chrono::seconds>(options.meet_timeout).count()}});
    }
    return options.stop != nullptr && options.stop->pending() != 0;
  };
  const Hello hello{.process = launch.rank,
                    .num_processes = launch.world_size,
                    .num_ranks = ranks,
                    .place = this_place(),
                    .job = launch.job_id};
  // Process 0 keeps the meeting place open for as long as others are there, also when it fails.
  struct Farewell {
    Hub* hub;
    ~Farewell() {
      if (hub != nullptr) hub->wait_until_all_left();
    }
  } const farewell{meeting.hub.get()};
  const auto channel = SideChannel::join(meeting.finder, hello, options.meet_timeout);
  const auto world = std::make_shared<World>(channel->membership(), options.run.world);
  channel->attach(*world);
  struct Parting {
    SideChannel& channel;
    ~Parting() { channel.close(); }
  } const parting{*channel};
  RunOptions run_options = options.run;
  try {
    run_options.backend = choose_backend(*world, options.run);
  } catch (const Error& error) {
    world->fail(world->first_here(), error.kind(), error.what());
    throw;
  }
  detail::run_here(world, run, run_options);
}

}  // namespace yoke::comm
