#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sentencepiece_trainer.h>

#include <ATen/ops/ones.h>

#include "data/test_support.hpp"

namespace isograd {
namespace {

using testing::config_error;
using testing::Folder;

TEST(Bytes, EncodesWithBosAndEos) {
  const auto bytes = byte_tokenizer();
  EXPECT_EQ(bytes->encode("Aé"), (std::vector<std::uint32_t>{256, 'A', 0xC3, 0xA9, 257}));
  EXPECT_EQ(bytes->vocabulary(), 258);
  EXPECT_EQ(bytes->bos(), 256);
  EXPECT_EQ(bytes->eos(), 257);
  EXPECT_EQ(bytes->name(), "bytes");
}

TEST(Bytes, DecodeReplacesWhatIsNoTextAndLeavesOutWhatIsNoByte) {
  const auto bytes = byte_tokenizer();
  EXPECT_EQ(bytes->decode(std::vector<std::uint32_t>{256, 'a', 257, 300, 4000000000u, 'b'}), "ab");
  EXPECT_EQ(bytes->decode(std::vector<std::uint32_t>{'a', 0xFF, 'b', 0xC3}), "a\uFFFDb\uFFFD");
  EXPECT_EQ(bytes->decode({}), "");
}

RC_GTEST_PROP(Bytes, RoundTrip, (const std::vector<char16_t>& units)) {
  std::string text;  // any characters of the basic plane except surrogates
  for (char16_t unit : units) {
    if (unit >= 0xD800 && unit < 0xE000) continue;
    if (unit < 0x80) {
      text += static_cast<char>(unit);
    } else if (unit < 0x800) {
      text += {static_cast<char>(0xC0 | unit >> 6), static_cast<char>(0x80 | (unit & 63))};
    } else {
      text += {static_cast<char>(0xE0 | unit >> 12), static_cast<char>(0x80 | (unit >> 6 & 63)),
               static_cast<char>(0x80 | (unit & 63))};
    }
  }
  const auto bytes = byte_tokenizer();
  RC_ASSERT(bytes->decode(bytes->encode(text)) == text);
}

// Trains a tiny model in this process, next to LibTorch: libsentencepiece and libtorch both contain protobuf.
class SentencePiece : public ::testing::Test {
 protected:
  static constexpr const char* kLine = "the gradient of many ranks is the gradient of one rank ";

  std::filesystem::path train(const std::string& name, const std::string& extra = "", int vocabulary = 300) {
    std::string text;
    for (int i = 0; i < 200; ++i) text += std::string(kLine) + std::to_string(i * 7919 % 1000) + "\n";
    folder_.write("text.txt", text);
    const auto status = sentencepiece::SentencePieceTrainer::Train(
        "--input=" + (folder_ / "text.txt").string() + " --model_prefix=" + (folder_ / name).string() +
        " --vocab_size=" + std::to_string(vocabulary) +
        " --model_type=bpe --byte_fallback=true --minloglevel=2 --num_threads=1" + extra);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return folder_ / (name + ".model");
  }

  Folder folder_;
};

TEST_F(SentencePiece, WorksBesideLibTorch) {
  at::ones({4}).sum().item<float>();  // loads and initialises libtorch
  const auto tokenizer = sentencepiece_tokenizer(train("m"));
  EXPECT_EQ(tokenizer->vocabulary(), 300);
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(tokenizer->eos(), 2);
  EXPECT_EQ(tokenizer->name(), "sentencepiece:" + checksum_file(folder_ / "m.model"));
  const std::string text = "the gradient of one rank, and ü that it never saw";
  const auto tokens = tokenizer->encode(text);
  EXPECT_EQ(tokens.front(), 1u);
  EXPECT_EQ(tokens.back(), 2u);
  EXPECT_LT(tokens.size(), text.size());
  for (auto token : tokens) EXPECT_LT(token, 300u);
  EXPECT_EQ(tokenizer->decode(tokens), text);  // bos and eos decode to nothing
  EXPECT_EQ(tokenizer->decode(std::vector<std::uint32_t>{1, 2, 300, 4000000000u}), "");
  EXPECT_EQ(tokenizer->encode("").size(), 2u);
}

TEST_F(SentencePiece, ModelsWithoutBosAndEos) {
  const auto tokenizer = sentencepiece_tokenizer(train("m", " --bos_id=-1 --eos_id=-1"));
  EXPECT_EQ(tokenizer->bos(), -1);
  EXPECT_EQ(tokenizer->eos(), -1);
  const auto tokens = tokenizer->encode("the rank");
  EXPECT_EQ(tokenizer->decode(tokens), "the rank");
}

// Every model contains the library's normaliser: a table of offsets that it follows unchecked.
TEST_F(SentencePiece, ADamagedNormaliserIsRefusedOrHarmless) {
  const std::string whole = read_file(train("m")),
                    text = "the \u00a0\ufdfa\u3300 gr\u0061\u0308dient \xff\xc3 of";
  const std::size_t begin = whole.find("nmt_nfkc") + 8, length = whole.size() - begin;
  ASSERT_GT(length, 100'000u);
  int refused = 0, tried = 0;
  const auto try_out = [&](const std::string& model) {
    const auto path = folder_.write("bad.model", model);
    refused += config_error([&] {
                 const auto tokenizer = sentencepiece_tokenizer(path);
                 tokenizer->decode(tokenizer->encode(text));
               }).empty()
                   ? 0
                   : 1;
    ++tried;
  };
  for (std::size_t at = begin; at < whole.size(); at += length / 40)
    for (const char byte : {'\0', '\x41', '\xff'}) {
      std::string longer = whole;
      longer.insert(at, 10, byte);
      try_out(longer);
      std::string changed = whole;
      for (std::size_t i = at; i < std::min(at + 10, whole.size()); ++i) changed[i] = byte;
      try_out(changed);
    }
  EXPECT_GT(refused, tried / 2) << tried;
}

TEST_F(SentencePiece, SymbolsAndPiecesThatTheLibraryCannotHoldAreRefused) {
  std::string symbols, text;
  for (int i = 0; i < 70; ++i) symbols += (i ? "," : "") + (text += 'a');
  const auto nested = train("m", " --user_defined_symbols=" + symbols, 500);
  EXPECT_NE(config_error([&] { sentencepiece_tokenizer(nested); }).find("64 symbols"), std::string::npos);
  std::string model = read_file(train("n"));
  const std::size_t piece = model.find("\xe2\x96\x81t");
  ASSERT_NE(piece, std::string::npos);
  model[piece + 3] = 0;
  const auto path = folder_.write("zero.model", model);
  EXPECT_NE(config_error([&] { sentencepiece_tokenizer(path); }).find("zero"), std::string::npos);
}

TEST_F(SentencePiece, WhatIsNoModelIsRefused) {
  for (const std::string& text : {std::string(), std::string("not a model"), std::string(100, '\xff')}) {
    const auto path = folder_.write("bad.model", text);
    EXPECT_NE(config_error([&] { sentencepiece_tokenizer(path); }).find(path.string()), std::string::npos)
        << text;
  }
  EXPECT_NE(config_error([&] { sentencepiece_tokenizer(folder_ / "absent"); }).find("absent"),
            std::string::npos);
  const std::string whole = read_file(train("m"));
  for (std::size_t length = 1; length < whole.size(); length += 97) {
    // Truncated anywhere it is refused, or a model of fewer pieces that still encodes.
    const auto path = folder_.write("cut.model", whole.substr(0, length));
    config_error([&] { sentencepiece_tokenizer(path)->encode("the rank"); });
  }
}

}  // namespace
}  // namespace isograd
