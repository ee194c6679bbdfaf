// SPDX-License-Identifier: Apache-2.0
#include <google/protobuf/stubs/logging.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "inference.grpc.pb.h"
#include "yoke/serve/check.h"
#include "yoke/serve/grpc/messages.h"
#include "yoke/serve/grpc_front.h"
#include "yoke/serve/keys.h"
#include "yoke/serve/stand_in.h"
#include "yoke/serve/worker.h"

using namespace yoke;
using namespace yoke::serve;
using namespace std::chrono_literals;

namespace {

using Stub = inference::GRPCInferenceService::Stub;
using Message = inference::ModelInferRequest;
using Reply = inference::ModelInferResponse;
using StreamReply = inference::ModelStreamInferResponse;
using Code = grpc::StatusCode;

Time soon() { return SteadyClock().now() + 20s; }

// Gives its inputs back, as out_NAME.
class Echo final : public Runner {
 public:
  explicit Echo(const ReplicaSpec& spec) {
    for (const auto& text : spec.inputs) {
      facts_.inputs.push_back(plan::parse_port(text));
      facts_.outputs.push_back(facts_.inputs.back());
      facts_.outputs.back().name = "out_" + facts_.outputs.back().name;
    }
  }
  const Facts& facts() const override { return facts_; }
  void run(const serve::Call& call, Outputs& outputs) override {
    for (const auto& input : call.inputs) {
      const auto room = outputs.add(input.type, input.shape, input.bytes);
      std::memcpy(room.data(), input.data, input.bytes);
    }
  }

 private:
  Facts facts_;
};

// Goes on with the prompt by saying how it was asked, in three pieces.
class Words final : public Runner {
 public:
  Words() { facts_.has_words = true; }
  const Facts& facts() const override { return facts_; }
  void run(const serve::Call&, Outputs&) override {}
  void generate(const std::string& prompt, const std::string& how,
                const std::function<bool(std::string_view)>& on_text) override {
    const auto asked = parse_prompt(prompt, how);
    on_text(asked.text + "!");
    on_text(cat(" ", asked.tokens, " ", asked.temperature, " ", asked.top_k));
    on_text(cat(" ", asked.top_p, " ", asked.seed));
  }

 private:
  Facts facts_;
};
constexpr const char* kSaid = "Hi! 7 0.5 3 0.25 11";

std::unique_ptr<Runner> open_runner(const ReplicaSpec& spec) {
  if (spec.path == "echo") return std::make_unique<Echo>(spec);
  if (spec.path == "words") return std::make_unique<Words>();
  return open_stand_in(spec);
}

const std::vector<std::string> kTypes = {"b:BOOL[2]",     "u8:UINT8[2]",   "u16:UINT16[2]",
                                         "u32:UINT32[2]", "u64:UINT64[2]", "i8:INT8[2]",
                                         "i16:INT16[2]",  "i32:INT32[2]",  "i64:INT64[2]",
                                         "f32:FP32[2]",   "f64:FP64[2]",   "t:BYTES[2]"};

Config usual() {
  Config config{.serve = {.start_s = 20},
                .models = {{.name = "double", .path = "stand-in:"},
                           {.name = "slow", .path = "stand-in:ms=2000"},
                           {.name = "uneven", .path = "stand-in:jitter_ms=3", .replicas = 2},
                           {.name = "types", .path = "echo", .input = kTypes},
                           {.name = "words", .path = "words"}},
                .tenants = {{.name = "default"}}};
  for (auto& model : config.models) model.devices = "cpu";
  return config;
}

struct Server {
  explicit Server(Config config = usual(), GrpcOptions options = {.address = "127.0.0.1:0"},
                  ServiceHooks hooks = {})
      : service(config,
                {.workers = {.open = open_runner}, .slab_bytes = 1 << 22, .stuck_floor = 20s},
                quiet(), metrics, std::move(hooks)) {
    service.pool().wait_ready(20s);
    front = std::make_unique<GrpcFront>(service, options);
    channel = grpc::CreateChannel(front->address(), grpc::InsecureChannelCredentials());
    stub = inference::GRPCInferenceService::NewStub(channel);
  }
  static observe::Log quiet() { return observe::Log({.level = observe::Level::Off}); }

