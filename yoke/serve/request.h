// SPDX-License-Identifier: Apache-2.0
// A request for an inference and its answer, as every protocol has them once its bytes are read.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/base/clock.h"
#include "yoke/plan/port.h"
#include "yoke/serve/status.h"

namespace yoke::serve {

using plan::Port;
using plan::Shape;
using plan::Type;

struct Tensor {
  std::string name = {};
  Type type = Type::Fp32;
  Shape shape = {};
  std::string_view data = {};  // packed, in the order of rows; where it lives says the holder
};

// Text that a model of words goes on with.
struct Prompt {
  std::string text = {};
  int64_t tokens = 64;
  double temperature = 0;
  int64_t top_k = 0;
  double top_p = 1;
  uint64_t seed = 1;
};

struct WantedOutput {
  std::string name = {};
  bool binary = false;
};

struct Parameters {
  uint64_t priority = 0;      // 1 is the highest, 0 the usual
  Duration timeout = {};      // 0: none
  std::string sequence = {};  // of a model with state
  bool sequence_start = false, sequence_end = false;
  std::string stream = {};  // answers leave in the order of arrival
};

struct Request {
  std::string model = {}, version = {}, id = {};
  std::vector<Tensor> inputs = {};
  std::vector<WantedOutput> outputs = {};  // none: all
  bool binary_output = false;              // counts where no outputs are named
  Parameters parameters = {};
  std::optional<Prompt> prompt = {};  // instead of inputs
  std::string traceparent = {};
  std::vector<std::shared_ptr<const void>> holds = {};  // what the tensors' data lies in
  uint64_t held_bytes = 0;                              // of that, with what else is in it
  bool may_be_held = false;  // its answer, behind others: it counts until Answer::place is dropped
};

// Where the time went; all of it in nanoseconds.
struct Timing {
  Duration queue = {}, input = {}, compute = {}, output = {};
};

struct Answer {
  Outcome outcome = {};
  std::string model = {}, version = {}, id = {};
  std::vector<Tensor> outputs = {};
  std::vector<std::string> holds = {};  // what the outputs' data lies in
  std::string text = {};                // after a prompt
  Timing timing = {};
  int replica = -1, batch = 0;
  std::shared_ptr<const void> place = {};  // among those its tenant may have
};

using OnAnswer = std::function<void(Answer)>;
// A piece of text that follows a prompt, as soon as there is one.
using OnText = std::function<void(std::string_view)>;

}  // namespace yoke::serve
