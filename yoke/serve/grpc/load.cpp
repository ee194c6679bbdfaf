// SPDX-License-Identifier: Apache-2.0
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "inference.grpc.pb.h"
#include "yoke/base/error.h"
#include "yoke/base/text.h"
#include "yoke/serve/grpc_load.h"
#include "yoke/serve/load_wire.h"

namespace yoke::serve {
namespace {

constexpr const char* kInfer = "/inference.GRPCInferenceService/ModelInfer";

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

// A call at a time, over its own connection.
struct Caller {
  const LoadUser* user = nullptr;
  size_t number_of_user = 0;
  std::unique_ptr<grpc::GenericStub> stub = {};
  LoadRequest request = {};
  uint64_t number = 0;
  Time due = {};
  std::unique_ptr<grpc::ClientContext> context = {};
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader = {};
  grpc::ByteBuffer answer = {};
  grpc::Status status = {};
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
  const Time start = now(), end = start + options.length, from = start + options.warm_up;
  std::vector<LoadReport> reports(users.size());
  std::vector<uint64_t> next(users.size(), 0);
  std::deque<Caller> callers;
  grpc::CompletionQueue queue;
  size_t busy = 0;
  const auto ask = [&](Caller& caller) {
    auto& count = next[caller.number_of_user];
    if (now() >= end || count >= caller.user->count) return;
    caller.number = count++;
    caller.due = now();
    caller.request.headers.clear();
    caller.user->make(caller.number, caller.request);
    caller.context = std::make_unique<grpc::ClientContext>();
    caller.context->set_deadline(in(options.patience));
    add_metadata(*caller.context, caller.request.headers);
    const grpc::Slice slice(caller.request.body);
    caller.reader = caller.stub->PrepareUnaryCall(caller.context.get(), kInfer,
                                                  grpc::ByteBuffer(&slice, 1), &queue);
    caller.reader->StartCall();
    caller.reader->Finish(&caller.answer, &caller.status, &caller);
    ++busy;
  };
  for (size_t i = 0; i < users.size(); ++i) {
    if (users[i].rate > 0 || !users[i].make)
      fail(Kind::Usage, "a load over gRPC is a closed loop of requests that are made");
    for (int k = 0; k < users[i].connections; ++k) {
      auto& caller = callers.emplace_back();
      caller.user = &users[i];
      caller.number_of_user = i;
      caller.stub = std::make_unique<grpc::GenericStub>(open(options.to));
      ask(caller);
    }
  }
  void* tag = nullptr;
  bool fine = false;
  while (busy > 0 && queue.Next(&tag, &fine)) {  // every call has a deadline
    auto& caller = *static_cast<Caller*>(tag);
    --busy;
    auto& report = reports[caller.number_of_user];
    const std::string body = caller.status.ok() ? text_of(caller.answer) : "";
    const LoadAnswer answer{.status = caller.status.ok() ? 200 : 1000 + caller.status.error_code(),
                            .body = body,
                            .due = caller.due,
                            .done = now()};
    if (caller.user->check && !caller.user->check(caller.number, answer)) ++report.wrong;
    report.count(answer, caller.request.rows, from);
    ask(caller);
  }
  queue.Shutdown();
  while (queue.Next(&tag, &fine)) continue;
  for (auto& report : reports) std::ranges::sort(report.latencies);
  return reports;
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
