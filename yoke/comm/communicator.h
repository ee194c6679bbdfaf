// SPDX-License-Identifier: Apache-2.0
// The contract that every backend keeps. A Communicator is one rank's end of a group of ranks: a
// small copyable handle.
//
// Collective: the members of a group call the collectives in the same order, with arguments that
// fit together; ranks that disagree all get one error that names both sides. Collectives of a group
// take effect in the order they were called, as do the messages of one sender to one receiver;
// anything else is ordered by wait(). Sums are made in rank order, so every rank gets the same
// bits, every time. Every wait has the deadline of its world. A rank that fails, leaves early or
// misses a deadline ends the world: its peers wake at once with an error that names it, and every
// later call throws the same. Threads: one thread at a time per rank; abort() from any thread.
// CUDA: an operation starts when the caller's current stream reaches it. Nothing waits on the host
// for a peer inside backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "yoke/comm/operation.h"
#include "yoke/comm/work.h"

namespace yoke::comm {

// What a backend can and cannot do.
struct Capabilities {
  std::string backend;
  bool cpu = false;
  bool cuda = false;
  bool checks_before_data_moves = false;  // a mismatch is found before any byte is written
  bool sums_in_rank_order = false;        // reductions are bitwise the same from run to run
  bool abort_wakes_peers = false;
  // Else a message waits for the rank's earlier operations on the group: use group() to exchange.
  bool messages_overtake = false;
};

// One rank's end of a group, as a backend implements it. issue() gets operations in normal form.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  virtual Work issue(Operation operation) = 0;
  virtual Work issue_group(std::vector<Operation> messages) = 0;   // sends and recvs, as one
  virtual std::shared_ptr<Backend> split(int color, int key) = 0;  // null for a negative color
  virtual void abort(const std::string& reason) = 0;
  virtual void leave() = 0;  // the rank returns: what peers need of it is done first
  virtual at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) = 0;
  virtual Capabilities capabilities() const = 0;
};

class Communicator {
 public:
  // A send or a recv, to be given to group().
  struct Message {
    enum class Direction { Send, Recv } direction;
    at::Tensor tensor;
    int peer;
  };

  Communicator() = default;  // no group; only bool() may be asked
  explicit Communicator(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}
  explicit operator bool() const { return backend_ != nullptr; }

  int rank() const { return backend_->rank(); }
  int size() const { return backend_->size(); }
  const std::string& name() const { return backend_->name(); }  // "world", "world/2.0"
  Capabilities capabilities() const { return backend_->capabilities(); }

  // Every member of this group gets the group of those who gave the same color, ordered by (key,
  // rank); a negative color gets an empty handle. Blocks.
  Communicator split(int color, int key) const;

  // In place, on every rank.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::Sum) const;
  Work broadcast(const at::Tensor& tensor, int root) const;
  // In place on the root; the others' tensors are only read.
  Work reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::Sum) const;

  // `output` holds every rank's `input` one after the other. The input may be its own place in
  // there.
  Work all_gather(const at::Tensor& output, const at::Tensor& input) const;
  // Rank r's part of `input` (one size()-th of it), reduced over the ranks, lands in rank r's
  // `output`.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      ReduceOp op = ReduceOp::Sum) const;

  // The same for pieces of any sizes, one for each rank; empty ones too.
  Work all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) const;
  Work reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::Sum) const;
  // `outputs` is used on the root alone, `inputs` of scatter likewise; elsewhere they are empty.
  Work gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int root) const;
  Work scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root) const;
  // outputs[s] on rank r gets inputs[r] of rank s.
  Work all_to_all(const std::vector<at::Tensor>& outputs,
                  const std::vector<at::Tensor>& inputs) const;

  // A send is done when its receiver has the data.
  Work send(const at::Tensor& tensor, int to) const;
  Work recv(const at::Tensor& tensor, int from) const;
  // All at once: no order of the messages can deadlock.
  Work group(const std::vector<Message>& messages) const;

  // Blocks the host until every rank has come here. Queued CUDA work is not awaited.
  void barrier() const;
  // Ends the world of this group: every rank that waits or calls gets an error with `reason`.
  void abort(const std::string& reason) const { backend_->abort(reason); }
  // What run_ranks calls when a rank has returned: others may still need it for what is in flight.
  void leave() const { backend_->leave(); }
  Backend& backend() const { return *backend_; }  // for one that stands before it
  // Memory that this backend moves fastest; uninitialised.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) const {
    return backend_->allocate(sizes, options);
  }

 private:
  std::shared_ptr<Backend> backend_;
};

}  // namespace yoke::comm
