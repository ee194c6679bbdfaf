// SPDX-License-Identifier: Apache-2.0
// What a worker is asked to serve, and what it finds out about the model when it loads it. Both
// travel as JSON.
#pragma once

#include <string>
#include <vector>

#include "yoke/plan/port.h"

namespace yoke::serve {

// What a replica is made of.
struct ReplicaSpec {
  int64_t number = 0;     // among the replicas of its model
  std::string path = {};  // a file or folder, or "stand-in:…" (stand_in.h)
  std::string device = "cpu";
  int64_t threads = 1;                                 // of a CPU
  std::vector<std::string> inputs = {}, outputs = {};  // texts of ports, where they are declared
  int64_t batch = 0;                                   // the most rows of a batch; 0: as suits
  std::string precision = "fp32";
  bool stateful = false;
  std::string tokenizer = {};
  bool record = true;  // what a batch of each size makes a GPU do, where it can be
  bool timed = false;  // tells how long copies to a GPU and back took
  bool operator==(const ReplicaSpec&) const = default;
};
std::string to_json(const ReplicaSpec& spec);
ReplicaSpec parse_spec(const std::string& json);

struct Facts {
  std::string platform = {};
  std::vector<plan::Port> inputs = {}, outputs = {};  // outputs as far as they are known
  bool declared = true;    // the inputs have types and shapes; else only names
  int64_t batch = 0;       // rows that one batch may have; 0: a request is taken as it is
  bool pure = true;        // the same rows give the same, wherever they stand
  bool stateful = false;   // an instance for each sequence
  bool has_words = false;  // goes on with prompts
  std::vector<int64_t> buckets = {};  // numbers of rows that were warmed up
  bool pads = false;                  // batches are filled up to one of them
  uint64_t bytes = 0;                 // of weights
  std::string precision = "fp32";
  double difference = -1;  // of outputs to those in fp32, the largest; below 0: nobody measured
  double load_s = 0;
  double longest_s = 0;                 // of the batches that warmed it up
  std::vector<std::string> notes = {};  // what the one who serves it should know
};
std::string to_json(const Facts& facts);
Facts parse_facts(const std::string& json);

}  // namespace yoke::serve
