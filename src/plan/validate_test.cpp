// Published rows: read as the table has them, bad ones refused by line and column, errors as the program that
// fitted the constants prints them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "base/error_testing.hpp"
#include "plan/trial.hpp"

namespace isograd::planner {
namespace {

using error_testing::error_of;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr const char* kHeader =
    "id,tier,split_hint,hardware,gpus,gpus_per_node,gpu_mem_gb,framework,model,layers,hidden,heads,kv_heads,ffn,glu,"
    "vocab,tied,seq,gbs,mbs,grad_acc,dp,shards,zero,tp,sp,cp,ep,pp,vpp,schedule,recompute,precision,step_s,"
    "tokens_per_s_per_gpu,samples_per_s,tflops_per_gpu,tflops_kind,mfu_pct,mem_gb,mem_unit,status,twin_ratio,flags,"
    "source,source_path,source_ref\n";

std::string nanotron(const std::string& id, const std::string& tier, int gpus, const std::string& layout,
                     const std::string& speed_memory_twin) {
  return id + "," + tier + ",fit,H100-SXM-80GB," + std::to_string(gpus) + ",8,80,nanotron," + layout +
         ",none (inferred),\"bf16, fp32 gradients\",," + speed_memory_twin +
         ",\"a, flag\",a source,a path,a commit\n";
}
std::string mlperf(const char* world, int gpus, int rounds, int dp, double step) {
  return "mlperf3.1-nvidia-" + std::string(world) + "_nemo,A,fit,H100-SXM-80GB," + std::to_string(gpus) +
         ",8,80,NeMo (MLPerf),gpt3-175b,96,12288,96,96,49152,0,51200,1,2048,2048,1," +
         std::to_string(rounds) + "," + std::to_string(dp) + "," + std::to_string(dp) +
         ",1,4,1,1,1,8,12,interleaved 1f1b,none,fp8 hybrid," + std::to_string(step) +
         ",,,,,,,,measured,,,,,\n";
}

class PublishedRows : public ::testing::Test {
 protected:
  std::vector<PublishedRow> read(const std::string& text) {
    std::ofstream(file_, std::ios::binary) << text;
    return read_rows(file_);
  }
  void TearDown() override { std::filesystem::remove(file_); }
  std::filesystem::path file_ =
      std::filesystem::temp_directory_path() / ("isograd-rows-" + std::to_string(::getpid()) + ".csv");
};

const Errors* errors_named(const std::vector<Errors>& all, const std::string& source,
                           const std::string& what) {
  const auto found =
      std::ranges::find_if(all, [&](const Errors& one) { return one.source == source && one.what == what; });
  return found == all.end() ? nullptr : &*found;
}

TEST_F(PublishedRows, ArePredictedAsTheFitPredictsThem) {
  const std::string small = "nanotron-1b,16,2048,32,32,8192,1,131072,",
                    large = "nanotron-8b,32,4096,32,32,14336,1,131072,";
  const auto rows = read(kHeader +
                         nanotron("nanotron-0005", "A", 8, small + "0,4096,256,2,32,4,4,1,1,1,1,1,2,1,1f1b",
                                  "38299.0,,,,43.6,26.4,GiB,measured,1.05") +
                         nanotron("nanotron-0020", "A", 8, small + "1,4096,256,16,16,1,1,0,8,1,1,1,1,1,",
                                  "28101.0,,,,32,38.3,GiB,measured,1.02") +
                         nanotron("nanotron-1821", "A", 32, large + "0,4096,256,1,128,2,1,0,2,1,1,1,8,1,1f1b",
                                  "5636.0,,,,32,35.3,GiB,measured,1.068") +
                         nanotron("too large", "A-fail", 8, large + "0,4096,256,16,8,2,1,0,1,1,1,1,4,1,1f1b",
                                  ",,,,,,GiB,no figure,"));
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].flags, "a, flag");
  EXPECT_TRUE(rows[3].failed);
  EXPECT_NEAR(rows[0].seconds, 3.422335, 1e-6);
  const auto all = validate(rows);
  // By the fit: seconds 3.457194, 4.805123, 6.336274 against 3.422335, 4.664318, 5.814053.
  const Errors* seconds = errors_named(all, "nanotron", "seconds");
  ASSERT_NE(seconds, nullptr);
  EXPECT_EQ(seconds->rows, 3u);
  EXPECT_NEAR(seconds->median, 4.805123 / 4.664318 - 1, 1e-6);
  EXPECT_NEAR(seconds->worst, 6.336274 / 5.814053 - 1, 1e-6);
  // 29.38, 34.58 and 33.77 GiB against 26.4, 38.3, 35.3; four bytes a logit instead of 4.12 that were fitted.
  const Errors* memory = errors_named(all, "nanotron", "memory");
  ASSERT_NE(memory, nullptr);
  EXPECT_NEAR(memory->worst, 29.384 / 26.4 - 1, 0.01);
  EXPECT_EQ(errors_named(all, "nanotron, that failed: called too large", "fits")->median, 1);
  EXPECT_EQ(errors_named(all, "nanotron, that ran: called too large", "fits")->median, 0);
  EXPECT_THAT(errors_table(rows),
              Contains(Contains("nanotron, twin ratio below 1.1, below 74 GiB, tp at most 8")));
}

