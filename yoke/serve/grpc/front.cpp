// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/grpc_front.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <array>

#include "inference.grpc.pb.h"
#include "yoke/base/error.h"
#include "yoke/net/address.h"
#include "yoke/serve/grpc/messages.h"
#include "yoke/serve/grpc/stream_call.h"
#include "yoke/serve/grpc/unread.h"

namespace yoke::serve {
namespace {

using Context = grpc::CallbackServerContext;
using Reactor = grpc::ServerUnaryReactor;

constexpr int kMostCalls = 1024;  // of a connection at once

// A call that another thread ends, or the client by going away; the first of them does.
class UnaryCall final : public Reactor {
 public:
  static std::shared_ptr<UnaryCall> make(Service& service, Context& context) {
    const std::shared_ptr<UnaryCall> call(new UnaryCall(service, context));
    call->self_ = call;
    return call;
  }
  bool ended() const { return ended_; }
  // Who gets true ends it, and nobody else.
  bool claim() { return !ended_.exchange(true); }
  void finish(const Outcome& outcome) { Finish(to_status(outcome, context_)); }
  void end(const Outcome& outcome) {
    if (claim()) finish(outcome);
  }
  void set_ticket(Pool::TicketPtr ticket) {
    const MutexLock lock(mutex_);
    if (!answered_) ticket_ = std::move(ticket);
  }
  // The request goes now, however long the client takes for the answer.
  void answer(const Outcome& outcome, Unread& unread, int tenant, size_t bytes) {
    Pool::TicketPtr done;
    {
      const MutexLock lock(mutex_);
      answered_ = true;
      done.swap(ticket_);
    }
    unread_ = {unread.hold(tenant, bytes), unread.write(context_.c_call(), bytes)};
    finish(outcome);
  }

  void OnCancel() override {
    cancelled_ = true;
    end({Status::Cancelled, "the call was cancelled"});
  }
  void OnDone() override {
    Pool::TicketPtr left;
    {
      const MutexLock lock(mutex_);
      left.swap(ticket_);
    }
    if (cancelled_ && left) service_.cancel(left);
    unread_ = {};
    self_.reset();
  }

 private:
  UnaryCall(Service& service, Context& context) : service_(service), context_(context) {}

  Service& service_;
  Context& context_;
  std::atomic<bool> ended_{false};
  bool cancelled_ = false;
  Mutex mutex_;
  Pool::TicketPtr ticket_ YOKE_GUARDED_BY(mutex_);  // until it is answered
  bool answered_ YOKE_GUARDED_BY(mutex_) = false;
  std::array<Unread::Mark, 2> unread_;  // its answer, held and written
  std::shared_ptr<UnaryCall> self_;     // until OnDone; who answers holds another
};

// All methods that are not in our proto.
class Unserved final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    struct Refusal final : grpc::ServerGenericBidiReactor {
      void OnDone() override { delete this; }
    };
    auto* refusal = new Refusal;
    refusal->Finish({grpc::StatusCode::UNIMPLEMENTED,
                     cat("'", context->method(),
                         "' is not served; shared memory, trace and log "
                         "settings are not, and tensors travel in the message")});
    return refusal;
  }
};

// As gRPC wants it: all interfaces have a name there.
std::string listening_address(const std::string& text) {
  if (text.starts_with("unix:")) return text;
  auto address = net::parse_address(text);
  if (address.host.empty()) address.host = "::";
  return net::to_text(address);
}

}  // namespace

bool has_grpc() { return true; }

