// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/rest_body.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "yoke/base/rng.h"
#include "yoke/serve/rest_body_test.h"

namespace yoke::serve {
namespace {

std::shared_ptr<const std::string> body_of(const std::string& text) {
  return std::make_shared<const std::string>(text);
}

Request read(const std::string& text, std::optional<int64_t> json_bytes = {}) {
  return RestReader().read_infer(body_of(text), json_bytes);
}

// A request with one input x, and the bytes that follow it.
std::string with(const std::string& type, const std::string& shape, const std::string& rest) {
  return cat(R"({"inputs":[{"name":"x","datatype":")", type, R"(","shape":)", shape, ",", rest,
             "}]}");
}

Request read_data(const std::string& type, const std::string& shape, const std::string& data) {
  return read(with(type, shape, "\"data\":" + data));
}

template <typename T>
std::vector<T> values(const Request& request, size_t input = 0) {
  const auto data = request.inputs.at(input).data;
  std::vector<T> result(data.size() / sizeof(T));
  std::memcpy(result.data(), data.data(), data.size());
  return result;
}

template <typename Call>
Outcome refusal(const Call& call) {
  try {
    call();
  } catch (const Refused& refused) {
    return refused.outcome;
  }
  return {.text = "it was taken"};
}

void expect_refused(const std::string& body, const std::string& part,
                    Status status = Status::Invalid) {
  const auto outcome = refusal([&] { read(body); });
  EXPECT_EQ(outcome.status, status) << body;
  EXPECT_NE(outcome.text.find(part), std::string::npos) << outcome.text << "\n wanted: " << part;
}

template <typename T>
Tensor tensor_of(const std::string& name, Type type, const std::vector<T>& from) {
  return {.name = name,
          .type = type,
          .shape = {int64_t(from.size())},
          .data = {reinterpret_cast<const char*>(from.data()), from.size() * sizeof(T)}};
}

std::string written(const Tensor& output) {
  return write_answer(answer_of({output}), {}, false).body;
}

TEST(RestRead, TakesDataFlatOrNestedInItsOrder) {
  const std::vector<float> wanted{0.5f, 1, -2.25f, 1e-40f};
  for (const char* data :
       {"[0.5,1,-2.25,1e-40]", "[[0.5,1],[-2.25,1e-40]]", "[0.5,[1,[-2.25]],1e-40]"}) {
    const auto request = read_data("FP32", "[2,2]", data);
    EXPECT_EQ(values<float>(request), wanted) << data;
    EXPECT_EQ(request.inputs[0].name, "x");
    EXPECT_EQ(request.inputs[0].shape, (Shape{2, 2}));
  }
  EXPECT_TRUE(std::signbit(values<float>(read_data("FP32", "[1]", "[-0.0]"))[0]));
}

TEST(RestRead, TakesEveryDatatypeToTheEndsOfItsRange) {
  EXPECT_EQ(read_data("BOOL", "[2]", "[true,false]").inputs[0].data, std::string_view("\1\0", 2));
  EXPECT_EQ(values<uint8_t>(read_data("UINT8", "[2]", "[0,255]")), (std::vector<uint8_t>{0, 255}));
  EXPECT_EQ(values<uint16_t>(read_data("UINT16", "[1]", "[65535]"))[0], UINT16_MAX);
  EXPECT_EQ(values<uint32_t>(read_data("UINT32", "[1]", "[4294967295]"))[0], UINT32_MAX);
  EXPECT_EQ(values<uint64_t>(read_data("UINT64", "[1]", "[18446744073709551615]"))[0], UINT64_MAX);
  EXPECT_EQ(values<int8_t>(read_data("INT8", "[2]", "[-128,127]")),
            (std::vector<int8_t>{-128, 127}));
  EXPECT_EQ(values<int16_t>(read_data("INT16", "[1]", "[-32768]"))[0], INT16_MIN);
  EXPECT_EQ(values<int32_t>(read_data("INT32", "[1]", "[-2147483648]"))[0], INT32_MIN);
  EXPECT_EQ(values<int64_t>(read_data("INT64", "[1]", "[-9223372036854775808]"))[0], INT64_MIN);
  EXPECT_EQ(values<int64_t>(read_data("INT64", "[1]", "[9007199254740993]"))[0], 9007199254740993);
  EXPECT_EQ(values<double>(read_data("FP64", "[2]", "[0.1,1e308]")),
            (std::vector<double>{0.1, 1e308}));
  EXPECT_EQ(read_data("BYTES", "[2]", R"(["a\u0000b",""])").inputs[0].data,
            std::string_view("\3\0\0\0a\0b\0\0\0\0", 11));
}

TEST(RestRead, RefusesWhatDoesNotFitItsDatatype) {
  const std::vector<std::array<const char*, 2>> cases{
      {"INT8", "[128]"},      {"INT8", "[-129]"},
      {"UINT8", "[256]"},     {"UINT8", "[-1]"},
      {"UINT16", "[65536]"},  {"INT32", "[1.0]"},
      {"INT32", "[true]"},    {"INT64", "[9223372036854775808]"},
      {"UINT64", "[-1]"},     {"BOOL", "[1]"},
      {"BOOL", "[\"true\"]"}, {"FP32", "[1e39]"},
      {"FP32", "[\"1\"]"},    {"FP32", "[true]"},
      {"FP64", "[null]"},     {"FP32", "[{}]"}};
  for (const auto& [type, data] : cases)
    expect_refused(with(type, "[1]", cat("\"data\":", data)),
                   cat("wanted elements of ", type, ", got "));
  expect_refused(with("BYTES", "[1]", "\"data\":[1]"), "wanted a string, got 1");
  expect_refused(with("FP16", "[1]", "\"data\":[1]"), "send the tensor as binary");
  expect_refused(with("FP32", "[1]", "\"data\":[NaN]"), "JSON has no NaN");
}

TEST(RestRead, RefusesShapesThatDataDoesNotFill) {
  expect_refused(with("FP32", "[2,2]", "\"data\":[1,2,3]"),
                 "wanted 4 elements for FP32[2,2], got 3");
  expect_refused(with("FP32", "[2]", "\"data\":[[1],[2],[3]]"),
                 "wanted 2 elements for FP32[2], got 3");
  expect_refused(with("BYTES", "[1]", "\"data\":[]"), "wanted 1 elements for BYTES[1], got 0");
  expect_refused(with("FP32", "[1099511627776]", "\"data\":[]"), "got 0");
  expect_refused(with("FP32", "[4611686018427387904,16]", "\"data\":[]"),
                 "less than 2^63 elements");
  expect_refused(with("FP32", "[-1]", "\"data\":[1]"), "\"shape\": wanted a whole number");
  expect_refused(with("FP32", "[1.0]", "\"data\":[1]"), "got 1.0");
  expect_refused(with("FP32", "[9223372036854775808]", "\"data\":[1]"), "got 9223372036854775808");
  expect_refused(with("FP32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "\"data\":[1]"), "got 17");
}

TEST(RestRead, SaysWhatIsWrongWithAField) {
  expect_refused("", "wanted JSON");
  expect_refused("[]", "the request: wanted an object, got an array");
  expect_refused("{}", "\"inputs\": wanted an array, got nothing");
  expect_refused(R"({"inputs":["x"]})", "an input: wanted an object, got \"x\"");
  expect_refused(R"({"inputs":[{"shape":[1]}]})", "\"name\": wanted a name, got none");
  expect_refused(R"({"inputs":[],"id":17})", "\"id\": wanted a string, got 17");
  expect_refused(R"({"inputs":[],"outputs":null})", "\"outputs\": wanted an array, got null");
  expect_refused(cat(R"({"inputs":[],"id":")", std::string(201, 'a'), "\"}"),
                 "at most 200 bytes, got 201");
  expect_refused(with("FP31", "[1]", "\"data\":[1]"), "got 'FP31'");
  expect_refused(with("FP32", "[1]", "\"colour\":1"), "got neither");
  expect_refused(with("FP32", "[1]", "\"data\":[1],\"parameters\":[]"),
                 "wanted an object, got an array");
  std::string many = R"({"inputs":[)";
  for (int i = 0; i < 65; ++i) many += i > 0 ? ",{}" : "{}";
  expect_refused(many + "]}", "wanted at most 64, got 65");
  expect_refused("{\"inputs\":" + std::string(200000, '['), "wanted JSON");
}

TEST(RestRead, RefusesWhatIsNotSupported) {
  expect_refused(with("FP32", "[1]", R"("parameters":{"shared_memory_region":"r"})"),
                 "shared memory", Status::Unsupported);
  expect_refused(R"({"inputs":[],"outputs":[{"name":"y","parameters":{"classification":2}}]})",
                 "classification", Status::Unsupported);
  const auto large = refusal([] { read(std::string(kMaxJsonBytes + 1, ' ')); });
  EXPECT_EQ(large.status, Status::TooLarge) << large.text;
}

TEST(RestRead, TakesParametersOfTheRequestAndItsOutputs) {
  const auto request = read(
      R"({"id":"a","id":"b","inputs":[],"parameters":{"priority":2,"timeout":1500,"sequence_id":7,)"
      R"("sequence_start":true,"yoke_stream":"s","binary_data_output":true,"colour":"red"},)"
      R"("outputs":[{"name":"y","parameters":{"binary_data":true}},{"name":"z"},{"name":"y"}]})");
  EXPECT_EQ(request.id, "a");
  EXPECT_EQ(request.parameters.priority, 2u);
  EXPECT_EQ(request.parameters.timeout, std::chrono::microseconds(1500));
  EXPECT_EQ(request.parameters.sequence, "7");
  EXPECT_TRUE(request.parameters.sequence_start);
  EXPECT_FALSE(request.parameters.sequence_end);
  EXPECT_EQ(request.parameters.stream, "s");
  EXPECT_TRUE(request.binary_output);
  ASSERT_EQ(request.outputs.size(), 2u);  // what comes twice goes once
  EXPECT_TRUE(request.outputs[0].binary);
  EXPECT_FALSE(request.outputs[1].binary);

  const auto parameters = [](const std::string& text) {
    return "{\"inputs\":[],\"parameters\":{" + text + "}}";
  };
  EXPECT_EQ(read(parameters(R"("sequence_id":"q")")).parameters.sequence, "q");
  EXPECT_EQ(read(parameters(R"("sequence_id":0)")).parameters.sequence, "");
  EXPECT_GT(read(parameters(R"("timeout":18446744073709551615)")).parameters.timeout, Duration(0));
  expect_refused(parameters(R"("priority":"high")"), "\"priority\": wanted a whole number");
  expect_refused(parameters(R"("timeout":-1)"), "not negative, got -1");
  expect_refused(parameters(R"("sequence_start":"yes")"), "wanted true or false, got \"yes\"");
  expect_refused(parameters(R"("sequence_id":-5)"), "\"sequence_id\": wanted a string, got -5");
  expect_refused(parameters(R"("a":null)"), "\"a\": wanted a string, a number");
  expect_refused(parameters(R"("triton_a":1)"), "triton_");
}

TEST(RestRead, LeavesBinaryTensorsWhereTheyAre) {
  const auto json = with("FP32", "[2]", R"("parameters":{"binary_data_size":8})");
  const auto body = body_of(json + std::string("\0\0\x80?\0\0\0@", 8));
  const auto request = RestReader().read_infer(body, int64_t(json.size()));
  EXPECT_EQ(values<float>(request), (std::vector<float>{1, 2}));
  EXPECT_EQ(request.inputs[0].data.data(), body->data() + json.size());
  EXPECT_EQ(body.use_count(), 2);  // the request holds it

  const auto why = [&](const std::string& bytes, int64_t size) {
    return refusal([&] { read(bytes, size); }).text;
  };
  const auto size = int64_t(json.size());
  EXPECT_NE(why(json + "1234567", size).find("wanted 8 bytes after the JSON, got 7"),
            std::string::npos);
  EXPECT_NE(why(json + "123456789", size).find("after the last input's, got 1"), std::string::npos);
  EXPECT_NE(why(json, -1).find("got -1"), std::string::npos);
  EXPECT_NE(why(json, size + 1).find(cat("got ", size + 1)), std::string::npos);
  expect_refused(with("FP32", "[1]", R"("data":[1],"parameters":{"binary_data_size":0})"),
                 "got both");
}

TEST(RestRead, TakesABodyWithoutJsonForTheOneInput) {
  Facts facts{.inputs = {plan::parse_port("x:FP32[-1,2]")}, .batch = 8};
  const auto two = body_of(std::string(8, '\0'));
  EXPECT_EQ(RestReader().read_raw(two, facts).inputs[0].shape, (Shape{1, 2}));
  EXPECT_TRUE(RestReader().read_raw(two, facts).binary_output);
  auto four = RestReader().read_raw(body_of(std::string(16, '\0')), facts);
  EXPECT_EQ(refusal([&] { check_request("m", facts, four); }).status, Status::Invalid);
  facts.inputs = {plan::parse_port("x:FP32[-1,2,-1]")};
  EXPECT_EQ(RestReader().read_raw(two, facts).inputs[0].shape, (Shape{1, 2, 1}));
  facts.batch = 0;
  EXPECT_EQ(refusal([&] { RestReader().read_raw(two, facts); }).status, Status::Invalid);
  facts.inputs = {plan::parse_port("t:BYTES[1]")};
  EXPECT_EQ(RestReader().read_raw(body_of("one"), facts).inputs[0].data,
            std::string_view("\3\0\0\0one", 7));
  facts.inputs = {plan::parse_port("t:BYTES[-1]")};
  EXPECT_EQ(refusal([&] { RestReader().read_raw(two, facts); }).status, Status::Invalid);
  facts.inputs.push_back(facts.inputs[0]);
  EXPECT_EQ(refusal([&] { RestReader().read_raw(two, facts); }).status, Status::Invalid);
}

TEST(RestRead, TakesPrompts) {
  RestReader reader;
  const auto request = reader.read_generate(
      R"({"text_input":"Once","max_tokens":8,"id":"g","parameters":{"max_tokens":9,)"
      R"("temperature":1,"top_k":5,"top_p":0.9,"seed":18446744073709551615,"timeout":10}})");
  ASSERT_TRUE(request.prompt);
  EXPECT_EQ(request.prompt->text, "Once");
  EXPECT_EQ(request.prompt->tokens, 8);  // beside the text it counts first
  EXPECT_EQ(request.prompt->temperature, 1);
  EXPECT_EQ(request.prompt->top_k, 5);
  EXPECT_EQ(request.prompt->top_p, 0.9);
  EXPECT_EQ(request.prompt->seed, UINT64_MAX);
  EXPECT_EQ(request.id, "g");
  EXPECT_EQ(request.parameters.timeout, std::chrono::microseconds(10));
  EXPECT_EQ(reader.read_generate(R"({"text_input":""})").prompt->tokens, Prompt().tokens);
  for (const char* bad :
       {"{}", R"({"text_input":1})", R"({"text_input":"","seed":-1})",
        R"({"text_input":"","max_tokens":"8"})", R"({"text_input":"","stream":1})"})
    EXPECT_EQ(refusal([&] { reader.read_generate(bad); }).status, Status::Invalid) << bad;
}

TEST(RestRead, TakesAnIndexWithAndWithoutABody) {
  RestReader reader;
  EXPECT_FALSE(reader.read_index(""));
  EXPECT_FALSE(reader.read_index("{}"));
  EXPECT_TRUE(reader.read_index(R"({"ready":true})"));
  EXPECT_EQ(refusal([&] { reader.read_index(R"({"ready":"yes"})"); }).status, Status::Invalid);
}

TEST(RestRead, ReadsTheSameWithAndWithoutRoomBehindIt) {
  const auto text = with("FP32", "[2]", "\"data\":[1,2]");
  auto roomy = std::make_shared<std::string>(text), tight = std::make_shared<std::string>(text);
  roomy->reserve(text.size() + 64);
  tight->shrink_to_fit();
  EXPECT_EQ(values<float>(RestReader().read_infer(roomy, {})), (std::vector<float>{1, 2}));
  EXPECT_EQ(values<float>(RestReader().read_infer(tight, {})), (std::vector<float>{1, 2}));
}

TEST(RestWrite, GivesNumbersInFewDigitsThatReadBack) {
  const std::vector<float> floats{0, -0.0f, 0.1f, 1e-40f, 16777216, 3e38f};
  EXPECT_EQ(written(tensor_of("y", Type::Fp32, floats)),
            R"({"model_name":"m","model_version":"1","outputs":[{"name":"y","datatype":"FP32",)"
            R"("shape":[6],"data":[0.0,-0.0,0.1,1e-40,16777216.0,3e+38]}]})");
  const auto has = [](const Tensor& output, const std::string& data) {
    return written(output).find("\"data\":[" + data + "]") != std::string::npos;
  };
  const double infinity = INFINITY;
  EXPECT_TRUE(has(tensor_of<double>("y", Type::Fp64, {0.1, std::nan(""), infinity, -infinity}),
                  "0.1,NaN,Infinity,-Infinity"));
  EXPECT_TRUE(has(tensor_of<uint8_t>("y", Type::Bool, {1, 0, 7}), "true,false,true"));
  EXPECT_TRUE(has(tensor_of<uint8_t>("y", Type::Uint8, {0, 255}), "0,255"));
  EXPECT_TRUE(has(tensor_of<int8_t>("y", Type::Int8, {-128, 127}), "-128,127"));
  EXPECT_TRUE(has(tensor_of<int64_t>("y", Type::Int64, {INT64_MIN}), "-9223372036854775808"));
  EXPECT_TRUE(has(tensor_of<uint64_t>("y", Type::Uint64, {UINT64_MAX}), "18446744073709551615"));
}

TEST(RestWrite, GivesStringsAndRefusesWhatJsonCannotSay) {
  const auto bytes = [](std::string_view data) {
    return Tensor{.name = "y", .type = Type::Bytes, .shape = {1}, .data = data};
  };
  EXPECT_NE(written(bytes({"\6\0\0\0\"\\\n\xc3\xa4\0", 10})).find(R"(["\"\\\u000aä\u0000"])"),
            std::string::npos);
  EXPECT_EQ(refusal([&] { written(bytes({"\1\0\0\0\xff", 5})); }).status, Status::Invalid);
  EXPECT_EQ(refusal([&] { written(bytes({"\4\0\0\0one", 7})); }).status, Status::Internal);
  EXPECT_EQ(refusal([&] { written(tensor_of<uint16_t>("y", Type::Fp16, {0})); }).status,
            Status::Invalid);
  EXPECT_EQ(write_error("a \"b\" \xff\xc3\xa4\xc3"),
            "{\"error\":\"a \\\"b\\\" \xef\xbf\xbdä\xef\xbf\xbd\"}");
  EXPECT_EQ(write_generated(answer_of({}, "i"), "hi"),
            R"({"model_name":"m","model_version":"1","id":"i","text_output":"hi"})");
}

