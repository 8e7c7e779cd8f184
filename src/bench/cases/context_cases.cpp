#include "bench/cases/context_cases.hpp"

#include <fmt/format.h>

#include <random>

namespace isograd {
namespace {

DecoderConfig small_model() {
  DecoderConfig config;  // 256 wide, four layers
  config.max_positions = 1 << 17;
  return config;
}

std::vector<std::int64_t> pack_of(std::int64_t tokens) {
  std::mt19937 random(1);
  std::lognormal_distribution<double> draw(6, 1.2);
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = tokens; left > 0; left -= lengths.back())
    lengths.push_back(std::min(left, 1 + static_cast<std::int64_t>(draw(random))));
  return lengths;
}

std::vector<ContextCase> make_context_cases() {
  DecoderConfig tiny = small_model(), narrow = small_model();
  tiny.hidden = 32, tiny.layers = 1, tiny.head_dim = 8, tiny.feed_forward = 48;
  narrow.hidden = 64, narrow.layers = 2, narrow.heads = narrow.key_value_heads = 2, narrow.head_dim = 32;
  narrow.feed_forward = 176;
  std::vector<ContextCase> cases = {
      {.name = "tiny", .lengths = {100, 20}, .model = tiny, .standard = false},
      {.name = "tiny one", .lengths = {128}, .model = tiny, .standard = false},
      {.name = "tiny pack 2", .lengths = {64, 64}, .model = tiny, .attention_alone = true, .standard = false},
      {.name = "tiny pack 3",
       .lengths = {64, 32, 32},
       .model = tiny,
       .attention_alone = true,
       .standard = false},
      {.name = "attention 8k", .lengths = {8192}, .model = small_model(), .attention_alone = true},
      {.name = "model 8k", .lengths = {8192}, .model = small_model()},
      {.name = "packed 16k", .lengths = pack_of(16384), .model = small_model()}};
  // The same number of tokens and different sums of squares.
  const auto add_pack = [&](const char* name, std::vector<std::int64_t> lengths) {
    cases.push_back(
        {.name = name, .lengths = std::move(lengths), .model = small_model(), .attention_alone = true});
  };
  add_pack("pack 2 x 8k", {8192, 8192});
  add_pack("pack halving", {8192, 4096, 2048, 1024, 512, 512});
  add_pack("pack 4 x 4k", std::vector<std::int64_t>(4, 4096));
  add_pack("pack drawn", pack_of(16384));
  add_pack("pack 16 x 1k", std::vector<std::int64_t>(16, 1024));
  for (const std::int64_t k : {4, 8, 16, 32, 64})
    cases.push_back(
        {.name = fmt::format("memory {}k", k), .lengths = {k << 10}, .model = narrow, .turns = false});
  return cases;
}

}  // namespace

const std::vector<ContextCase>& context_cases() {
  static const std::vector<ContextCase> cases = make_context_cases();
  return cases;
}

}  // namespace isograd
