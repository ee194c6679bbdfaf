// SPDX-License-Identifier: Apache-2.0
// A generator of load over HTTP/1.1: users who ask a server at once, each in its own way. A closed
// loop keeps so many requests on their way; an open one sends by a schedule that was fixed before,
// and counts latencies from there, so that a slow server is not asked less for being slow.
//
//   const auto reports = run_load({.to = address}, {{.connections = 16, .make = …, .check = …}});
//
// Threads: make and check are called on the load's, one by one where there is one (the default).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/net/address.h"

namespace yoke::serve {

struct LoadRequest {
  std::string path = {};
  std::string headers = {};  // "yoke-tenant: a\r\n"
  std::string body = {};
  int64_t rows = 1;
  Duration leave_after = {};  // the client goes before it is answered; 0: it stays
};

// What came in place of a status.
inline constexpr int kBroken = 0;    // the connection broke after the request was sent
inline constexpr int kLate = -1;     // nothing within the patience
inline constexpr int kRefused = -2;  // no connection
inline constexpr int kLeft = -3;     // leave_after

struct LoadAnswer {
  int status = 0;
  std::string_view body = {};
  Time due = {}, done = {};  // when it should have been sent, when the answer was there
};

struct LoadUser {
  int connections = 1;  // as many requests at once; of an open loop the most
  double rate = 0;      // requests a second of an open loop; 0: a closed one
  bool poisson = true;  // else at equal distances
  uint64_t seed = 1;
  uint64_t count = 10'000'000;                 // no more requests than that
  Duration begin = {}, end = Duration::max();  // from the load's begin on; its end is the last
  // Called with the number of the request; what it writes into is what an earlier one left there.
  std::function<void(uint64_t number, LoadRequest& request)> make = {};
  // Whether the answer is right, of any status; empty: always.
  std::function<bool(uint64_t number, const LoadAnswer& answer)> check = {};
};

// From one request of an open loop to the next; of several threads each has its own schedule.
Duration gap_before(const LoadUser& user, uint64_t number, uint64_t thread = 0, int threads = 1);

struct LoadOptions {
  net::Address to = {};
  Duration warm_up = std::chrono::milliseconds(500);  // what is due then is sent but not counted
  Duration length = std::chrono::seconds(5);          // with the warm-up
  Duration patience = std::chrono::seconds(30);       // for an answer
  int threads = 1;
};

struct LoadReport {
  uint64_t requests = 0, rows = 0;       // answered with 200
  uint64_t wrong = 0;                    // of all answers, also while warming up
  std::map<int, uint64_t> others = {};   // by status
  double seconds = 0;                    // from the end of the warm-up to the last answer
  std::vector<Duration> latencies = {};  // of those with 200, sorted

  double per_second() const { return seconds > 0 ? double(requests) / seconds : 0; }
  double rows_per_second() const { return seconds > 0 ? double(rows) / seconds : 0; }
  double percentile_ms(double part) const;  // 0.5, 0.99, 1
  uint64_t failed() const;                  // all others but kLeft
  // An answer, or what came in its place; those due before `from` are not counted.
  void count(const LoadAnswer& answer, int64_t rows, Time from);
  void add(const LoadReport& other);  // of the same time
};
std::string others_text(const LoadReport& report);  // "429 x 3, broken x 1", or "none"

// One report a user. Returns at the latest a patience after the end. Throws Kind::Io.
std::vector<LoadReport> run_load(const LoadOptions& options, const std::vector<LoadUser>& users);

// Sends `count` requests over one connection, at most `most` of them without an answer; of the
// answers nothing is due. Returns how many came, within the patience for all of them.
uint64_t run_pipeline(const net::Address& to, uint64_t count, uint64_t most, Duration patience,
                      const std::function<void(uint64_t number, LoadRequest& request)>& make,
                      const std::function<void(const LoadAnswer& answer)>& on_answer);

// One request and its answer's body. Throws Kind::Io where its status is not 200.
std::string get(const net::Address& from, const std::string& path, const std::string& headers = {});

}  // namespace yoke::serve