  observe::Registry metrics;
  Service service;
  std::unique_ptr<GrpcFront> front;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<Stub> stub;
};

struct Context : grpc::ClientContext {
  explicit Context(std::initializer_list<std::pair<const char*, const char*>> metadata = {}) {
    set_deadline(std::chrono::system_clock::now() + 20s);
    for (const auto& [name, value] : metadata) AddMetadata(name, value);
  }
};

template <typename T>
std::string packed(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

Message message_for(const std::string& model, float first = 1, const std::string& id = "") {
  Message message;
  message.set_model_name(model);
  message.set_id(id);
  auto& input = *message.add_inputs();
  input.set_name("x");
  input.set_datatype("FP32");
  input.add_shape(1);
  input.add_shape(4);
  message.add_raw_input_contents(packed<float>({first, 2, 3, 4}));
  return message;
}

Message typed_message() {
  Message message;
  message.set_model_name("types");
  for (const auto& text : kTypes) {
    const auto port = plan::parse_port(text);
    auto& input = *message.add_inputs();
    input.set_name(port.name);
    input.set_datatype(plan::type_name(port.type));
    input.add_shape(2);
    auto& contents = *input.mutable_contents();
    for (const int value : {1, 0}) {
      if (port.name == "b") contents.add_bool_contents(value == 1);
      if (port.name[0] == 'u' && port.name != "u64") contents.add_uint_contents(uint32_t(value));
      if (port.name == "u64") contents.add_uint64_contents(UINT64_MAX - uint64_t(value));
      if (port.name[0] == 'i' && port.name != "i64") contents.add_int_contents(-value);
      if (port.name == "i64") contents.add_int64_contents(INT64_MIN + value);
      if (port.name == "f32") contents.add_fp32_contents(float(value) / 3);
      if (port.name == "f64") contents.add_fp64_contents(value / 3.);
      if (port.name == "t") contents.add_bytes_contents(value == 1 ? "one" : "");
    }
  }
  return message;
}

Message prompt_message(bool pieces) {
  Message message;
  message.set_model_name("words");
  message.set_id("p");
  auto& input = *message.add_inputs();
  input.set_name("text_input");
  input.set_datatype("BYTES");
  input.add_shape(1);
  input.mutable_contents()->add_bytes_contents("Hi");
  auto& parameters = *message.mutable_parameters();
  parameters["max_tokens"].set_int64_param(7);
  parameters["temperature"].set_double_param(0.5);
  parameters["top_k"].set_uint64_param(3);
  parameters["top_p"].set_double_param(0.25);
  parameters["seed"].set_int64_param(11);
  parameters["stream"].set_bool_param(pieces);
  return message;
}

grpc::Status infer(Server& server, const Message& message, Reply* reply = nullptr) {
  Context context;
  Reply unread;
  return server.stub->ModelInfer(&context, message, reply ? reply : &unread);
}

std::string text_of(const Reply& reply) {
  if (reply.outputs_size() != 1 || reply.outputs(0).name() != "text_output") return "no text";
  return reply.raw_output_contents(0).substr(4);
}

// Sends all from another thread, and reads until the end.
std::vector<StreamReply> stream(Server& server, const std::vector<Message>& messages,
                                grpc::Status& status, Context& context) {
  auto call = server.stub->ModelStreamInfer(&context);
  std::jthread sender([&] {
    for (const auto& message : messages)
      if (!call->Write(message)) break;
    call->WritesDone();
  });
  std::vector<StreamReply> replies;
  for (StreamReply reply; call->Read(&reply);) replies.push_back(reply);
  sender.join();
  status = call->Finish();
  return replies;
}

size_t waiting(Server& server) { return server.service.pool().view().tenants.at(0).waiting; }
void wait_until(const std::function<bool()>& holds) {
  for (const Time deadline = soon(); !holds(); std::this_thread::yield())
    ASSERT_LT(SteadyClock().now(), deadline);
}

}  // namespace

TEST(GrpcFront, GivesWhatTheModelGives) {
  Server server;
  Reply reply;
  const auto status = infer(server, message_for("double", 1, "row 17"), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(reply.model_name(), "double");
  EXPECT_EQ(reply.model_version(), "1");
  EXPECT_EQ(reply.id(), "row 17");
  ASSERT_EQ(reply.outputs_size(), 1);
  EXPECT_EQ(reply.outputs(0).name(), "y");
  EXPECT_EQ(reply.outputs(0).datatype(), "FP32");
  EXPECT_EQ(reply.outputs(0).shape(0), 1);
  EXPECT_EQ(reply.outputs(0).shape(1), 4);
  ASSERT_EQ(reply.raw_output_contents_size(), 1);
  EXPECT_EQ(reply.raw_output_contents(0), packed<float>({2, 4, 6, 8}));
}

TEST(GrpcFront, PacksTypedContentsAsTheirDatatype) {
  Server server;
  Reply reply;
  const auto status = infer(server, typed_message(), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(reply.raw_output_contents_size(), int(kTypes.size()));
  const std::vector<std::string> wanted = {packed<uint8_t>({1, 0}),
                                           packed<uint8_t>({1, 0}),
                                           packed<uint16_t>({1, 0}),
                                           packed<uint32_t>({1, 0}),
                                           packed<uint64_t>({UINT64_MAX - 1, UINT64_MAX}),
                                           packed<int8_t>({-1, 0}),
                                           packed<int16_t>({-1, 0}),
                                           packed<int32_t>({-1, 0}),
                                           packed<int64_t>({INT64_MIN + 1, INT64_MIN}),
                                           packed<float>({1.f / 3, 0}),
                                           packed<double>({1. / 3, 0}),
                                           std::string("\3\0\0\0one\0\0\0\0", 11)};
  for (int i = 0; i < reply.outputs_size(); ++i)
    EXPECT_EQ(reply.raw_output_contents(i), wanted[size_t(i)]) << reply.outputs(i).name();
}

TEST(GrpcFront, GivesAnOutputOnceThatIsAskedForTwice) {
  Server server;
  Message message = typed_message();
  for (const char* name : {"out_i8", "out_t", "out_i8"}) message.add_outputs()->set_name(name);
  Reply reply;
  const auto status = infer(server, message, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(reply.outputs_size(), 2);
  EXPECT_EQ(reply.outputs(0).name(), "out_i8");
  EXPECT_EQ(reply.raw_output_contents(0), packed<int8_t>({-1, 0}));
  EXPECT_EQ(reply.raw_output_contents(1), std::string("\3\0\0\0one\0\0\0\0", 11));
}

TEST(GrpcFront, SaysWhatIsWrongWithARequest) {
  Server server;
  using Change = std::function<void(Message&)>;
  struct Case {
    const char* says;
    Change change;
    Code code = Code::INVALID_ARGUMENT;
  };
  const auto parameter = [](const char* name, auto&& set) -> Change {
    return [=](Message& message) { set((*message.mutable_parameters())[name]); };
  };
  const std::vector<Case> cases = {
      {"got 2", [](auto& m) { m.add_raw_input_contents("more"); }},
      {"'x' has contents",
       [](auto& m) { m.mutable_inputs(0)->mutable_contents()->add_fp32_contents(1); }},
      {"wanted 16 bytes", [](auto& m) { m.set_raw_input_contents(0, "short"); }},
      {"wanted 16 bytes", [](auto& m) { m.clear_raw_input_contents(); }},
      {"'FP31'", [](auto& m) { m.mutable_inputs(0)->set_datatype("FP31"); }},
      {"wanted fp32_contents for FP32, got int_contents",
       [](auto& m) {
         m.clear_raw_input_contents();
         m.mutable_inputs(0)->mutable_contents()->add_int_contents(1);
       }},
      {"wanted raw_input_contents for FP16",
       [](auto& m) {
         m.clear_raw_input_contents();
         m.mutable_inputs(0)->set_datatype("FP16");
         m.mutable_inputs(0)->mutable_contents()->add_fp32_contents(1);
       }},
      {"300 is no UINT8",
       [](auto& m) {
         m = typed_message();
         m.mutable_inputs(1)->mutable_contents()->set_uint_contents(0, 300);
       }},
      {"-129 is no INT8",
       [](auto& m) {
         m = typed_message();
         m.mutable_inputs(5)->mutable_contents()->set_int_contents(0, -129);
       }},
      {"'priority': wanted uint64_param",
       parameter("priority", [](auto& p) { p.set_bool_param(1); })},
      {"got int64_param: -1", parameter("priority", [](auto& p) { p.set_int64_param(-1); })},
      {"'timeout'", parameter("timeout", [](auto& p) { p.set_string_param("1"); })},
      {"'sequence_id'", parameter("sequence_id", [](auto& p) { p.set_double_param(1); })},
      {"'sequence_start': wanted bool_param",
       parameter("sequence_start", [](auto& p) { p.set_int64_param(1); })},
      {"wanted none that begins with triton_, got 'triton_a'",
       parameter("triton_a", [](auto& p) { p.set_int64_param(1); })},
      {"'yoke_stream': wanted string_param, got none", parameter("yoke_stream", [](auto&) {})},
      {"shared_memory_region",
       [](auto& m) {
         (*m.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
       },
       Code::UNIMPLEMENTED},
      {"no output 'z'", [](auto& m) { m.add_outputs()->set_name("z"); }},
      {"nobody", [](auto& m) { m.set_model_name("nobody"); }, Code::NOT_FOUND},
      {"version 7", [](auto& m) { m.set_model_version("7"); }, Code::NOT_FOUND},
      {"begins with -1",
       [](auto& m) {
         m.set_raw_input_contents(0, packed<float>({-1, 0, 0, 0}));
       },
       Code::INTERNAL},
  };
  for (const auto& one : cases) {
    auto message = message_for("double");
    one.change(message);
    const auto status = infer(server, message);
    EXPECT_EQ(status.error_code(), one.code) << one.says;
    EXPECT_NE(status.error_message().find(one.says), std::string::npos)
        << one.says << " is not in: " << status.error_message();
  }
}

// Requests of every form, cut short and changed at random: each is no message, or read, or refused.
TEST(GrpcMessages, AnyBytesAreReadOrRefused) {
  Server server;
  Reply packed_inputs;
  ASSERT_TRUE(infer(server, typed_message(), &packed_inputs).ok());
  std::vector<Message> seeds{typed_message(), typed_message(), prompt_message(true),
                             message_for("double", 1, "id")};
  for (auto& input : *seeds[1].mutable_inputs()) input.clear_contents();
  *seeds[1].mutable_raw_input_contents() = packed_inputs.raw_output_contents();
  auto& parameters = *seeds[3].mutable_parameters();
  for (const char* name : {"timeout", "priority", "sequence_id"})
    parameters[name].set_int64_param(1'000'000);
  parameters["yoke_stream"].set_string_param("s");
  for (const char* name : {"y", "y"}) seeds[3].add_outputs()->set_name(name);

  const google::protobuf::LogSilencer quiet;  // of names that are not UTF-8
  grpc::CallbackServerContext context;
  std::map<Status, int> seen;
  const auto read = [&](const std::string& bytes) {
    const auto message = std::make_shared<Message>();
    if (!message->ParseFromString(bytes)) return;
    const auto outcome = attempt([&] {
      auto request = to_request(message, server.service, context);
      wants_pieces(*message);
      check_request(request.model, *server.service.facts(request.model, request.version), request);
    });
    ASSERT_EQ(outcome.ok(), outcome.text.empty());
    ASSERT_NE(outcome.status, Status::Internal) << outcome.text;
    ++seen[outcome.status];
  };
  std::mt19937 random(17);
  for (const auto& seed : seeds) {
    const std::string whole = seed.SerializeAsString();
    read(whole);
    ASSERT_EQ(seen.rbegin()->first, Status::Ok) << "a seed is refused";
    seen.clear();
    for (size_t size = 0; size < whole.size(); ++size) read(whole.substr(0, size));
    for (int i = 0; i < 5000; ++i) {
      std::string bytes = whole;
      for (uint32_t left = 1 + random() % 4; left > 0; --left) {
        const size_t at = random() % bytes.size(), count = 1 + random() % 8;
        if (random() % 4 > 0)
          bytes[at] = char(random() % 2 > 0 ? random() : bytes[at] ^ 1 << random() % 8);
        else if (random() % 2 > 0)
          bytes.insert(at, bytes.substr(random() % bytes.size(), count));
        else if (bytes.size() > count)
          bytes.erase(at, count);
      }
      read(bytes);
    }
    EXPECT_GT(seen[Status::Ok], 0);
    EXPECT_GT(seen[Status::Invalid], 0);
    seen.clear();
  }
}

TEST(GrpcFront, IgnoresParametersOfOthers) {
  Server server;
  auto message = message_for("double");
  (*message.mutable_parameters())["colour"].set_string_param("red");
  (*message.mutable_parameters())["priority"].set_uint64_param(1);
  (*message.mutable_parameters())["timeout"].set_int64_param(20'000'000);
  (*message.mutable_parameters())["sequence_id"].set_string_param("s");
  const auto status = infer(server, message);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(GrpcFront, DescribesServerAndModels) {
  Server server;
  inference::ServerLiveResponse live;
  inference::ServerReadyResponse ready;
  Context first, second, third, fourth, fifth, sixth, seventh;
  EXPECT_TRUE(server.stub->ServerLive(&first, {}, &live).ok());
  EXPECT_TRUE(server.stub->ServerReady(&second, {}, &ready).ok());
  EXPECT_TRUE(live.live() && ready.ready());
  inference::ServerMetadataResponse about;
  EXPECT_TRUE(server.stub->ServerMetadata(&third, {}, &about).ok());
  EXPECT_EQ(about.name(), "yoke");
  EXPECT_GT(about.extensions_size(), 3);
  inference::ModelMetadataRequest model;
  model.set_name("double");
  inference::ModelMetadataResponse metadata;
  EXPECT_TRUE(server.stub->ModelMetadata(&fourth, model, &metadata).ok());
  ASSERT_EQ(metadata.inputs_size(), 1);
  EXPECT_EQ(metadata.inputs(0).ShortDebugString(),
            "name: \"x\" datatype: \"FP32\" shape: -1 shape: 4");
  inference::ModelConfigRequest which;
  which.set_name("types");
  inference::ModelConfigResponse config;
  EXPECT_TRUE(server.stub->ModelConfig(&fifth, which, &config).ok());
  EXPECT_EQ(config.config().name(), "types");
  ASSERT_EQ(config.config().input_size(), int(kTypes.size()));
  EXPECT_EQ(config.config().input(11).data_type(), inference::TYPE_STRING);
  inference::RepositoryIndexResponse index;
  EXPECT_TRUE(server.stub->RepositoryIndex(&sixth, {}, &index).ok());
  EXPECT_EQ(index.models_size(), 5);
  EXPECT_EQ(index.models(0).state(), "READY");
  EXPECT_TRUE(infer(server, message_for("double")).ok());
  inference::ModelStatisticsRequest of;
  of.set_name("double");
  inference::ModelStatisticsResponse statistics;
  EXPECT_TRUE(server.stub->ModelStatistics(&seventh, of, &statistics).ok());
  ASSERT_EQ(statistics.model_stats_size(), 1);
  EXPECT_EQ(statistics.model_stats(0).inference_count(), 1u);
  EXPECT_EQ(statistics.model_stats(0).inference_stats().success().count(), 1u);
  EXPECT_GT(statistics.model_stats(0).inference_stats().success().ns(), 0u);
}

TEST(GrpcFront, AModelThatIsNotThereIsNotReady) {
  Server server;
  inference::ModelReadyRequest request;
  inference::ModelReadyResponse there, unknown;
  Context first, second;
  request.set_name("double");
  EXPECT_TRUE(server.stub->ModelReady(&first, request, &there).ok());
  request.set_name("nobody");
  EXPECT_TRUE(server.stub->ModelReady(&second, request, &unknown).ok());
  EXPECT_TRUE(there.ready());
  EXPECT_FALSE(unknown.ready());
}

TEST(GrpcFront, AsksForAKeyButNotForHealth) {
  Config config = usual();
  config.tenants = {{.name = "a", .key_sha256 = sha256("key of a")}};
  Server server(config);
  const auto code = [&](std::initializer_list<std::pair<const char*, const char*>> metadata) {
    Context context(metadata);
    Reply reply;
    return server.stub->ModelInfer(&context, message_for("double"), &reply).error_code();
  };
  EXPECT_EQ(code({}), Code::UNAUTHENTICATED);
  EXPECT_EQ(code({{"yoke-key", "another"}}), Code::UNAUTHENTICATED);
  EXPECT_EQ(code({{"yoke-key", "key of a"}}), Code::OK);
  EXPECT_EQ(code({{"authorization", "Bearer key of a"}}), Code::OK);
  Context keyless, health, unload({{"yoke-key", "key of a"}});
  auto call = server.stub->ModelStreamInfer(&keyless);
  StreamReply reply;
  EXPECT_FALSE(call->Read(&reply));
  EXPECT_EQ(call->Finish().error_code(), Code::UNAUTHENTICATED);
  inference::ServerReadyResponse ready;
  EXPECT_TRUE(server.stub->ServerReady(&health, {}, &ready).ok());
  inference::RepositoryModelUnloadRequest request;
  inference::RepositoryModelUnloadResponse unloaded;
  request.set_model_name("double");
  EXPECT_EQ(server.stub->RepositoryModelUnload(&unload, request, &unloaded).error_code(),
            Code::PERMISSION_DENIED);
}

TEST(GrpcFront, AKeyThatIsTakenAwayIsUnknownInAStreamThatIsOpen) {
  Config config = usual();
  config.tenants = {{.name = "a", .key_sha256 = sha256("key of a")}};
  Config later = config;
  later.tenants[0].key_sha256 = sha256("another");
  Server server(config, {.address = "127.0.0.1:0"}, {.reread = [later] { return later; }});
  Context context({{"yoke-key", "key of a"}});
  auto call = server.stub->ModelStreamInfer(&context);
  StreamReply before, after;
  EXPECT_TRUE(call->Write(message_for("double")) && call->Read(&before));
  EXPECT_EQ(before.error_message(), "");
  server.service.reload();
  EXPECT_TRUE(call->Write(message_for("double")) && call->Read(&after));
  EXPECT_NE(after.error_message().find("the key is not known"), std::string::npos)
      << after.error_message();
}

TEST(GrpcFront, LogsWhatItRefusesWithWhatIsKnown) {
  const auto path = std::filesystem::temp_directory_path() / cat("yoke-grpc-", ::getpid(), ".log");
  Config config = usual();
  config.tenants = {{.name = "a", .key_sha256 = sha256("key of a")}};
  config.serve.access_log = path.string();
  {
    Server server(config);
    Message message = message_for("double", 1, "g1");
    message.mutable_inputs(0)->set_datatype("FP99");
    Context known({{"yoke-key", "key of a"}, {"traceparent", "00-7"}}), unknown;
    Reply reply;
    EXPECT_FALSE(server.stub->ModelInfer(&known, message, &reply).ok());
    EXPECT_FALSE(server.stub->ModelInfer(&unknown, message, &reply).ok());
  }
  std::ifstream file(path);
  const std::string log{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  EXPECT_NE(log.find(R"("id":"g1","traceparent":"00-7","tenant":"a","model":"double")"), log.npos)
      << log;
  EXPECT_NE(log.find(R"("id":"g1","traceparent":"","tenant":"","model":"double")"), log.npos)
      << log;
}

TEST(GrpcFront, TellsWhenToComeAgain) {
  Config config = usual();
  config.tenants[0].max_queue = 1;
  Server server(config);
  Context first, second;
  Reply unread, reply;
  std::promise<void> ended;
  const auto slow = message_for("slow");
  server.stub->async()->ModelInfer(&first, &slow, &unread,
                                   [&](const grpc::Status&) { ended.set_value(); });
  wait_until([&] { return waiting(server) == 1; });
  EXPECT_EQ(server.stub->ModelInfer(&second, message_for("double"), &reply).error_code(),
            Code::RESOURCE_EXHAUSTED);
  EXPECT_EQ(second.GetServerTrailingMetadata().count("retry-after"), 1u);
  first.TryCancel();
  ended.get_future().wait();
}

TEST(GrpcFront, TheDeadlineOfACallEndsItsRequest) {
  Server server;
  Context context;
  context.set_deadline(std::chrono::system_clock::now() + 100ms);
  Reply reply;
  EXPECT_EQ(server.stub->ModelInfer(&context, message_for("slow"), &reply).error_code(),
            Code::DEADLINE_EXCEEDED);
  EXPECT_TRUE(server.service.pool().drain(SteadyClock().now() + 1s));  // the model needs two
}

TEST(GrpcFront, TheTimeoutOfARequestIsKept) {
  Server server;
  auto message = message_for("slow");
  (*message.mutable_parameters())["timeout"].set_int64_param(20'000);
  EXPECT_EQ(infer(server, message).error_code(), Code::DEADLINE_EXCEEDED);
}

TEST(GrpcFront, ACallThatIsCancelledDoesNotWaitOn) {
  Server server;
  Context context;
  const auto message = message_for("slow");
  Reply reply;
  std::promise<grpc::Status> ended;
  server.stub->async()->ModelInfer(&context, &message, &reply,
                                   [&](const grpc::Status& status) { ended.set_value(status); });
  wait_until([&] { return waiting(server) == 1; });
  context.TryCancel();
  EXPECT_EQ(ended.get_future().get().error_code(), Code::CANCELLED);
  EXPECT_TRUE(server.service.pool().drain(SteadyClock().now() + 1s));
}

TEST(GrpcFront, AStreamIsAnsweredInItsOrderRefusalsToo) {
  Server server;
  std::vector<Message> messages;
  for (int i = 0; i < 400; ++i) {
    messages.push_back(message_for(i % 7 == 3 ? "nobody" : "uneven", float(i + 1), cat(i)));
    if (i % 5 == 4) messages.back().mutable_inputs(0)->set_datatype("FP31");
  }
  grpc::Status status;
  Context context;
  const auto replies = stream(server, messages, status, context);
  EXPECT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(replies.size(), messages.size());
  for (size_t i = 0; i < replies.size(); ++i) {
    const auto& reply = replies[i];
    ASSERT_EQ(reply.infer_response().id(), cat(i));
    if (i % 5 == 4) {
      EXPECT_NE(reply.error_message().find("FP31"), std::string::npos) << reply.error_message();
    } else if (i % 7 == 3) {
      EXPECT_NE(reply.error_message().find("nobody"), std::string::npos) << reply.error_message();
    } else {
      EXPECT_EQ(reply.error_message(), "");
      ASSERT_EQ(reply.infer_response().raw_output_contents_size(), 1);
      EXPECT_EQ(reply.infer_response().raw_output_contents(0),
                packed<float>({2 * float(i + 1), 4, 6, 8}));
    }
  }
}

TEST(GrpcFront, AStreamOfMoreThanFitsIsReadToItsEnd) {
  Server server;
  std::vector<Message> messages;
  for (int i = 0; i < 3000; ++i) messages.push_back(message_for("double", float(i + 1), cat(i)));
  grpc::Status status;
  Context context;
  const auto replies = stream(server, messages, status, context);
  EXPECT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(replies.size(), messages.size());
  for (const auto& reply : replies) ASSERT_EQ(reply.error_message(), "");
}

TEST(GrpcFront, AStreamReadsNoMoreThanItMayHoldOfAClientThatDoesNotRead) {
  Config config = usual();
  config.tenants[0].max_queue = 1 << 20;
  Server server(config);
  Context context;
  auto call = server.stub->ModelStreamInfer(&context);
  std::jthread sender([&] {
    while (call->Write(message_for("slow"))) {
    }
  });
  wait_until([&] { return waiting(server) >= 1024; });
  for (int i = 0; i < 1000; ++i) ASSERT_LE(waiting(server), 1024u);
  context.TryCancel();
  sender.join();
  call->Finish();
  EXPECT_TRUE(server.service.pool().drain(SteadyClock().now() + 1s));  // its requests are cancelled
}

TEST(GrpcFront, AnErrorEndsAStreamThatAsksForIt) {
  Server server;
  std::vector<Message> messages;
  for (int i = 0; i < 20; ++i)
    messages.push_back(message_for(i == 3 ? "nobody" : "uneven", float(i + 1), cat(i)));
  grpc::Status status;
  Context context({{"triton_grpc_error", "true"}});
  const auto replies = stream(server, messages, status, context);
  EXPECT_EQ(replies.size(), 3u);
  EXPECT_EQ(status.error_code(), Code::NOT_FOUND);
  EXPECT_NE(status.error_message().find("nobody"), std::string::npos);
}

TEST(GrpcFront, GoesOnWithAText) {
  Server server;
  Reply reply;
  const auto status = infer(server, prompt_message(false), &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(text_of(reply), kSaid);
  EXPECT_EQ(reply.id(), "p");
}

TEST(GrpcFront, StreamsATextInPieces) {
  Server server;
  grpc::Status status;
  Context context;
  const auto replies =
      stream(server, {prompt_message(true), prompt_message(false)}, status, context);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(replies.size(), 3u);
  std::string text;
  for (size_t i = 0; i + 2 < replies.size(); ++i) {
    text += text_of(replies[i].infer_response());
    EXPECT_EQ(replies[i].infer_response().id(), "p");
    EXPECT_EQ(replies[i].infer_response().model_version(), "1");
    EXPECT_FALSE(replies[i].infer_response().parameters().contains("triton_final_response"));
  }
  EXPECT_EQ(text, kSaid);
  const auto& last = replies[replies.size() - 2].infer_response();
  EXPECT_TRUE(last.parameters().at("triton_final_response").bool_param());
  EXPECT_EQ(last.outputs_size(), 0);
  EXPECT_EQ(text_of(replies.back().infer_response()), kSaid);
}

TEST(GrpcFront, PiecesAndOtherStreamsWaitForTheirTurn) {
  Server server;
  std::vector<Message> messages{message_for("slow", 1, "first"), prompt_message(true),
                                message_for("double", 1, "last")};
  (*messages[0].mutable_parameters())["yoke_stream"].set_string_param("a");
  (*messages[2].mutable_parameters())["yoke_stream"].set_string_param("b");
  grpc::Status status;
  Context context;
  const auto replies = stream(server, messages, status, context);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_GE(replies.size(), 4u);
  EXPECT_EQ(replies.front().infer_response().id(), "first");
  EXPECT_EQ(replies.back().infer_response().id(), "last");
}

TEST(GrpcFront, LoadsAndUnloads) {
  Server server;
  const auto unload = [&](const char* name) {
    Context context;
    inference::RepositoryModelUnloadRequest request;
    inference::RepositoryModelUnloadResponse response;
    request.set_model_name(name);
    return server.stub->RepositoryModelUnload(&context, request, &response).error_code();
  };
  const auto load = [&](const char* name, const char* parameter = nullptr) {
    Context context;
    inference::RepositoryModelLoadRequest request;
    inference::RepositoryModelLoadResponse response;
    request.set_model_name(name);
    if (parameter) (*request.mutable_parameters())[parameter].set_bytes_param("a file");
    return server.stub->RepositoryModelLoad(&context, request, &response).error_code();
  };
  EXPECT_EQ(unload("double"), Code::OK);
  EXPECT_NE(infer(server, message_for("double")).error_code(), Code::OK);
  EXPECT_EQ(load("double"), Code::OK);
  EXPECT_EQ(infer(server, message_for("double")).error_code(), Code::OK);
  EXPECT_EQ(load("nobody"), Code::NOT_FOUND);
  EXPECT_EQ(unload("nobody"), Code::NOT_FOUND);
  EXPECT_EQ(load("double", "file:model.pt"), Code::UNIMPLEMENTED);
}

TEST(GrpcFront, AnAdminIsNoTenantAndNeedsNone) {
  auto config = usual();
  config.serve.admin_key_sha256 = {sha256("root")};
  config.tenants = {{.name = "ann", .key_sha256 = sha256("hers")}};
  Server server(config);
  const auto ask = [&](const char* key) {
    inference::RepositoryModelUnloadResponse unloaded;
    inference::RepositoryModelLoadResponse loaded;
    inference::ModelStatisticsResponse statistics;
    inference::RepositoryIndexResponse index;
    inference::RepositoryModelUnloadRequest unload;
    inference::RepositoryModelLoadRequest load;
    unload.set_model_name("double"), load.set_model_name("double");
    Context of_unload{{"yoke-key", key}}, of_load{{"yoke-key", key}}, of_index{{"yoke-key", key}},
        of_statistics{{"yoke-key", key}};
    return std::vector<Code>{
        server.stub->RepositoryModelUnload(&of_unload, unload, &unloaded).error_code(),
        server.stub->RepositoryModelLoad(&of_load, load, &loaded).error_code(),
        server.stub->ModelStatistics(&of_statistics, {}, &statistics).error_code(),
        server.stub->RepositoryIndex(&of_index, {}, &index).error_code()};
  };
  EXPECT_EQ(ask("root"), (std::vector<Code>(4, Code::OK)));
  const auto denied = Code::PERMISSION_DENIED;
  EXPECT_EQ(ask("hers"), (std::vector<Code>{denied, denied, denied, Code::OK}));
  EXPECT_EQ(ask("other"), (std::vector<Code>(4, Code::UNAUTHENTICATED)));
  Context of_infer{{"yoke-key", "root"}};
  Reply reply;
  EXPECT_EQ(server.stub->ModelInfer(&of_infer, message_for("double"), &reply).error_code(),
            Code::UNAUTHENTICATED);
}

TEST(GrpcFront, HasNoAdminWithoutAKeyWhereATenantIsNamedOrOthersCanAsk) {
  const auto statistics = [](const std::string& address, Context&& context) {
    auto config = usual();
    config.serve.grpc = address;
    config.serve.trust_tenant_header = true;
    Server server(config);
    inference::ModelStatisticsResponse response;
    return server.stub->ModelStatistics(&context, {}, &response).error_code();
  };
  EXPECT_EQ(statistics("127.0.0.1:0", Context()), Code::OK);
  EXPECT_EQ(statistics("127.0.0.1:0", Context({{"yoke-tenant", "default"}})),
            Code::PERMISSION_DENIED);
  EXPECT_EQ(statistics("0.0.0.0:0", Context()), Code::PERMISSION_DENIED);
}

TEST(GrpcFront, TakesThatALastMessageWithoutDataIsWanted) {
  Server server;
  auto message = message_for("double");
  (*message.mutable_parameters())["triton_enable_empty_final_response"].set_bool_param(true);
  EXPECT_EQ(infer(server, message).error_code(), Code::OK);
}

TEST(GrpcFront, NamesTheMethodThatItDoesNotServe) {
  Server server;
  grpc::GenericStub stub(server.channel);
  Context context;
  const grpc::Slice empty("");
  grpc::ByteBuffer request(&empty, 1), response;
  std::promise<grpc::Status> ended;
  stub.UnaryCall(&context, "/inference.GRPCInferenceService/SystemSharedMemoryStatus", {}, &request,
                 &response, [&](const grpc::Status& status) { ended.set_value(status); });
  const auto status = ended.get_future().get();
  EXPECT_EQ(status.error_code(), Code::UNIMPLEMENTED);
  EXPECT_NE(status.error_message().find("SystemSharedMemoryStatus"), std::string::npos);
}

TEST(GrpcFront, RefusesAMessageThatIsTooLarge) {
  Server server(usual(), {.address = "127.0.0.1:0", .max_body_bytes = 1000});
  auto message = message_for("double");
  message.set_raw_input_contents(0, std::string(2000, 'a'));
  EXPECT_EQ(infer(server, message).error_code(), Code::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(infer(server, message_for("double")).ok());
}

// Asks for a mebibyte, and takes it when it is told to.
struct Reluctant {
  using Call = grpc::ClientReaderWriter<Message, grpc::ByteBuffer>;
  Reluctant(const Server& server, const char* method) {
    grpc::ChannelArguments own;  // a connection that takes no more than is asked for
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    own.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    channel =
        grpc::CreateCustomChannel(server.front->address(), grpc::InsecureChannelCredentials(), own);
    const std::string path = cat("/inference.GRPCInferenceService/", method);
    call.reset(grpc::internal::ClientReaderWriterFactory<Message, grpc::ByteBuffer>::Create(
        channel.get(), {path.c_str(), grpc::internal::RpcMethod::BIDI_STREAMING}, &context));
    auto message = message_for("large");
    message.mutable_inputs(0)->set_shape(1, 1 << 18);
    message.set_raw_input_contents(0, std::string(1 << 20, '\0'));
    call->Write(message);
    call->WritesDone();
  }
  ~Reluctant() { context.TryCancel(); }
  bool takes() {
    grpc::ByteBuffer answer;
    return call->Read(&answer) && answer.Length() > 1 << 20;
  }
  Context context;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<Call> call;
};

TEST(GrpcFront, EndsSlowReadersWhereAnswersFillTheMemory) {
  auto config = usual();
  config.models.push_back(
      {.name = "large", .path = "echo", .devices = "cpu", .input = {"x:FP32[-1,-1]"}});
  for (const char* method : {"ModelInfer", "ModelStreamInfer"}) {
    Server server(config, {.address = "127.0.0.1:0", .max_unread_bytes = 4 << 20});
    Reluctant alone(server, method);  // which is less than that
    std::this_thread::sleep_for(2s);
    EXPECT_TRUE(alone.takes()) << method;
    std::deque<Reluctant> many;
    for (int i = 0; i < 5; ++i) many.emplace_back(server, method);
    std::string says;
    const auto is_refused = [&] {
      const auto status = infer(server, message_for("double"));
      says = status.error_message();
      return status.error_code() == Code::RESOURCE_EXHAUSTED;
    };
    wait_until(is_refused);
    EXPECT_NE(says.find("tenant 'default' has "), std::string::npos) << says;
    wait_until([&] { return !is_refused(); });
    EXPECT_FALSE(many[0].takes()) << method << ": it holds what others need";
    EXPECT_NE(many[0].call->Finish().error_message().find("not taken in time"), std::string::npos);
  }
}

TEST(GrpcFront, DoesNotShareAPort) {
  Server server;
  try {
    GrpcFront(server.service, {.address = server.front->address()});
    FAIL() << "two servers listen on " << server.front->address();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Io);
    EXPECT_NE(std::string(error.what()).find(server.front->address()), std::string::npos);
  }
}

TEST(GrpcFront, AShutDownWaitsForAnswersButNotForStreamsThatRest) {
  Server server;
  Context context, resting;
  const auto message = message_for("slow");
  Reply reply;
  std::promise<grpc::Status> ended;
  server.stub->async()->ModelInfer(&context, &message, &reply,
                                   [&](const grpc::Status& status) { ended.set_value(status); });
  auto call = server.stub->ModelStreamInfer(&resting);
  EXPECT_TRUE(call->Write(message_for("slow", 1, "a")));
  wait_until([&] { return waiting(server) == 2; });
  server.front->shut_down(soon());
  EXPECT_TRUE(ended.get_future().get().ok());
  EXPECT_EQ(reply.raw_output_contents_size(), 1);
  StreamReply last;
  ASSERT_TRUE(call->Read(&last));
  EXPECT_EQ(last.infer_response().id(), "a");
  EXPECT_EQ(last.error_message(), "");
  EXPECT_FALSE(call->Read(&last));
  EXPECT_EQ(call->Finish().error_code(), Code::UNAVAILABLE);
  EXPECT_EQ(infer(server, message).error_code(), Code::UNAVAILABLE);
}

TEST(GrpcFront, AShutDownCancelsWhatIsNotDoneInTime) {
  Server server;
  Context context;
  const auto message = message_for("slow");
  Reply reply;
  std::promise<grpc::Status> ended;
  server.stub->async()->ModelInfer(&context, &message, &reply,
                                   [&](const grpc::Status& status) { ended.set_value(status); });
  wait_until([&] { return waiting(server) == 1; });
  const Time begun = SteadyClock().now();
  server.front->shut_down(begun + 50ms);
  EXPECT_LT(SteadyClock().now() - begun, 1s);
  EXPECT_FALSE(ended.get_future().get().ok());
}