TEST_F(PublishedRows, ScaleByTwoConstantsOfTheirSmallestWorlds) {
  const std::string worlds = mlperf("eos_n64_ngc23.09", 512, 128, 16, 11.0539) +
                             mlperf("eos-dfw_n512_ngc23.09", 4096, 16, 128, 1.6084) +
                             mlperf("eos-dfw_n1344_ngc23.09", 10752, 8, 336, 0.9296);
  const auto all = validate_scaling(read(kHeader + worlds));
  ASSERT_EQ(all.size(), 1u);
  const double each = (11.0539 - 1.6084) / 112, fixed = 11.0539 - 128 * each;
  EXPECT_NEAR(all[0].worst, std::abs((8 * each + fixed) / 0.9296 - 1), 1e-9);
  EXPECT_LT(all[0].worst, 0.02);
  // A world that does not scale is seen.
  EXPECT_GT(validate_scaling(read(kHeader + worlds + mlperf("eos-dfw_n1500_ngc23.09", 12000, 8, 336, 1.2)))[0]
                .worst,
            0.2);
}

TEST_F(PublishedRows, AreRefusedByLineAndColumn) {
  const std::string good = mlperf("eos_n64", 512, 128, 16, 11);
  EXPECT_THAT(error_of([&] { read(kHeader + good + "a,b\n"); }),
              AllOf(HasSubstr("line 3"), HasSubstr("2 cells")));
  std::string bad = good;
  bad.replace(bad.find(",2048,1,"), 8, ",many,1,");
  EXPECT_THAT(error_of([&] { read(kHeader + bad); }),
              AllOf(HasSubstr("line 2"), HasSubstr("'gbs'"), HasSubstr("many")));
  bad = good;
  bad.replace(bad.find(",96,12288"), 9, ",nan,12288");
  EXPECT_THAT(error_of([&] { read(kHeader + bad); }), HasSubstr("'layers'"));
  bad = good;
  bad.replace(bad.find(",512,"), 5, ",1e300,");
  EXPECT_THAT(error_of([&] { read(kHeader + bad); }), AllOf(HasSubstr("'gpus'"), HasSubstr("1e300")));
  EXPECT_THAT(error_of([&] { read("id,tier\nx,A\n"); }), HasSubstr("no column 'source'"));
  EXPECT_THAT(error_of([&] { read(""); }), HasSubstr("an empty file"));
  EXPECT_THAT(error_of([&] { read_rows("/nowhere/rows.csv"); }), HasSubstr("cannot be read"));
}

TEST_F(PublishedRows, MeetTheLinesOfAllRowsThatAreGiven) {
  if (!std::filesystem::exists(ISOGRAD_PUBLISHED_RUNS)) GTEST_SKIP() << "missing: published_runs.csv";
  const auto rows = read_rows(ISOGRAD_PUBLISHED_RUNS);
  const auto all = validate(rows);
  const auto expect = [&](const char* source, const char* what, std::size_t count, double median,
                          double p90) {
    const Errors* found = errors_named(all, source, what);
    ASSERT_NE(found, nullptr) << source;
    EXPECT_EQ(found->rows, count) << source;
    // The fit's own figures, rounded to a tenth of a per cent.
    EXPECT_NEAR(found->median, median, 1e-3) << source;
    EXPECT_NEAR(found->p90, p90, 2e-3) << source;
  };
  expect("nanotron, twin ratio below 1.1, below 74 GiB, tp at most 8", "seconds", 98, .0419, .134);
  expect("nanotron, twin ratio below 1.25, tp at most 8", "seconds", 141, .0515, .180);
  expect("nanotron, below 74 GiB, tp at most 8", "seconds", 582, .0808, .898);
  expect("nanotron", "seconds", 882, .1934, .862);
  expect("nanotron", "memory", 890, .0589, .192);
  expect("nanotron, that ran: called too large", "fits", 890, .0157, .0157);
  expect("nanotron, that failed: called too large", "fits", 749, .8585, .8585);
  expect("all other dense rows", "seconds", 361, .0724, .280);
  EXPECT_GE(errors_named(all, "nanotron, below 74 GiB: one of the top five within 5 % of the best", "cells")
                ->median,
            .95);
  const auto scaling = validate_scaling(rows);
  EXPECT_EQ(scaling.size(), 2u);
  for (const Errors& family : scaling) EXPECT_LT(family.worst, 0.02) << family.source;
}

}  // namespace
}  // namespace isograd::planner