struct GrpcFront::Impl final : inference::GRPCInferenceService::CallbackService {
  Impl(serve::Service& to, const GrpcOptions& options)
      : service(to), unread(options.max_unread_bytes, options.idle) {
    grpc::ServerBuilder builder;
    int port = 0;
    auto credentials = grpc::InsecureServerCredentials();
    if (!options.tls_cert.empty()) {
      grpc::SslServerCredentialsOptions tls;
      tls.pem_key_cert_pairs.push_back({options.tls_key, options.tls_cert});
      credentials = grpc::SslServerCredentials(tls);
    }
    builder.AddListeningPort(listening_address(options.address), credentials, &port);
    // Else a second server on the same port would get some of the calls, and nobody notice.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostCalls);
    builder.SetMaxReceiveMessageSize(int(std::min<int64_t>(options.max_body_bytes, INT32_MAX)));
    builder.SetResourceQuota(grpc::ResourceQuota("yoke").Resize(
        std::max(options.max_unread_bytes, size_t(2 * options.max_body_bytes))));
    // Whoever is gone without a word is asked, and a connection that nobody uses is closed.
    const auto ms = [](Duration time) {
      return int(std::clamp<int64_t>(time.count() / 1'000'000, 1000, INT32_MAX));
    };
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, ms(options.idle));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ms(options.idle));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, ms(10 * options.idle));
    builder.RegisterService(this);
    builder.RegisterCallbackGenericService(&unserved);
    server = builder.BuildAndStart();
    if (!server || port == 0)
      fail(Kind::Io, "gRPC cannot listen on ", options.address,
           ": the address is taken or not of this host, or the TLS key is not of the certificate");
    address = options.address;
    if (!address.starts_with("unix:")) {
      auto real = net::parse_address(address);
      real.port = uint16_t(port);
      address = net::to_text(real);
    }
  }

  ~Impl() override {
    shut_down(SteadyClock().now());
    errands.close();
  }

  void shut_down(Time deadline) {
    std::map<uint64_t, std::shared_ptr<StreamCall>> open;
    {
      const MutexLock lock(mutex);
      stopping = true;
      open = streams;
    }
    for (const auto& [number, call] : open) call->stop_reading();
    open.clear();
    if (server)
      server->Shutdown(std::chrono::system_clock::now() + (deadline - SteadyClock().now()));
  }

  template <typename Act>
  static Reactor* answer(Context* context, const Act& act) {
    auto* reactor = context->DefaultReactor();
    reactor->Finish(to_status(attempt(act), *context));
    return reactor;
  }

  Reactor* ServerLive(Context* context, const inference::ServerLiveRequest*,
                      inference::ServerLiveResponse* response) override {
    return answer(context, [&] { response->set_live(true); });
  }
  Reactor* ServerReady(Context* context, const inference::ServerReadyRequest*,
                       inference::ServerReadyResponse* response) override {
    return answer(context, [&] { response->set_ready(service.ready()); });
  }
  Reactor* ModelReady(Context* context, const inference::ModelReadyRequest* request,
                      inference::ModelReadyResponse* response) override {
    return answer(context, [&] {
      // A model that is not there is not ready: clients take an error for a fault of the server.
      attempt(
          [&] { response->set_ready(service.model_ready(request->name(), request->version())); });
    });
  }
  Reactor* ServerMetadata(Context* context, const inference::ServerMetadataRequest*,
                          inference::ServerMetadataResponse* response) override {
    return answer(context, [&] { from_json(service.server_metadata(), *response); });
  }
  Reactor* ModelMetadata(Context* context, const inference::ModelMetadataRequest* request,
                         inference::ModelMetadataResponse* response) override {
    return answer(context, [&] {
      identify(service, *context, false);
      from_json(service.model_metadata(request->name(), request->version()), *response);
    });
  }
  Reactor* ModelConfig(Context* context, const inference::ModelConfigRequest* request,
                       inference::ModelConfigResponse* response) override {
    return answer(context, [&] {
      identify(service, *context, false);
      from_json(service.model_config(request->name(), request->version()),
                *response->mutable_config());
    });
  }
  Reactor* ModelStatistics(Context* context, const inference::ModelStatisticsRequest* request,
                           inference::ModelStatisticsResponse* response) override {
    return answer(context, [&] {
      const auto caller = identify(service, *context, false);
      from_json(service.statistics(request->name(), request->version(), caller), *response);
    });
  }
  Reactor* RepositoryIndex(Context* context, const inference::RepositoryIndexRequest* request,
                           inference::RepositoryIndexResponse* response) override {
    return answer(context, [&] {
      identify(service, *context, false);
      from_json(cat("{\"models\":", service.repository_index(request->ready()), "}"), *response);
    });
  }

  // On the service's thread that may wait: gRPC's are for all calls.
  Reactor* later(Context* context, std::function<void(const Caller&)> act) {
    const auto call = UnaryCall::make(service, *context);
    const auto refused = attempt([&] {
      errands.add([call, caller = identify(service, *context, false), act = std::move(act)] {
        if (!call->ended()) call->end(attempt([&] { act(caller); }));
      });
    });
    if (!refused.ok()) call->end(refused);
    return call.get();
  }
  Reactor* RepositoryModelLoad(Context* context,
                               const inference::RepositoryModelLoadRequest* request,
                               inference::RepositoryModelLoadResponse*) override {
    return later(context,
                 [this, name = request->model_name(), parameters = request->parameters()](
                     const Caller& caller) { service.load(name, to_json(parameters), caller); });
  }
  Reactor* RepositoryModelUnload(Context* context,
                                 const inference::RepositoryModelUnloadRequest* request,
                                 inference::RepositoryModelUnloadResponse*) override {
    return later(context, [this, name = request->model_name()](const Caller& caller) {
      service.unload(name, caller);
    });
  }

  Reactor* ModelInfer(Context* context, const InferMessage* given,
                      inference::ModelInferResponse* response) override {
    const auto call = UnaryCall::make(service, *context);
    // gRPC's message goes with the call; the pool may still read from it after a cancel.
    const auto message = std::make_shared<InferMessage>();
    message->Swap(const_cast<InferMessage*>(given));
    const auto refused = attempt([&] {
      const auto caller = identify(service, *context);
      unread.check(caller);
      auto request = to_request(message, service, *context);
      const bool words = request.prompt.has_value();
      const auto on_answer = [this, call, response, words, tenant = caller.tenant](Answer answer) {
        if (!call->claim()) return;
        const Outcome outcome = answer.outcome;
        if (words && outcome.ok()) add_text(answer.text, *response);
        if (outcome.ok()) to_message(std::move(answer), *response);
        // gRPC has the message and its bytes.
        call->answer(outcome, unread, tenant, 2 * response->ByteSizeLong());
      };
      call->set_ticket(service.submit(std::move(request), caller, "grpc", on_answer));
    });
    if (!refused.ok()) {
      log_refused(service, *context, refused, *message);
      call->end(refused);
    }
    return call.get();
  }

  grpc::ServerBidiReactor<InferMessage, StreamMessage>* ModelStreamInfer(
      Context* context) override {
    std::shared_ptr<StreamCall> call;
    bool late = false;
    {
      const MutexLock lock(mutex);
      const uint64_t number = next_stream++;
      call = std::make_shared<StreamCall>(service, unread, *context, cat("grpc ", number),
                                          [this, number] { forget(number); });
      streams[number] = call;
      late = stopping;
    }
    call->start();
    if (late) call->stop_reading();
    return call.get();
  }
  void forget(uint64_t stream) {
    const MutexLock lock(mutex);
    streams.erase(stream);
  }

  serve::Service& service;  // not gRPC's
  Unread unread;
  Unserved unserved;
  std::string address;
  Mutex mutex;
  std::map<uint64_t, std::shared_ptr<StreamCall>> streams YOKE_GUARDED_BY(mutex);
  uint64_t next_stream YOKE_GUARDED_BY(mutex) = 0;
  bool stopping YOKE_GUARDED_BY(mutex) = false;
  Errands::Client errands{service.errands()};
  std::unique_ptr<grpc::Server> server;
};

GrpcFront::GrpcFront(Service& service, const GrpcOptions& options)
    : impl_(std::make_unique<Impl>(service, options)) {}
GrpcFront::~GrpcFront() = default;
std::string GrpcFront::address() const { return impl_->address; }
void GrpcFront::shut_down(Time deadline) { impl_->shut_down(deadline); }

}  // namespace yoke::serve
