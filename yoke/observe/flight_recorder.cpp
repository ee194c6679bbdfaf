// SPDX-License-Identifier: Apache-2.0
#include "yoke/observe/flight_recorder.h"

#include <algorithm>
#include <ostream>
#include <string_view>

#include "yoke/base/error.h"
#include "yoke/base/text.h"

namespace yoke::observe {

FlightRecorder::FlightRecorder(int num_ranks, size_t capacity_per_rank, const Clock& clock)
    : clock_(clock), num_ranks_(num_ranks), lanes_(new Lane[size_t(std::max(num_ranks, 0))]) {
  YOKE_CHECK(num_ranks > 0 && capacity_per_rank > 0);
  for (int rank = 0; rank < num_ranks; ++rank) {
    MutexLock lock(lanes_[rank].mutex);
    lanes_[rank].ring.resize(capacity_per_rank);
  }
}

FlightRecorder::Lane& FlightRecorder::lane(int rank) const {
  YOKE_CHECK(rank >= 0 && rank < num_ranks_, "rank ", rank, " of ", num_ranks_);
  return lanes_[rank];
}

uint64_t FlightRecorder::post(int rank, const Flight& flight) {
  Lane& lane = this->lane(rank);
  const Time now = clock_.now();
  MutexLock lock(lane.mutex);
  const uint64_t ticket = lane.num_posted++;
  lane.ring[ticket % lane.ring.size()] = {flight, now, std::nullopt};
  if (!flight.message) lane.called[flight.group] = flight.sequence;
  return ticket;
}

void FlightRecorder::finish(int rank, uint64_t ticket) {
  Lane& lane = this->lane(rank);
  const Time now = clock_.now();
  MutexLock lock(lane.mutex);
  YOKE_CHECK(ticket < lane.num_posted, "ticket ", ticket, " was never given out");
  if (lane.num_posted - ticket > lane.ring.size()) return;
  lane.ring[ticket % lane.ring.size()].finished = now;
}

void FlightRecorder::name_group(uint32_t group, std::string name) {
  MutexLock lock(names_mutex_);
  names_[group] = std::move(name);
}

FlightRecorder::Called FlightRecorder::called(int rank) const {
  Lane& lane = this->lane(rank);
  MutexLock lock(lane.mutex);
  Called result = lane.noted;
  for (const auto& [group, sequence] : lane.called) result[group_name(group)] = sequence;
  return result;
}

bool FlightRecorder::has_called(int rank, uint32_t group, uint64_t sequence) const {
  const auto all = called(rank);
  const auto found = all.find(group_name(group));
  return found != all.end() && found->second >= sequence;
}

void FlightRecorder::note(int rank, Record record, const std::string& group, Called called) {
  {
    MutexLock lock(names_mutex_);
    const auto found =
        std::ranges::find_if(names_, [&](const auto& entry) { return entry.second == group; });
    // Numbers from the top, which the groups of this process will not reach.
    record.flight.group = found != names_.end() ? found->first : ~uint32_t(names_.size());
    if (found == names_.end()) names_[record.flight.group] = group;
  }
  Lane& lane = this->lane(rank);
  MutexLock lock(lane.mutex);
  const auto same = [&](const Flight& flight) {
    return flight.group == record.flight.group && flight.sequence == record.flight.sequence &&
           std::string_view(flight.kind) == record.flight.kind;
  };
  const bool known =
      lane.num_posted > 0 && same(lane.ring[(lane.num_posted - 1) % lane.ring.size()].flight);
  lane.noted = std::move(called);
  if (!known) ++lane.num_posted;
  lane.ring[(lane.num_posted - 1) % lane.ring.size()] = record;
}

std::string FlightRecorder::group_name(uint32_t group) const {
  MutexLock lock(names_mutex_);
  const auto found = names_.find(group);
  return found == names_.end() ? cat("group ", group) : found->second;
}

std::vector<FlightRecorder::Record> FlightRecorder::records(int rank) const {
  Lane& lane = this->lane(rank);
  MutexLock lock(lane.mutex);
  const uint64_t capacity = lane.ring.size();
  std::vector<Record> result;
  for (uint64_t t = lane.num_posted - std::min(lane.num_posted, capacity); t < lane.num_posted; ++t)
    result.push_back(lane.ring[t % capacity]);
  return result;
}

std::optional<FlightRecorder::Record> FlightRecorder::last(int rank) const {
  Lane& lane = this->lane(rank);
  MutexLock lock(lane.mutex);
  if (lane.num_posted == 0) return std::nullopt;
  return lane.ring[(lane.num_posted - 1) % lane.ring.size()];
}

std::string FlightRecorder::describe(int rank) const {
  const auto all = records(rank);
  const Time now = clock_.now();
  if (all.empty()) return "no operation yet";

  auto what = [&](const Flight& flight) {
    std::string text = cat(flight.kind, " #", flight.sequence, " on ", group_name(flight.group));
    if (flight.peer >= 0) text += cat(" with rank ", flight.peer);
    return text;
  };
  const auto in_flight = [](const Record& record) { return !record.finished; };
  const auto oldest = std::ranges::find_if(all, in_flight);
  if (oldest == all.end())
    return cat("finished ", what(all.back().flight), " ", duration_text(now - *all.back().finished),
               " ago");

  std::string text = what(oldest->flight);
  if (oldest->flight.bytes > 0) text += ", " + bytes_text(oldest->flight.bytes);
  text += ", waiting for " + duration_text(now - oldest->posted);
  const auto others = std::count_if(oldest + 1, all.end(), in_flight);
  if (others > 0) text += cat(", ", others, " more in flight");
  return text;
}

void FlightRecorder::dump(std::ostream& out) const {
  // Columns: posted, operation, group, bytes, peer, took.
  auto row = [&out](const std::vector<std::string>& cells) {
    static constexpr int kWidths[] = {16, 24, 16, 10, 6};
    std::string line = " ";
    for (size_t i = 0; i < cells.size(); ++i) {
      line += " " + cells[i];
      if (i < std::size(kWidths) && cells[i].size() < size_t(kWidths[i]))
        line.append(size_t(kWidths[i]) - cells[i].size(), ' ');
    }
    out << line << '\n';
  };
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const auto all = records(rank);
    const Time now = clock_.now();
    out << "rank " << rank << ": " << describe(rank) << '\n';
    if (!all.empty()) row({"posted", "operation", "group", "bytes", "peer", "took"});
    for (const auto& [flight, posted, finished] : all)
      row({duration_text(now - posted) + " ago", cat(flight.kind, " #", flight.sequence),
           group_name(flight.group), bytes_text(flight.bytes),
           flight.peer < 0 ? "-" : cat(flight.peer),
           finished ? duration_text(*finished - posted) : "in flight"});
  }
  out.flush();
}

}  // namespace yoke::observe
