// Layouts of two ranks along each axis, whose memory and steps are measured and compared with what is
// predicted.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/files.hpp"
#include "isograd/random.hpp"
#include "plan/problem.hpp"

namespace isograd::planner {

struct MeasuredLayout {
  std::string name;
  Candidate candidate;
};

struct MeasuredLayouts : std::vector<MeasuredLayout> {
  // Samples of a step; micro-batches of a pipeline.
  MeasuredLayouts(std::int64_t of_step, std::int64_t of_pipelines, bool experts) : samples(of_step) {
    using enum Strategy;
    using enum Schedule;
    add("bucketed", {.replicas = 2}, 2);
    for (const Strategy strategy : {kZero1, kZero2, kZero3})
      add(std::string(name_of(strategy)), {.shards = 2, .strategy = strategy}, strategy == kZero1 ? 1 : 2);
    add("zero3, checkpointed", {.shards = 2, .strategy = kZero3, .checkpoint = true}, 1);
    add("tp", {.tp = 2}, 2), add("tp, whole tokens", {.tp = 2, .sequence_parallel = false}, 2);
    add("ring", {.cp_ring = 2}, 2), add("ulysses", {.cp_ulysses = 2}, 2);
    for (const auto& [schedule, stages] :
         {std::pair{kOneFOneB, 1}, {kGPipe, 1}, {kInterleaved, 2}, {kZeroBubbleH1, 1}, {kZeroBubbleV, 2}})
      add(std::string(name_of(schedule)), {.pp = 2, .stages_per_rank = stages, .schedule = schedule},
          of_pipelines);
    if (!experts) return;
    add("ep", {.replicas = 2, .ep = 2}, 2);
    add("ep, zero2", {.shards = 2, .ep = 2, .strategy = kZero2}, 2);
  }

  void add(const std::string& name, Candidate candidate, std::int64_t micro_batches) {
    const std::int64_t data = candidate.data_ranks();
    candidate.ranks = static_cast<std::int32_t>(data) * candidate.cp_ring * candidate.cp_ulysses *
                      candidate.tp * candidate.pp;
    candidate.micro_batches = micro_batches, candidate.micro_batch = samples / data / micro_batches;
    push_back({name, candidate});
  }

  std::int64_t samples;
};

// A folder with one document of random characters: every sequence is a fragment, and routers send its tokens
// to all experts.
inline std::filesystem::path folder_with_text(const std::string& name, std::uint64_t characters) {
  const auto folder =
      std::filesystem::path(testing::TempDir()) / fmt::format("isograd-{}-{}", name, ::getpid());
  std::string text;
  for (std::uint64_t i = 0; i < characters; ++i)
    text += static_cast<char>(' ' + random_bits({.seed = 7}, i) % 95);
  std::filesystem::create_directories(folder / "text");
  write_file(folder / "text" / "one.txt", text);
  return folder;
}

// A run that trains that model on that text.
inline RunConfig measured_config(const DecoderConfig& shape, const Cluster& cluster, const Work& work,
                                 const Candidate& candidate, const std::filesystem::path& folder) {
  RunConfig config;
  config.model.shape = shape;
  set_layout(config, cluster, work, candidate);
  config.data.text = {(folder / "text").string()}, config.data.cache = (folder / "cache").string();
  config.data.validation_fraction = 0, config.run.peak_tflops = 1;
  return config;
}

}  // namespace isograd::planner
