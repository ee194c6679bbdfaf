// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/grpc/stream_call.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace yoke::serve {
namespace {

// Requests and answers of one call, and bytes of the latter, beyond which it is not read.
constexpr size_t kMostInFlight = 1024, kMostUnsent = 64 << 20;

}  // namespace

StreamCall::StreamCall(Service& service, Unread& unread, grpc::CallbackServerContext& context,
                       std::string name, std::function<void()> on_done)
    : service_(service),
      unread_(unread),
      context_(context),
      name_(std::move(name)),
      on_done_(std::move(on_done)),
      errors_end_it_(find_metadata(context, "triton_grpc_error") == "true") {}

void StreamCall::start() {
  auto outcome = attempt([&] { caller_ = identify(service_, context_); });
  if (!outcome.ok()) {
    log_refused(service_, context_, outcome, {});
    const MutexLock lock(mutex_);
    end_ = std::move(outcome);
    at_once_ = true;
  }
  step();
}

void StreamCall::stop_reading() {
  {
    const MutexLock lock(mutex_);
    if (!read_all_) end_ = {Status::Unavailable, "the server is about to end; ask another"};
    read_all_ = true;
  }
  step();
}

void StreamCall::OnReadDone(bool ok) {
  if (ok) take(std::exchange(message_, nullptr));
  {
    const MutexLock lock(mutex_);
    reading_ = false;
    if (!ok) read_all_ = true;
  }
  step();
}

void StreamCall::OnWriteDone(bool) {
  {
    const MutexLock lock(mutex_);
    writing_ = false;
    written_ = nullptr;
    unsent_ -= out_.front().message.ByteSizeLong();
    out_.pop_front();
  }
  step();
}

void StreamCall::OnCancel() {
  {
    const MutexLock lock(mutex_);
    end_ = {Status::Cancelled, "the call was cancelled"};
    at_once_ = true;
  }
  step();
}

// Nothing is read or written any more; nobody waits for what still computes.
void StreamCall::OnDone() {
  const auto keep = shared_from_this();
  std::map<uint64_t, Pending> rest;
  {
    const MutexLock lock(mutex_);
    rest.swap(pending_);
    out_.clear();
    written_ = nullptr;
  }
  for (const auto& [number, pending] : rest)
    if (pending.ticket) service_.cancel(pending.ticket);
  on_done_();
}

void StreamCall::take(const std::shared_ptr<const InferMessage>& message) {
  const auto self = shared_from_this();
  uint64_t number = 0;
  bool waits = false;
  {
    const MutexLock lock(mutex_);
    number = taken_++;
    pending_[number].tenant = caller_.tenant;
    waits = unsent_ > 0;
  }
  Pool::TicketPtr ticket;
  auto refused = attempt([&] {
    caller_ = identify(service_, context_);  // its key may have been taken away
    if (!waits) unread_.check(caller_);      // else it is not read, if not refused
    auto request = to_request(message, service_, context_);
    if (request.parameters.stream.empty()) request.parameters.stream = name_;
    OnText on_text;
    if (request.prompt && wants_pieces(*message)) {
      if (const auto model = service_.pool().find(request.model, request.version))
        request.version = model->version;  // pieces name it too
      on_text = [self, number, message, version = request.version](std::string_view text) {
        {
          const MutexLock lock(self->mutex_);
          const auto pending = self->pending_.find(number);
          if (pending == self->pending_.end()) return;
          auto& response = *pending->second.out.emplace_back().message.mutable_infer_response();
          Answer head;
          head.model = message->model_name();
          head.version = version;
          head.id = message->id();
          to_message(head, response);
          add_text(text, response);
          self->hold(pending->second);
          self->let_go();
        }
        self->step();
      };
    }
    {
      const MutexLock lock(mutex_);
      pending_[number].words = request.prompt.has_value();
      pending_[number].pieces = bool(on_text);
    }
    ticket = service_.submit(
        std::move(request), caller_, "grpc",
        [self, number](Answer answer) { self->answer(number, std::move(answer)); }, on_text);
  });
  if (!refused.ok()) log_refused(service_, context_, refused, *message);
  const MutexLock lock(mutex_);
  const auto pending = pending_.find(number);
  if (pending == pending_.end() || pending->second.done) return;  // it has been answered
  pending->second.ticket = std::move(ticket);
  if (refused.ok()) return;
  put({.outcome = std::move(refused),
       .model = message->model_name(),
       .version = message->model_version(),
       .id = message->id()},
      pending->second);
}

