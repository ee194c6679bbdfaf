// SPDX-License-Identifier: Apache-2.0
#include "yoke/cli/flight_watch.h"

#include <csignal>
#include <ctime>
#include <iostream>

namespace yoke::cli {
namespace {

sigset_t user_signal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  return set;
}

}  // namespace

void FlightWatch::block_signal() {
  const sigset_t set = user_signal();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

FlightWatch::FlightWatch() : listener_([this](const std::stop_token& stop) { listen(stop); }) {}

std::function<void(std::shared_ptr<comm::World>)> FlightWatch::on_world() {
  return [this](std::shared_ptr<comm::World> world) {
    MutexLock lock(mutex_);
    world_ = std::move(world);
  };
}

void FlightWatch::dump() const {
  std::shared_ptr<comm::World> world;
  {
    MutexLock lock(mutex_);
    world = world_;
  }
  if (world) world->flights().dump(std::cerr);
}

void FlightWatch::listen(const std::stop_token& stop) const {
  const sigset_t set = user_signal();
  const timespec pause{.tv_sec = 0, .tv_nsec = 100'000'000};
  while (!stop.stop_requested())
    if (sigtimedwait(&set, nullptr, &pause) == SIGUSR2) dump();
}

}  // namespace yoke::cli
