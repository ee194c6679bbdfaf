// SPDX-License-Identifier: Apache-2.0
// Small cases by hand; tests/tokenizer_test.sh compares with the peers.
#include "yoke/data/tokenizer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "yoke/base/error.h"
#include "yoke/data/pretokenize.h"

namespace yoke::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Tokens = std::vector<int64_t>;

class TokenizerFiles : public testing::Test {
 protected:
  TokenizerFiles() { fs::create_directories(folder_); }
  ~TokenizerFiles() override { fs::remove_all(folder_); }
  void SetUp() override {
    try {
      Splitter("x", "");
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  fs::path write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  std::shared_ptr<const Tokenizer> open(const json& all) const {
    return open_tokenizer(write("tokenizer.json", all.dump()));
  }
  void refuses(const std::string& what, const fs::path& path) const {
    try {
      open_tokenizer(path);
      ADD_FAILURE() << "no error with '" << what << "'";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(error.kind(), Kind::Io);
      EXPECT_NE(text.find(what), text.npos) << text;
      EXPECT_EQ(text.find('\n'), text.npos) << text;
    }
  }
  void refuses(const std::string& what, const json& all) const {
    refuses(what, write("tokenizer.json", all.dump()));
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / cat("yoke_tokenizer_", ::getpid());
};

// "lower" is merged to "low" "er"; the Ġ of GPT-2's alphabet is a space.
json gpt2() {
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  return {{"model",
           {{"type", "BPE"},
            {"vocab",
             {{"l", 0},
              {"o", 1},
              {"w", 2},
              {"e", 3},
              {"r", 4},
              {"Ġ", 5},
              {"lo", 6},
              {"low", 7},
              {"er", 8},
              {"Ġlow", 9},
              {"we", 10}}},
            {"merges", {"l o", json::array({"lo", "w"}), "e r", "Ġ low", "w e"}}}},
          {"pre_tokenizer", bytes},
          {"decoder", bytes},
          {"added_tokens",
           {{{"id", 20}, {"content", "<|endoftext|>"}, {"special", true}},
            {{"id", 19}, {"content", "<|end"}, {"lstrip", true}, {"rstrip", true}}}}};
}

}  // namespace

TEST(ByteTokenizer, TakesAllBytes) {
  std::string text;
  for (int i = 0; i < 256; ++i) text += char(i);
  EXPECT_EQ(byte_tokenizer()->decode(byte_tokenizer()->encode(text)), text);
  EXPECT_EQ(byte_tokenizer()->encode("\xff"), Tokens{255});
  EXPECT_EQ(byte_tokenizer()->vocab(), 256);
  EXPECT_FALSE(byte_tokenizer()->end());
}

TEST_F(TokenizerFiles, MergesTheEarliestFirst) {
  const auto tokenizer = open(gpt2());
  EXPECT_EQ(tokenizer->encode("lower low"), (Tokens{7, 8, 9}));
  EXPECT_EQ(tokenizer->encode("owelr"), (Tokens{1, 10, 0, 4}));
  EXPECT_EQ(tokenizer->encode("low?er"), (Tokens{7, 8}));  // what has no token is left out
  EXPECT_EQ(tokenizer->decode({7, 8, 9, 11, 99, -1}), "lower low");
  EXPECT_EQ(tokenizer->vocab(), 21);
  EXPECT_EQ(tokenizer->encode(""), Tokens{});
}

// Words of any length, by either way of merging.
TEST_F(TokenizerFiles, MergesLongWordsLikeShortOnes) {
  const auto tokenizer = open(gpt2());
  for (int repeats : {1, 10, 11, 12, 13, 1000}) {
    std::string text;
    Tokens wanted;
    for (int i = 0; i < repeats; ++i) {
      text += "lower";
      wanted.insert(wanted.end(), {7, 8});
    }
    EXPECT_EQ(tokenizer->encode(text), wanted);
  }
}

TEST_F(TokenizerFiles, CutsOutTheLongestAddedToken) {
  const auto tokenizer = open(gpt2());
  EXPECT_EQ(tokenizer->encode("low <|endoftext|> low"), (Tokens{7, 5, 20, 9}));
  EXPECT_EQ(tokenizer->encode("low \t<|end  low<|endo"), (Tokens{7, 19, 7, 19, 1}));
  EXPECT_EQ(tokenizer->decode({20, 7}), "<|endoftext|>low");
}

TEST_F(TokenizerFiles, KnowsWhatEndsADocument) {
  EXPECT_EQ(open(gpt2())->end(), 20);
  write("tokenizer_config.json", R"({"eos_token": {"content": "er"}})");
  EXPECT_EQ(open(gpt2())->end(), 8);
  write("tokenizer_config.json", R"({"eos_token": "</s>"})");
  refuses("has no token '</s>', which tokenizer_config.json", gpt2());
}

TEST_F(TokenizerFiles, ReadsTheTwoFilesOfGpt2) {
  json vocab = gpt2()["model"]["vocab"];
  vocab["<|endoftext|>"] = 11;
  write("vocab.json", vocab.dump());
  write("merges.txt", "#version: 0.2\r\nl o\r\nlo w\n");
  EXPECT_EQ(open_tokenizer(folder_)->encode("low er<|endoftext|>"), (Tokens{7, 5, 3, 4, 11}));
  write("merges.txt", "l o\nl o w\n");
  refuses("the merge \"l o w\" is not two tokens", folder_);
}

TEST_F(TokenizerFiles, FallsBackToBytes) {
  const json space = {{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}};
  const json all = {
      {"model",
       {{"type", "BPE"},
        {"vocab", {{"<unk>", 0}, {"a", 1}, {"▁", 2}, {"▁a", 3}, {"<0xC3>", 4}, {"<0xA9>", 5}}},
        {"merges", {"▁ a"}},
        {"unk_token", "<unk>"},
        {"fuse_unk", true},
        {"byte_fallback", true}}},
      {"pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "▁"}, {"split", false}}},
      {"decoder",
       {{"type", "Sequence"},
        {"decoders",
         {space,
          {{"type", "ByteFallback"}},
          {{"type", "Fuse"}},
          {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}}};
  const auto tokenizer = open(all);
  EXPECT_EQ(tokenizer->encode("a aé"), (Tokens{3, 3, 4, 5}));
  EXPECT_EQ(tokenizer->encode("xyaz"), (Tokens{2, 0, 1, 0}));
  EXPECT_EQ(tokenizer->decode({3, 3, 4, 5}), "a aé");
  EXPECT_EQ(tokenizer->decode({3, 5, 4, 1}), "a\ufffd\ufffda");
}

TEST_F(TokenizerFiles, TakesWhatIsNoUtf8) {
  json all = gpt2();
  for (const char* byte : {"ï", "¿", "½"})
    all["model"]["vocab"][byte] = all["model"]["vocab"].size();
  const auto tokenizer = open(all);
  EXPECT_EQ(tokenizer->encode("low\xff"
                              "low\xe4\xbd"),
            (Tokens{7, 11, 12, 13, 7, 11, 12, 13}));
  EXPECT_EQ(tokenizer->decode({7, 11, 12, 7, 11, 12, 13}), "low\ufffdlow\ufffd");
}

TEST_F(TokenizerFiles, ManyThreadsMayUseOne) {
  const auto tokenizer = open(gpt2());
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int j = 0; j < 200; ++j) EXPECT_EQ(tokenizer->encode("lower low"), (Tokens{7, 8, 9}));
    });
}

TEST_F(TokenizerFiles, SayWhatCannotBeRead) {
  const auto with = [](const char* pointer, const json& value) {
    json all = gpt2();
    all[json::json_pointer(pointer)] = value;
    return all;
  };
  refuses("there is no '", folder_ / "none.json");
  refuses("has no tokenizer; give a tokenizer.json", folder_);
  refuses("is no tokenizer; give", write("notes.txt", "x"));
  refuses("is no JSON, or is cut short", write("tokenizer.json", "{\"model\": {\n\"vo"));
  refuses("is no tokenizer of Hugging Face's: ", json::array());
  refuses("is no tokenizer of Hugging Face's: ", with("/model/vocab/l", "0"));
  refuses("the token 'l' has the number -1", with("/model/vocab/l", -1));
  refuses("of the kind 'WordPiece', which yoke cannot do; it knows BPE",
          with("/model/type", "WordPiece"));
  refuses("give the tokenizer.model", with("/model/type", "Unigram"));
  refuses("dropout = 0.1", with("/model/dropout", 0.1));
  refuses("the merge of 'e' and 'x' (number 3)", with("/model/merges/2", "e x"));
  refuses("the normalizer 'Lowercase'", with("/normalizer", {{"type", "Lowercase"}}));
  refuses("the pre-tokenizer 'Punctuation'", with("/pre_tokenizer/type", "Punctuation"));
  refuses("the decoder 'CTC'", with("/decoder/type", "CTC"));
  refuses("'<|end' with single_word", with("/added_tokens/1/single_word", true));
  refuses("the pattern '(' cannot be read",
          with("/pre_tokenizer",
               {{"type", "Split"}, {"pattern", {{"Regex", "("}}}, {"behavior", "Isolated"}}));
}

TEST_F(TokenizerFiles, SayThatAModelIsCutShort) {
  const auto path = write("tokenizer.model", "\x0a\x10xx");
  try {
    open_tokenizer(path);
    ADD_FAILURE();
  } catch (const Error& error) {
    if (error.kind() == Kind::Usage) GTEST_SKIP() << error.what();
    EXPECT_STREQ(error.what(), cat("'", path.string(),
                                   "' (4 bytes) is no model of SentencePiece, or is cut short; get "
                                   "it again")
                                   .c_str());
  }
}

}  // namespace yoke::data
