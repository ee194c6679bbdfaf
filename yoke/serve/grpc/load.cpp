// SPDX-License-Identifier: Apache-2.0
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/prctl.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "inference.grpc.pb.h"
#include "yoke/base/error.h"
#include "yoke/base/mutex.h"
#include "yoke/base/text.h"
#include "yoke/serve/grpc_load.h"
#include "yoke/serve/load_wire.h"

namespace yoke::serve {
namespace {

constexpr const char* kInfer = "/inference.GRPCInferenceService/ModelInfer";

constexpr auto kLook = std::chrono::milliseconds(50);  // for a connection that is free

Time now() { return SteadyClock().now(); }

std::chrono::system_clock::time_point in(Duration patience) {
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(patience);
}

std::shared_ptr<grpc::Channel> open(const net::Address& to) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  return grpc::CreateCustomChannel(net::to_text(to), grpc::InsecureChannelCredentials(), arguments);
}

inference::ModelInferRequest message_of(const Question& question) {
  inference::ModelInferRequest message;
  message.set_model_name(question.model);
  message.set_id(question.id);
  auto& parameters = *message.mutable_parameters();
  if (!question.stream.empty()) parameters["yoke_stream"].set_string_param(question.stream);
  if (question.timeout_us > 0) parameters["timeout"].set_int64_param(question.timeout_us);
  auto* input = message.add_inputs();
  input->set_name("x");
  input->set_datatype("FP32");
  for (const int64_t size : question.shape) input->add_shape(size);
  message.add_raw_input_contents(question.values.data(), question.values.size() * sizeof(float));
  return message;
}

struct Arrival {
  uint64_t number = 0;
  Time due = {};
};

struct Asker;
// A call at a time, over its own connection.
struct Caller {
  Asker* asker = nullptr;
  std::unique_ptr<grpc::GenericStub> stub = {};
  LoadRequest request = {};
  Arrival asked = {};
  std::unique_ptr<grpc::ClientContext> context = {};
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader = {};
  grpc::ByteBuffer answer = {};
  grpc::Status status = {};
};

struct Asker {
  const LoadUser* user = nullptr;
  LoadReport report = {};
  std::deque<Arrival> waiting = {};
  std::deque<Caller> callers = {};
  std::vector<Caller*> idle = {};
  size_t busy = 0;
  uint64_t next = 0;
  Time begin = {}, end = {}, next_due = {};
};

void add_metadata(grpc::ClientContext& context, const std::string& headers) {
  for (const auto& line : split(headers, '\n'))
    if (const size_t at = line.find(": "); at != line.npos)
      context.AddMetadata(line.substr(0, at), line.substr(at + 2, line.find('\r') - at - 2));
}

std::string text_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const auto& slice : slices)
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return text;
}

// One thread sends what is due, as gRPC's own waits are rounded to milliseconds; the other takes
// what comes.
class Driver {
 public:
  Driver(const LoadOptions& options, const std::vector<LoadUser>& users)
      : options_(options), askers_(users.size()) {
    const Time start = now();
    counted_from_ = start + options.warm_up;
    last_ = start + options.length + options.patience;
    for (size_t i = 0; i < users.size(); ++i) {
      auto& asker = askers_[i];
      asker.user = &users[i];
      asker.begin = start + users[i].begin;
      asker.end = start + std::min(users[i].end, options.length);
      asker.next_due = asker.begin;
      if (users[i].rate > 0) asker.next_due += gap_before(users[i], 0);
    }
  }

  std::vector<LoadReport> run() {
    {
      const std::jthread sender([this] { send_what_is_due(); });
      void* tag = nullptr;
      bool fine = false;
      while (queue_.Next(&tag, &fine)) guarded([&] { take(*static_cast<Caller*>(tag)); });
    }
    if (error_) std::rethrow_exception(error_);
    std::vector<LoadReport> reports;
    for (auto& asker : askers_) {
      if (!asker.waiting.empty()) asker.report.others[kLate] += asker.waiting.size();
      std::ranges::sort(asker.report.latencies);
      reports.push_back(std::move(asker.report));
    }
    return reports;
  }

 private:
  // What a user's functions throw ends the load; the calls on their way come back first.
  template <typename Do>
  void guarded(const Do& what) {
    const MutexLock lock(mutex_);
    try {
      what();
    } catch (...) {
      if (!error_) error_ = std::current_exception();
      all_sent_ = true;
    }
    if (all_sent_ && busy() == 0 && !std::exchange(shut_, true)) queue_.Shutdown();
  }

  size_t busy() const {
    size_t sum = 0;
    for (const auto& asker : askers_) sum += asker.busy;
    return sum;
  }

  bool has_more(const Asker& asker, Time time) const {
    const Time next = asker.user->rate > 0 ? asker.next_due : std::max(time, asker.begin);
    return !error_ && asker.next < asker.user->count && next < asker.end;
  }

  // Those who are due by now, each as soon as a connection is free.
  void ask(Asker& asker, Time time) {
    const auto& user = *asker.user;
    while (has_more(asker, time) && asker.next_due <= time &&
           (user.rate > 0 || asker.busy + asker.waiting.size() < size_t(user.connections))) {
      asker.waiting.push_back({asker.next++, user.rate > 0 ? asker.next_due : time});
      if (user.rate > 0) asker.next_due += gap_before(user, asker.next);
    }
    while (!asker.waiting.empty() && asker.busy < size_t(user.connections) && time < last_ &&
           !error_)
      send(asker);
  }

