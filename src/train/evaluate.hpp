// Validation loss and generated text: what is measured of a model without training it.
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
#include "isograd/trainer.hpp"

namespace isograd {

// Collective. The loss of all ranks' micro-batches and how many targets they have, without a gradient: by the
// lines that a step trains by, in step.cpp. A deferred mean's step that is under way is left alone.
Evaluation evaluate(const ForwardLossTerms& forward, Normalizer& mean, DataParallel& layout,
                    MicroBatches micro_batches);

// ConfigError when the model would not see the prompt, or could not go on with it: the tokenizer makes no
// token of it, or it fills the model's positions or its sliding window. `where`: the key or flag that holds
// it.
void check_prompt(const Tokenizer& tokenizer, const std::string& prompt, const DecoderConfig& model,
                  const std::string& where);

// Sentences for the user: the actual prompt where it differs from the given one, and the number of tokens
// that can follow where it is below `max_tokens`.
std::vector<std::string> prompt_notices(const Tokenizer& tokenizer, const std::string& prompt,
                                        const DecoderConfig& model, std::int64_t max_tokens);

// The prompt and what the model goes on with. An empty prompt starts a document (bos, else eos, else a line
// break). `on_text` is given the same text in parts, each of whole characters, as soon as no later token
// changes them, but at most some 20 times a second.
std::string sample_text(DecoderLM& model, const Tokenizer& tokenizer, const std::string& prompt,
                        SampleOptions options, const std::function<void(std::string_view)>& on_text = {});

// config.json with a shape of our own, model.safetensors. ConfigError naming file and key where something is
// missing or does not fit.
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
};
// New videos from a checkpoint of a video run, as animated PNGs; the files, in order. ConfigError when the
// checkpoint is none, a size is not one of whole patches, or a file cannot be written.
std::vector<std::filesystem::path> sample_videos(const std::filesystem::path& directory,
                                                 const VideoSampleOptions& options);

}  // namespace isograd