TEST(RestWrite, GivesTheWantedOutputsInTheirOrder) {
  const std::vector<uint8_t> one{1}, two{2};
  const auto answer =
      answer_of({tensor_of("a", Type::Uint8, one), tensor_of("b", Type::Uint8, two)}, "i");
  const auto both = write_answer(answer, {{"b", true}, {"a", false}}, true);
  const std::string json =
      R"({"model_name":"m","model_version":"1","id":"i","outputs":[{"name":"b","datatype":"UINT8",)"
      R"("shape":[1],"parameters":{"binary_data_size":1}},{"name":"a","datatype":"UINT8",)"
      R"("shape":[1],"data":[1]}]})";
  EXPECT_EQ(both.body, json + "\2");
  EXPECT_EQ(both.json_bytes, json.size());
  const auto all = write_answer(answer, {}, true);
  EXPECT_EQ(all.body.substr(*all.json_bytes), "\1\2");
  EXPECT_FALSE(write_answer(answer, {{"a", false}}, true).json_bytes);
  const auto outcome = refusal([&] { write_answer(answer, {{"c", false}}, false); });
  EXPECT_EQ(outcome.text, "model 'm' gives no output 'c'; it gives a, b");
}

TEST(Compression, InflatesWhatItDeflatesAndNoMoreThanAllowed) {
  std::string plain;
  const Rng rng(1, "plain");
  for (uint64_t i = 0; i < 100000; ++i) plain += char(i % 1000 < 500 ? 'a' : rng.bits(i));
  for (const bool gzip : {true, false})
    for (const size_t size : {size_t(0), size_t(1), plain.size()}) {
      const auto part = plain.substr(0, size);
      auto packed = deflate(part, gzip);
      EXPECT_EQ(inflate(packed, size), part);
      EXPECT_EQ(refusal([&] { inflate(packed, size - (size > 0)); }).status,
                size > 0 ? Status::TooLarge : Status::Ok);
      EXPECT_EQ(refusal([&] { inflate(packed + "x", size); }).status, Status::Invalid);
      packed.back() ^= 1;
      EXPECT_EQ(refusal([&] { inflate(packed, size); }).status, Status::Invalid);
      packed.pop_back();
      EXPECT_EQ(refusal([&] { inflate(packed, size); }).status, Status::Invalid);
    }
  EXPECT_EQ(deflate("a", true).substr(0, 2), "\x1f\x8b");
  EXPECT_EQ(refusal([] { inflate("", 10); }).status, Status::Invalid);
  EXPECT_EQ(refusal([] { inflate("hello", 10); }).status, Status::Invalid);
  EXPECT_EQ(refusal([] { inflate(deflate(std::string(10 << 20, 'a'), true), 1 << 20); }).status,
            Status::TooLarge);
}

