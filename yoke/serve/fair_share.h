// SPDX-License-Identifier: Apache-2.0
// Whose turn it is when a device of a pool can take work. Tenants own shares of the pool's device
// time, whatever models they use. Who is below its guarantee comes first, in the order of
// start-time fair queueing (Goyal et al., 1996); then who borrows what others leave, by weight.
// What a piece of work will cost is charged when it starts and set right when it ends: charged at
// the end alone, one tenant would fill every device that falls free meanwhile.
// What is not lent stays idle as whole devices; of a part of one, borrowers leave that much time.
//   const auto turn = share.pick(now, waiting, idle);   // then form its batch
//   share.start(*turn, predicted);
//   share.finish(*turn, measured, now);                 // or 0 for what was lost
// Threads: one at a time.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "yoke/base/clock.h"

namespace yoke::serve {

struct Share {
  double guaranteed = 0;  // part of the pool that it has whenever it wants it
  double ceiling = 1;     // part that it never has more of
  double weight = 1;      // among those who borrow
  double lendable = 1;    // part of its guarantee that others may use while it does not
  Duration burst = std::chrono::milliseconds(100);  // of the whole pool, saved up below a limit
};
// Throws Kind::Config where numbers are out of range, or guarantees are more than the pool.
void check_shares(const std::vector<std::pair<std::string, Share>>& tenants);

class FairShare {
 public:
  explicit FairShare(int devices) : num_devices_(devices) {}
  void set_devices(int devices) { num_devices_ = devices; }
  int add(const Share& share, Time now);  // its number
  void change(int tenant, const Share& share) { tenants_[size_t(tenant)].share = share; }

  struct Turn {
    int tenant = 0;
    bool borrows = false;
    Duration charged = {};
    double weight = 1;   // by which it was charged
    bool joins = false;  // other work of its tenant, on the same device: together they have one
  };
  // Of the tenants that wait, with `idle` devices, one or more. None: all are at their ceilings, or
  // what is idle is kept for others; then retry_at() tells when to ask again.
  std::optional<Turn> pick(Time now, const std::vector<int>& waiting, int idle);
  Time retry_at(Time now, const std::vector<int>& waiting) const;
  void start(Turn& turn, Duration predicted);
  void finish(const Turn& turn, Duration measured);

  // For those who look on: device time so far, and how much of it was borrowed.
  Duration used(int tenant) const { return tenants_[size_t(tenant)].used; }
  Duration borrowed(int tenant) const { return tenants_[size_t(tenant)].borrowed; }

 private:
  struct Tenant {
    Share share = {};
    double owed = 0;     // seconds of device time that its guarantee has left; below 0: it borrowed
    double allowed = 0;  // likewise of its ceiling
    double own_tag = 0, borrow_tag = 0;  // where its next piece of work would start in virtual time
    int running = 0;                     // devices that it has within its guarantee
    Time since = {};                     // owed and allowed are as of then
    Duration used = {}, borrowed = {};
  };
  void fill(Tenant& tenant, Time now) const;
  double rate(double part) const { return part * num_devices_; }
  double most(const Tenant& tenant) const;
  double not_lent() const;
  double kept_back() const;

  int num_devices_;
  std::vector<Tenant> tenants_;
  double own_time_ = 0, borrow_time_ = 0;  // virtual
  // Seconds of device time left to all who borrow, as of then; it starts full.
  double lent_ = std::numeric_limits<double>::infinity();
  Time lent_since_ = {};
};

}  // namespace yoke::serve
