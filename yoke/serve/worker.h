// SPDX-License-Identifier: Apache-2.0
// The worker's side of a replica: it opens a model, says what it is, and computes the batches that
// come through the channel until the router is gone. A batch that throws is computed again by
// halves, until the rows that make it throw are alone. The same in a process and in a thread.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "yoke/net/socket.h"
#include "yoke/serve/facts.h"

namespace yoke::serve {

struct TensorView {
  plan::Type type = plan::Type::Fp32;
  plan::Shape shape = {};
  std::byte* data = nullptr;
  size_t bytes = 0;
};

struct Call {
  std::vector<TensorView> inputs = {};  // as Facts::inputs
  std::string sequence = {};            // of a model with state
  bool sequence_start = false, sequence_end = false;
};

// Where outputs go, one after the other.
class Outputs {
 public:
  virtual ~Outputs() = default;
  // Room for one; `bytes` matters for Type::Bytes alone.
  virtual std::span<std::byte> add(plan::Type type, const plan::Shape& shape, size_t bytes = 0) = 0;
};

// Thrown by a runner that can compute no more, as after an error of a GPU: it ends the replica.
struct Fatal {
  std::string text = {};
};

// What computes. Threads: one at a time, always the same, that which opened it.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual const Facts& facts() const = 0;
  virtual void run(const Call& call, Outputs& outputs) = 0;
  // Goes on with a prompt, how is in JSON; `on_text` gets what is new, and false from it ends it.
  virtual void generate(const std::string& prompt, const std::string& how,
                        const std::function<bool(std::string_view)>& on_text);
  // Of the last run, where it was told to: how long its inputs were on their way to a GPU, and its
  // outputs on theirs back.
  struct Copies {
    Duration in = {}, out = {};
    Duration whole = {};  // from the first one's begin to the last one's end
  };
  virtual Copies copies() const { return {}; }
  // Of one made of several: a list in JSON of what each has computed so far.
  virtual std::string breakdown() const { return {}; }
};
using OpenRunner = std::function<std::unique_ptr<Runner>(const ReplicaSpec&)>;

// Returns when the router is gone or says so. An exception ends the replica, and its text reaches
// the router.
void run_worker(net::Descriptor line, const OpenRunner& open);

// Parts of a text that JSON gives to generate().
struct Prompt;
std::string to_json(const Prompt& prompt);
Prompt parse_prompt(const std::string& text, const std::string& json);

}  // namespace yoke::serve