void StreamCall::answer(uint64_t number, Answer answer) {
  {
    const MutexLock lock(mutex_);
    const auto pending = pending_.find(number);
    if (pending == pending_.end()) return;
    put(std::move(answer), pending->second);
  }
  step();
}

// The last that is said to a request.
void StreamCall::put(Answer answer, Pending& to) {
  const bool ok = answer.outcome.ok();
  auto& message = to.out.emplace_back().message;
  auto& response = *message.mutable_infer_response();
  if (!ok && errors_end_it_) to.end = answer.outcome;
  if (!ok) message.set_error_message(std::move(answer.outcome.text));
  if (ok && to.words && !to.pieces) add_text(answer.text, response);
  if (to.pieces) (*response.mutable_parameters())["triton_final_response"].set_bool_param(true);
  to_message(std::move(answer), response);
  hold(to);
  to.ticket = nullptr;
  to.done = true;
  let_go();
}

// Counts what was said last.
void StreamCall::hold(Pending& of) {
  const size_t bytes = of.out.back().message.ByteSizeLong();
  unsent_ += bytes;
  of.out.back().held = unread_.hold(of.tenant, bytes);
}

// What is said to the request whose turn it is, and to those after it that are done.
void StreamCall::let_go() {
  while (!pending_.empty() && !failed_) {
    auto& first = pending_.begin()->second;
    if (first.end) {
      first.out.pop_back();
      failed_ = true;
      end_ = std::move(first.end);
    }
    std::ranges::move(first.out, std::back_inserter(out_));
    first.out.clear();
    if (!first.done) return;
    pending_.erase(pending_.begin());
  }
}

StreamCall::Next StreamCall::choose() {
  if (finished_) return Next::Nothing;
  const bool done = read_all_ && pending_.empty();
  if (at_once_ || ((failed_ || done) && out_.empty())) {
    finished_ = true;
    return Next::Finish;
  }
  if (!writing_ && !out_.empty()) {
    writing_ = true;
    return Next::Write;
  }
  const bool full = unsent_ >= kMostUnsent || (unsent_ > 0 && unread_.crowded());
  if (!reading_ && !read_all_ && !failed_ && !full &&
      pending_.size() + out_.size() < kMostInFlight) {
    reading_ = true;
    return Next::Read;
  }
  return Next::Nothing;
}

// gRPC is called without the mutex, as it may call back; and by one thread, so that nothing is
// begun after the end.
void StreamCall::step() {
  mutex_.lock();
  again_ = true;
  if (!stepping_) {
    stepping_ = true;
    while (std::exchange(again_, false)) {
      const Next next = choose();
      const StreamMessage* const first = out_.empty() ? nullptr : &out_.front().message;
      if (next == Next::Write) written_ = unread_.write(context_.c_call(), first->ByteSizeLong());
      const Outcome end = next == Next::Finish && end_ ? *end_ : Outcome{};
      again_ |= next != Next::Nothing;
      mutex_.unlock();
      if (next == Next::Read) {
        message_ = std::make_shared<InferMessage>();
        StartRead(message_.get());
      } else if (next == Next::Write) {
        StartWrite(first);
      } else if (next == Next::Finish) {
        Finish(to_status(end, context_));
      }
      mutex_.lock();
    }
    stepping_ = false;
  }
  mutex_.unlock();
}

}  // namespace yoke::serve
