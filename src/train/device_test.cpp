// The device and backend of a run, and refusals.
#include "train/device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"
#include "train/config.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string device_refusal(const std::string& toml) {
  return error_testing::error_of([&] { parse_config(toml, "run.toml", {}); });
}

TEST(Device, NcclWithoutGpusIsAContradiction) {
  EXPECT_THAT(device_refusal("[parallel]\nbackend = \"nccl\"\n"), HasSubstr("parallel.device = \"cpu\""));
  EXPECT_EQ(device_refusal("[parallel]\nbackend = \"nccl\"\ndevice = \"cuda\"\n"), "no error");
  EXPECT_EQ(device_refusal("[parallel]\nbackend = \"nccl\"\ndevice = \"auto\"\n"), "no error");
  EXPECT_THAT(device_refusal("[parallel]\ndevice = \"gpu\"\n"),
              HasSubstr("one of \"cpu\", \"cuda\", \"auto\""));
}

const FoundGpus kNoCuda{}, kNoGpu{.built = true}, kTwo{.built = true, .nccl = true, .count = 2},
    kWithoutNccl{.built = true, .count = 2}, kShared{.built = true, .nccl = true, .count = 1, .shared = true};

TEST(Device, AutoTakesWhatIsThere) {
  RunConfig config;
  const auto chosen = [&](const FoundGpus& gpus, int ranks) {
    return device_kind(config, [=] { return gpus; }) + " " + backend_of(config, ranks, [=] { return gpus; });
  };
  EXPECT_EQ(chosen(kTwo, 2), "cpu shm");  // the default, whatever is there
  config.parallel.device = "auto";
  EXPECT_EQ(chosen(kNoCuda, 2), "cpu shm");
  EXPECT_EQ(chosen(kNoGpu, 2), "cpu shm");
  EXPECT_EQ(chosen(kTwo, 2), "cuda nccl");
  EXPECT_EQ(chosen(kTwo, 1), "cuda shm");
  config.parallel.backend = "shm";
  EXPECT_EQ(chosen(kTwo, 2), "cuda shm");
  config.parallel.device = "cuda";
  EXPECT_EQ(chosen(kNoCuda, 2), "cuda shm");  // never silently something else
}

// Found, expected and what to do, each by name.
TEST(Device, WhatIsNotThereOrCannotBeIsNamed) {
  RunConfig config;
  config.parallel.device = "cuda";
  const auto error = [&](const FoundGpus& gpus, int ranks) {
    return error_testing::error_of([&] { check_device(config, ranks, [=] { return gpus; }); });
  };
  EXPECT_THAT(error(kNoCuda, 1), AllOf(HasSubstr("parallel.device"), HasSubstr("LibTorch 2.13"),
                                       HasSubstr("without CUDA"), HasSubstr("docs/gpu.md")));
  EXPECT_THAT(error(kNoGpu, 1), AllOf(HasSubstr("finds no GPU"), HasSubstr("CUDA_VISIBLE_DEVICES")));
  EXPECT_EQ(error(kTwo, 2), "no error");
  EXPECT_THAT(error(kTwo, 3), AllOf(HasSubstr("--ranks 3"), HasSubstr("2 GPUs"), HasSubstr("Start 2 ranks")));
  EXPECT_THAT(error(kWithoutNccl, 2), AllOf(HasSubstr("\"nccl\""), HasSubstr("ISOGRAD_CUDA=ON")));
  EXPECT_EQ(error(kShared, 3), "no error");
  config.parallel.backend = "shm";
  for (const int ranks : {1, 2, 3, 8}) EXPECT_EQ(error(kWithoutNccl, ranks), "no error");
  config.parallel.share_parameters = "on";
  EXPECT_THAT(error(kTwo, 2), HasSubstr("parallel.share_parameters"));
  config = {};
  config.parallel.device = "cuda";
  config.model.kind = "scorer";
  EXPECT_THAT(error(kTwo, 1), HasSubstr("scorer"));
  config = {};
  config.parallel.offload = true;
  EXPECT_THAT(error(kTwo, 1), AllOf(HasSubstr("parallel.offload"), HasSubstr("where they already are")));
  config = {};
  config.parallel.device = "auto";
  config.parallel.backend = "nccl";
  EXPECT_THAT(error(kNoGpu, 2), AllOf(HasSubstr("parallel.backend"), HasSubstr("finds no GPU")));
}

}  // namespace
}  // namespace isograd
