// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/fair_share.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "yoke/base/error.h"

namespace yoke::serve {
namespace {

constexpr double kLentBurst = 0.1;  // seconds of each device that borrowers may have saved up

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

bool is_whole(double devices) { return std::abs(devices - std::round(devices)) < 1e-9; }

}  // namespace

void check_shares(const std::vector<std::pair<std::string, Share>>& tenants) {
  double sum = 0;
  for (const auto& [name, share] : tenants) {
    const auto is_part = [](double value) { return value >= 0 && value <= 1; };
    if (!is_part(share.guaranteed) || !is_part(share.lendable) ||
        !(share.ceiling > 0 && share.ceiling <= 1) || !(share.weight > 0) ||
        share.guaranteed > share.ceiling || share.burst <= Duration::zero())
      fail(Kind::Config, "tenant '", name,
           "': guaranteed and lendable are 0 to 1, ceiling above 0 to 1 and not below guaranteed, "
           "weight and burst above 0; got ",
           share.guaranteed, ", ", share.lendable, ", ", share.ceiling, ", ", share.weight);
    sum += share.guaranteed;
  }
  if (sum > 1 + 1e-9)
    fail(Kind::Config, "the tenants are guaranteed ", sum, " of the pool, which is more than 1");
}

double FairShare::most(const Tenant& tenant) const {
  return seconds(tenant.share.burst) * num_devices_;
}

void FairShare::fill(Tenant& tenant, Time now) const {
  const double passed = seconds(now - tenant.since);
  const double most = this->most(tenant);
  tenant.owed = std::min(most, tenant.owed + passed * rate(tenant.share.guaranteed));
  tenant.allowed = std::min(most, tenant.allowed + passed * rate(tenant.share.ceiling));
  tenant.since = now;
}

int FairShare::add(const Share& share, Time now) {
  tenants_.push_back({.share = share, .since = now});
  auto& tenant = tenants_.back();
  tenant.owed = tenant.allowed = most(tenant);
  return int(tenants_.size()) - 1;
}

// Of tenants that do not lend all of what they leave, in devices.
double FairShare::not_lent() const {
  double sum = 0;
  for (const auto& tenant : tenants_)
    sum += rate(tenant.share.guaranteed) * (1 - tenant.share.lendable);
  return sum;
}

// What of that must stay idle now: others compute.
double FairShare::kept_back() const {
  double sum = 0;
  for (const auto& tenant : tenants_)
    sum +=
        std::max(0.0, rate(tenant.share.guaranteed) * (1 - tenant.share.lendable) - tenant.running);
  return is_whole(not_lent()) ? sum : std::floor(sum + 1e-9);
}

std::optional<FairShare::Turn> FairShare::pick(Time now, const std::vector<int>& waiting,
                                               int idle) {
  for (auto& tenant : tenants_) fill(tenant, now);
  const double kept = not_lent();
  lent_ = std::min(kLentBurst * num_devices_,
                   lent_ + seconds(now - lent_since_) * (num_devices_ - kept));
  lent_since_ = now;
  const auto first_of = [&](bool borrows) {
    std::optional<int> best;
    double least = 0;
    for (const int number : waiting) {
      const auto& tenant = tenants_[size_t(number)];
      const bool limited = tenant.share.ceiling < 1 && tenant.allowed <= 0;
      if (limited || (!borrows && (tenant.owed <= 0 || tenant.share.guaranteed == 0))) continue;
      const double tag =
          borrows ? std::max(borrow_time_, tenant.borrow_tag) : std::max(own_time_, tenant.own_tag);
      if (!best || tag < least) {
        best = number;
        least = tag;
      }
    }
    return best;
  };
  if (const auto own = first_of(false)) return Turn{*own, false};
  if (double(idle) - 1 < kept_back() - 1e-9) return std::nullopt;
  if (!is_whole(kept) && lent_ <= 0) return std::nullopt;
  if (const auto borrower = first_of(true)) return Turn{*borrower, true};
  return std::nullopt;
}

Time FairShare::retry_at(Time now, const std::vector<int>& waiting) const {
  double soonest = 1;  // seconds
  const double kept = not_lent();
  if (!is_whole(kept) && lent_ <= 0) soonest = std::min(1.0, -lent_ / (num_devices_ - kept) + 1e-6);
  for (const int number : waiting) {
    const auto& tenant = tenants_[size_t(number)];
    const auto until = [&](double tokens, double part) {
      if (part > 0 && tokens <= 0) soonest = std::min(soonest, -tokens / rate(part) + 1e-6);
    };
    until(tenant.allowed, tenant.share.ceiling);
    until(tenant.owed, tenant.share.guaranteed);
  }
  return now + Duration(int64_t(soonest * 1e9));
}

void FairShare::start(Turn& turn, Duration predicted) {
  auto& tenant = tenants_[size_t(turn.tenant)];
  turn.charged = predicted;
  const double cost = seconds(predicted);
  const auto [time, tag, weight] =
      turn.borrows ? std::tie(borrow_time_, tenant.borrow_tag, tenant.share.weight)
                   : std::tie(own_time_, tenant.own_tag, tenant.share.guaranteed);  // references
  turn.weight = weight;
  time = std::max(time, tag);
  tag = time + cost / weight;
  tenant.owed = std::max(tenant.owed - cost, -most(tenant));  // what is borrowed long is forgotten
  tenant.allowed -= cost;
  if (turn.borrows) lent_ -= cost;
  tenant.running += !turn.borrows && !turn.joins;
}

void FairShare::finish(const Turn& turn, Duration measured) {
  auto& tenant = tenants_[size_t(turn.tenant)];
  const double more = seconds(measured) - seconds(turn.charged);
  (turn.borrows ? tenant.borrow_tag : tenant.own_tag) += more / turn.weight;
  tenant.owed = std::max(tenant.owed - more, -most(tenant));
  tenant.allowed -= more;
  if (turn.borrows) lent_ -= more;
  tenant.running -= !turn.borrows && !turn.joins;
  tenant.used += measured;
  if (turn.borrows) tenant.borrowed += measured;
}

}  // namespace yoke::serve
