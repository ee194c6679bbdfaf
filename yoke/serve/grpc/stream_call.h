// SPDX-License-Identifier: Apache-2.0
// One call of ModelStreamInfer: requests are read while earlier ones compute, and answered in their
// order. What is refused here already takes its turn like an answer of the pool.
// Threads: gRPC's and the pool's. Whoever changes something calls step(); one at a time acts.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "inference.pb.h"
#include "yoke/base/mutex.h"
#include "yoke/serve/grpc/messages.h"
#include "yoke/serve/grpc/unread.h"

namespace yoke::serve {

using StreamMessage = inference::ModelStreamInferResponse;

class StreamCall final : public grpc::ServerBidiReactor<InferMessage, StreamMessage>,
                         public std::enable_shared_from_this<StreamCall> {
 public:
  // `name` is of this call alone; `on_done` lets go of it.
  StreamCall(Service& service, Unread& unread, grpc::CallbackServerContext& context,
             std::string name, std::function<void()> on_done);
  void start();
  // What was read is answered, then the call ends.
  void stop_reading();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  struct Out {
    StreamMessage message = {};
    Unread::Mark held = {};
  };
  struct Pending {
    int tenant = 0;
    Pool::TicketPtr ticket = {};
    std::deque<Out> out = {};
    std::optional<Outcome> end = {};  // of the whole call
    bool words = false, pieces = false, done = false;
  };
  enum class Next { Nothing, Read, Write, Finish };

  void take(const std::shared_ptr<const InferMessage>& message);
  void answer(uint64_t number, Answer answer);
  void put(Answer answer, Pending& to) YOKE_REQUIRES(mutex_);
  void hold(Pending& of) YOKE_REQUIRES(mutex_);
  void let_go() YOKE_REQUIRES(mutex_);
  Next choose() YOKE_REQUIRES(mutex_);
  void step();

  Service& service_;
  Unread& unread_;
  grpc::CallbackServerContext& context_;
  const std::string name_;
  const std::function<void()> on_done_;
  const bool errors_end_it_;               // instead of being messages
  Caller caller_;                          // as of the message read last
  std::shared_ptr<InferMessage> message_;  // that is read

  Mutex mutex_;
  std::map<uint64_t, Pending> pending_ YOKE_GUARDED_BY(mutex_);  // by arrival
  std::deque<Out> out_ YOKE_GUARDED_BY(mutex_);
  Unread::Mark written_;  // the first of them
  uint64_t taken_ YOKE_GUARDED_BY(mutex_) = 0;
  size_t unsent_ YOKE_GUARDED_BY(mutex_) = 0;  // bytes of answers
  bool reading_ YOKE_GUARDED_BY(mutex_) = false, writing_ YOKE_GUARDED_BY(mutex_) = false;
  bool read_all_ YOKE_GUARDED_BY(mutex_) = false;
  std::optional<Outcome> end_ YOKE_GUARDED_BY(mutex_);  // if it is not to be Ok
  bool failed_ YOKE_GUARDED_BY(mutex_) = false;         // by an answer; nothing follows it
  bool at_once_ YOKE_GUARDED_BY(mutex_) = false;        // whatever waits to be written
  bool finished_ YOKE_GUARDED_BY(mutex_) = false;
  bool stepping_ YOKE_GUARDED_BY(mutex_) = false, again_ YOKE_GUARDED_BY(mutex_) = false;
};

}  // namespace yoke::serve