// Some bytes changed, moved, doubled or cut off, as the seed says.
std::string changed(std::string text, const Rng& rng) {
  uint64_t draw = 0;
  const auto below = [&](size_t bound) { return size_t(rng.below(draw++, bound)); };
  const std::string_view marks = "{}[]\",:0-.e\\\xff";
  for (size_t i = below(4) + 1; i > 0 && !text.empty(); --i) {
    const size_t at = below(text.size()), size = std::min(below(16) + 1, text.size() - at);
    switch (below(5)) {
      case 0:
        text[at] = char(rng.bits(draw++));
        break;
      case 1:
        text[at] = marks[below(marks.size())];
        break;
      case 2:
        text.erase(at, size);
        break;
      case 3:
        text.insert(below(text.size()), text.substr(at, size));
        break;
      case 4:
        text.resize(below(8) == 0 ? at : text.size());
        break;
    }
  }
  return text;
}

TEST(RestFuzz, AnyBodyIsReadOrRefused) {
  const char* folder = std::getenv("YOKE_TEST_CORPUS");
  if (folder == nullptr) GTEST_SKIP() << "YOKE_TEST_CORPUS names no folder; ctest does";
  RestReader reader;
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(folder) / "rest")) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    ++files;
    EXPECT_NO_THROW(try_body(reader, text)) << entry.path();
    for (uint64_t i = 0; i < 1000; ++i)
      ASSERT_NO_THROW(try_body(reader, changed(text, Rng(1, entry.path().filename().string(), i))))
          << entry.path() << ", change " << i;
  }
  EXPECT_GE(files, 40);
}

}  // namespace
}  // namespace yoke::serve