  void send(Asker& asker) {
    if (asker.idle.empty()) {
      auto& fresh = asker.callers.emplace_back();
      fresh.asker = &asker;
      fresh.stub = std::make_unique<grpc::GenericStub>(open(options_.to));
      asker.idle.push_back(&fresh);
    }
    auto& caller = *asker.idle.back();
    caller.asked = asker.waiting.front();
    caller.request.headers.clear();
    asker.user->make(caller.asked.number, caller.request);
    asker.idle.pop_back();
    asker.waiting.pop_front();
    caller.context = std::make_unique<grpc::ClientContext>();
    caller.context->set_deadline(in(std::min(options_.patience, last_ - now())));
    add_metadata(*caller.context, caller.request.headers);
    const grpc::Slice slice(caller.request.body);
    caller.reader = caller.stub->PrepareUnaryCall(caller.context.get(), kInfer,
                                                  grpc::ByteBuffer(&slice, 1), &queue_);
    ++asker.busy;
    caller.reader->StartCall();
    caller.reader->Finish(&caller.answer, &caller.status, &caller);
  }

  void take(Caller& caller) {
    auto& asker = *caller.asker;
    --asker.busy;
    asker.idle.push_back(&caller);
    const std::string body = caller.status.ok() ? text_of(caller.answer) : "";
    const LoadAnswer answer{.status = caller.status.ok() ? 200 : 1000 + caller.status.error_code(),
                            .body = body,
                            .due = caller.asked.due,
                            .done = now()};
    const auto& check = asker.user->check;
    if (check && !check(caller.asked.number, answer)) ++asker.report.wrong;
    asker.report.count(answer, caller.request.rows, counted_from_);
    ask(asker, answer.done);
  }

  // Closed loops go on by themselves once they have begun, open ones as long as some are due.
  void send_what_is_due() {
    ::prctl(PR_SET_TIMERSLACK, 1);
    for (bool more = true; more;) {
      const Time time = now();
      Time wake = time + kLook;
      guarded([&] {
        more = false;
        for (auto& asker : askers_) {
          ask(asker, time);
          const bool comes = has_more(asker, time) && asker.next_due > time;
          if (comes) wake = std::min(wake, asker.next_due);
          more |= comes || !asker.waiting.empty();
        }
        more = more && time < last_ && !error_;
        all_sent_ = !more;
      });
      if (more) std::this_thread::sleep_until(wake);
    }
  }

  const LoadOptions& options_;
  Time counted_from_ = {}, last_ = {};
  Mutex mutex_;
  std::vector<Asker> askers_;
  bool all_sent_ = false, shut_ = false;
  std::exception_ptr error_ = {};
  grpc::CompletionQueue queue_;
};

}  // namespace

bool has_grpc_load() { return true; }

std::string grpc_question(const Question& question) {
  return message_of(question).SerializeAsString();
}

bool grpc_values(std::string_view answer, std::span<float> values) {
  inference::ModelInferResponse message;
  if (!message.ParseFromArray(answer.data(), int(answer.size()))) return false;
  if (message.raw_output_contents_size() < 1) return false;
  const auto& bytes = message.raw_output_contents(0);
  if (bytes.size() != values.size_bytes()) return false;
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return true;
}

std::vector<LoadReport> run_grpc_load(const LoadOptions& options,
                                      const std::vector<LoadUser>& users) {
  for (const auto& user : users)
    if (!user.make || user.connections < 1)
      fail(Kind::Usage, "a user of a load makes requests, over 1 connection or more");
  return Driver(options, users).run();
}

uint64_t run_grpc_stream(const net::Address& to, uint64_t count, uint64_t most, Duration patience,
                         const std::function<void(uint64_t, Question&)>& make,
                         const OnStreamAnswer& on_answer) {
  const auto stub = inference::GRPCInferenceService::NewStub(open(to));
  grpc::ClientContext context;
  context.set_deadline(in(patience));
  const auto stream = stub->ModelStreamInfer(&context);
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t came = 0;
  bool over = false;
  const std::jthread writer([&] {
    Question question;
    for (uint64_t number = 0; number < count; ++number) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return over || number < came + most; });  // reading has a deadline
        if (over) break;
      }
      make(number, question);
      if (!stream->Write(message_of(question))) break;
    }
    stream->WritesDone();
  });
  inference::ModelStreamInferResponse message;
  std::vector<float> values;
  while (stream->Read(&message)) {
    const auto& answer = message.infer_response();
    values.clear();
    if (answer.raw_output_contents_size() > 0) {
      const auto& bytes = answer.raw_output_contents(0);
      values.resize(bytes.size() / sizeof(float));
      std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    }
    on_answer(answer.id(), message.error_message(), values);
    {
      const std::lock_guard lock(mutex);
      ++came;
    }
    changed.notify_one();
  }
  {
    const std::lock_guard lock(mutex);
    over = true;
  }
  changed.notify_one();
  return came;
}

}  // namespace yoke::serve
