// Generated text and videos: what is shown of a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "isograd/data.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/sampler.hpp"
#include "isograd/step.hpp"
#include "isograd/trainer.hpp"

namespace isograd {

// ConfigError: the prompt makes no token, or fills the model's positions or sliding window. `where`: its key
// or flag.
void check_prompt(const Tokenizer& tokenizer, const std::string& prompt, const DecoderConfig& model,
                  const std::string& where);

// The actual prompt where it differs from the given one, and how many tokens can follow where fewer than
// asked.
std::vector<std::string> prompt_notices(const Tokenizer& tokenizer, const std::string& prompt,
                                        const DecoderConfig& model, std::int64_t max_tokens);

// The prompt and its continuation by `ask`, whose own prompt does not count. An empty prompt starts a
// document (bos, else eos, else a line break). `on_text` is given the text in parts of whole characters that
// no later token changes, at most some 20 times a second.
std::string sample_text(DecoderLM& model, const Tokenizer& tokenizer, const std::string& prompt,
                        SampleRequest ask, const std::function<void(std::string_view)>& on_text = {});

// ConfigErrors name the file and the key that is missing or does not fit.
bool is_video_model(const std::filesystem::path& directory);  // by its config.json
std::shared_ptr<VideoDiT> read_video_model(const std::filesystem::path& directory, at::ScalarType dtype);
void write_video_model(const std::filesystem::path& directory, VideoDiTConfig shape,
                       const TensorStream& weights);

struct VideoSampleOptions {
  std::int64_t videos = 1;
  std::int64_t steps = 50;                         // of Euler's method
  std::int64_t frames = 0, height = 0, width = 0;  // in frames and pixels; 0: the most that the model knows
  std::uint64_t seed = 0;
  std::filesystem::path folder = "samples";
  std::function<void(std::int64_t video, std::int64_t step)> begins{};  // both from 0
};
// New videos from a checkpoint, as animated PNGs, in order. ConfigError: no checkpoint of a video run, a size
// not of whole patches, a file that cannot be written.
std::vector<std::filesystem::path> sample_videos(const std::filesystem::path& directory,
                                                 const VideoSampleOptions& options);

}  // namespace isograd
