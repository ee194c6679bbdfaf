// SPDX-License-Identifier: Apache-2.0
#include "yoke/serve/load_wire.h"

#include <gtest/gtest.h>

using namespace yoke::serve;

TEST(LoadWire, JsonSaysNamesShapeValuesAndParameters) {
  LoadRequest request;
  write_question({.model = "m",
                  .shape = {2, 1},
                  .values = {0.125, 3},
                  .stream = "s",
                  .id = "7",
                  .timeout_us = 10},
                 Wire::Json, request);
  EXPECT_EQ(request.path, "/v2/models/m/infer");
  EXPECT_EQ(request.rows, 2);
  EXPECT_EQ(request.body,
            R"({"id":"7","parameters":{"yoke_stream":"s","timeout":10},"inputs":[{"name":"x",)"
            R"("datatype":"FP32","shape":[2,1],"data":[0.125,3]}]})");
}

TEST(LoadWire, BinaryTellsWhereTheJsonEnds) {
  LoadRequest request;
  write_question({.model = "m", .shape = {1, 2}, .values = {1, 2}}, Wire::Binary, request);
  const std::string json =
      R"({"parameters":{"binary_data_output":true},"inputs":[{"name":"x","datatype":"FP32",)"
      R"("shape":[1,2],"parameters":{"binary_data_size":8}}]})";
  ASSERT_EQ(request.body.size(), json.size() + 8);
  EXPECT_TRUE(request.body.starts_with(json));
  EXPECT_TRUE(request.headers.ends_with(
      "Inference-Header-Content-Length: " + std::to_string(json.size()) + "\r\n"));
}

TEST(LoadWire, ValuesAreReadOnlyWhereThereAreAsManyAsWanted) {
  std::vector<float> two(2), three(3);
  const std::string text = R"({"outputs":[{"name":"y","data":[[0.25],[4]]}]})";
  const std::string flat = R"({"outputs":[{"name":"y","data":[0.25, 4]}]})";
  EXPECT_TRUE(read_values(text, Wire::Json, std::span(two).first(1)));
  EXPECT_FALSE(read_values(flat, Wire::Json, three));
  EXPECT_FALSE(read_values(flat, Wire::Json, std::span(two).first(1)));
  ASSERT_TRUE(read_values(flat, Wire::Json, two));
  EXPECT_EQ(two, (std::vector<float>{0.25, 4}));
  EXPECT_FALSE(read_values(R"({"error":"no"})", Wire::Json, two));
}

TEST(LoadWire, BinaryValuesFollowTheJson) {
  const std::vector<float> sent{1.5, -2};
  std::string body = "{}";
  body.append(reinterpret_cast<const char*>(sent.data()), 8);
  std::vector<float> two(2), one(1);
  ASSERT_TRUE(read_values(body, Wire::Binary, two));
  EXPECT_EQ(two, sent);
  EXPECT_FALSE(read_values(body, Wire::Binary, one));
}

TEST(LoadWire, QuestionsOfOtherNumbersHaveOtherValues) {
  Question first, second, again;
  fill(first, 1, {1, 16});
  fill(second, 2, {1, 16});
  fill(again, 1, {1, 16});
  EXPECT_NE(first.values, second.values);
  EXPECT_EQ(first.values, again.values);
}
