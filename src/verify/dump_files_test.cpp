// Dumps on disk: what is written comes back; what is no dump is refused by name.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "isograd/error.hpp"
#include "isograd/verify.hpp"
#include "model/safetensors.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using verify_test::ScratchFolder;

StepDump full_dump() {
  const auto gradients = [](double first) {
    return StepDump::Named{{"zz.weight", at::arange(6, at::kDouble).view({2, 3}) + first},
                           {"a.bias", at::full({4}, first, at::kDouble)}};
  };
  StepDump dump;
  dump.gradients = gradients(0.1);
  dump.figures = {.loss = 1.25, .targets = 7, .tokens = 9, .norm = 3.5, .clip_coefficient = 0.25};
  dump.samples = {3, 3, 11};
  dump.counts = {{3, 1}, {}, {3}};
  dump.axes = {{"dp_replicate", 1}, {"dp_shard", 3}};
  dump.precision = "fp32";
  dump.terms = {{"cross_entropy", 1.5}, {"balance", std::nan("")}};
  dump.applied = gradients(0.7);
  dump.owners = {{1, 1}, {0, 2}};
  dump.ranks.resize(3);
  dump.ranks[0] = {.initial = {1, ~std::uint64_t{0}}, .gradients = {7, 8}, .spread = 0.5, .owned_norm = 2};
  dump.ranks[1].norm = 4;
  dump.ranks[1].bytes_moved = 1e12;
  dump.peer_sums = {{"a.bias", "tp", at::full({4}, 0.3, at::kDouble)}};
  dump.findings = {{"updates_differ", "rank 2 did not step", {}}, {"not_in_optimizer", "a.bias", {}}};
  dump.shares = {{gradients(0.5), gradients(0.25)}, {}, {gradients(0.125)}};
  return dump;
}

std::map<std::string, std::string> files_of(const fs::path& dump) {
  std::map<std::string, std::string> files;
  for (const auto& file : fs::directory_iterator(dump))
    files[file.path().filename().string()] = read_file(file.path());
  return files;
}

// A dump is written again as it was read.
void expect_equal(const fs::path& dump, const StepDump& written) {
  const ScratchFolder folder;
  const StepDump read = read_dump(dump);
  write_dump(read, folder.path() / "read");
  write_dump(written, folder.path() / "written");
  EXPECT_EQ(files_of(folder.path() / "read"), files_of(folder.path() / "written"));
  ASSERT_EQ(read.gradients.size(), written.gradients.size());
  for (std::size_t i = 0; i < read.gradients.size(); ++i) {
    EXPECT_EQ(read.gradients[i].first, written.gradients[i].first);
    EXPECT_TRUE(at::equal(read.gradients[i].second, written.gradients[i].second));
  }
}

TEST(DumpFiles, WhatIsWrittenComesBackInTheModelsOrder) {
  const ScratchFolder folder;
  const fs::path dump = folder.path() / "deep/er/dump";
  write_dump(full_dump(), dump);
  expect_equal(dump, full_dump());
  std::vector<std::string> files, keys;
  for (const auto& [name, bytes] : files_of(dump)) files.push_back(name);
  const auto step = nlohmann::json::parse(read_file(dump / "step.json"));
  for (const auto& [key, value] : step.items()) keys.push_back(key);
  for (const auto& [key, value] : step["ranks"][0].items()) keys.push_back(key);
  for (const auto& [key, value] : step["ranks"][1].items()) keys.push_back(key);
  EXPECT_THAT(files, ::testing::ElementsAre("applied.safetensors", "gradients.safetensors",
                                            "peers.safetensors", "share-0-0.safetensors",
                                            "share-0-1.safetensors", "share-2-0.safetensors", "step.json"));
  EXPECT_THAT(keys, ::testing::IsSupersetOf({"axes", "clip_coefficient", "counts", "findings", "loss", "norm",
                                             "owners", "parameters", "peers", "precision", "samples",
                                             "targets", "terms", "tokens", "initial", "gradients", "spread",
                                             "owned_norm", "bytes_moved"}));
  // Written again, it replaces the earlier one and leaves no other file.
  StepDump other = full_dump();
  other.shares.clear();
  other.figures.loss = 2;
  write_dump(other, folder.path() / "deep/er/dump/");
  expect_equal(dump, other);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path() / "deep/er"), {}), 1);
}

TEST(DumpFiles, NumbersThatAreNotFiniteComeBack) {
  const ScratchFolder folder;
  StepDump dump = full_dump();
  dump.figures.loss = -std::numeric_limits<double>::infinity();
  dump.figures.norm = std::numeric_limits<double>::infinity();
  dump.figures.clip_coefficient = std::nan("");
  dump.gradients[0].second[0][0] = std::nan("");
  write_dump(dump, folder.path() / "d");
  const StepDump read = read_dump(folder.path() / "d");
  EXPECT_EQ(read.figures.loss, dump.figures.loss);
  EXPECT_EQ(read.figures.norm, dump.figures.norm);
  EXPECT_TRUE(std::isnan(read.figures.clip_coefficient));
  EXPECT_TRUE(std::isnan(read.gradients[0].second[0][0].item<double>()));
}

// NaN is told from what was not recorded, in what each rank says too.
TEST(DumpFiles, WhatIsNoNumberIsKnownByItsKey) {
  const ScratchFolder folder;
  write_dump(full_dump(), folder.path() / "d");
  EXPECT_THAT(read_dump(folder.path() / "d").not_numbers, ::testing::ElementsAre("terms.balance"));
  write_file(
      folder.path() / "d/step.json",
      R"({"format": "isograd-dump", "version": 1, "scales": {"learning_rate": "nan"}, "ranks": [{"norm": 1},
                 {"norm": "nan", "spread": "nan", "owned_norm": "nan", "bytes_moved": "nan"}]})");
  const StepDump read = read_dump(folder.path() / "d");
  const auto keys = ::testing::UnorderedElementsAre("scales.learning_rate", "ranks.1.norm", "ranks.1.spread",
                                                    "ranks.1.owned_norm", "ranks.1.bytes_moved");
  EXPECT_THAT(read.not_numbers, keys);
  EXPECT_TRUE(std::isnan(read.ranks[0].spread) && std::isnan(read.ranks[0].owned_norm));
  write_dump(read, folder.path() / "again");
  EXPECT_THAT(read_dump(folder.path() / "again").not_numbers, keys);
}

TEST(DumpFiles, EverythingButTheGradientsIsOptional) {
  const ScratchFolder folder;
  fs::create_directory(folder.path() / "d");
  write_safetensors(folder.path() / "d/gradients.safetensors",
                    {{"b", at::ones({2}, at::kFloat)}, {"a", at::ones({3}, at::kBFloat16)}});
  write_file(folder.path() / "d/step.json", R"({"format": "isograd-dump", "version": 1})");
  const StepDump read = read_dump(folder.path() / "d");
  ASSERT_EQ(read.gradients.size(), 2u);
  EXPECT_EQ(read.gradients[0].first, "a");  // by name where no order is recorded
  EXPECT_EQ(read.gradients[0].second.scalar_type(), at::kDouble);
  EXPECT_TRUE(std::isnan(read.figures.loss));
  EXPECT_EQ(read.figures.targets, kNotRecorded);
  EXPECT_TRUE(read.terms.empty() && read.applied.empty() && read.owners.empty() && read.ranks.empty());
  EXPECT_TRUE(read.samples.empty() && read.counts.empty() && read.axes.empty() && read.shares.empty());
  EXPECT_EQ(read.precision, "bf16");  // the coarsest of its gradients
}

TEST(DumpFiles, NeverTakesTheFolderOfSomethingElse) {
  const ScratchFolder folder;
  fs::create_directory(folder.path() / "mine");
  write_file(folder.path() / "mine/letter.txt", "dear");
  EXPECT_THROW(write_dump(full_dump(), folder.path() / "mine"), ConfigError);
  EXPECT_THROW(write_dump(full_dump(), folder.path() / "mine/letter.txt"), ConfigError);
  EXPECT_THROW(write_dump(full_dump(), folder.path() / "mine/letter.txt/below"), ConfigError);
  EXPECT_EQ(read_file(folder.path() / "mine/letter.txt"), "dear");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1);
}

std::string refusal(const fs::path& dump) {
  return error_testing::error_of([&] { read_dump(dump); });
}

TEST(DumpFiles, WhatIsNoStepIsRefusedByItsKey) {
  const ScratchFolder folder;
  const fs::path dump = folder.path() / "d";
  write_dump(full_dump(), dump);
  const auto with = [&](const std::string& rest) {
    write_file(dump / "step.json", R"({"format": "isograd-dump", "version": 1)" + rest + "}");
    return refusal(dump);
  };
  // Ranks along tp share samples, which count once.
  for (const char* right :
       {"", R"(, "axes": {"dp_shard": 2, "tp": 2}, "counts": [[1], [2]], "ranks": [{}, {}, {}, {}])",
        R"(, "axes": {"dp": 4}, "counts": [[1]], "ranks": [{}], "precision": "fp16")"})
    EXPECT_THAT(with(right), HasSubstr("no error")) << right;
  const std::pair<const char*, const char*> wrong[] = {
      {R"(, "loss": "much")", "loss"},
      {R"(, "loss": [1])", "loss"},
      {R"(, "loss": NaN)", "NaN or Infinity, which JSON does not have"},
      {R"(, "targets": -1)", "targets"},
      {R"(, "targets": 1.5)", "targets"},
      {R"(, "tokens": 18446744073709551615)", "tokens"},
      {R"(, "samples": 5)", "samples"},
      {R"(, "samples": [1, "two"])", "samples"},
      {R"(, "counts": [3])", "counts"},
      {R"(, "counts": [[-3]])", "counts"},
      {R"(, "axes": [2])", "axes"},
      {R"(, "axes": {"dp_shard": 0})", "axes.dp_shard"},
      {R"(, "axes": {"dp_shard": 4294967296})", "axes.dp_shard"},
      {R"(, "axes": {"dp_shard": 524288, "tp": 4})", "1048576 ranks at most"},
      {R"(, "precision": 32)", "precision"},
      {R"(, "precision": "float64")", "precision"},
      {R"(, "loss": null)", "no such key where it was not recorded"},
      {R"(, "ranks": [{}, {"norm": null}])", "ranks.1.norm"},
      {R"(, "ranks": [{"spread": -0.3}])", "ranks.0.spread"},
      {R"(, "ranks": [{"bytes_moved": -5}])", "ranks.0.bytes_moved"},
      {R"(, "norm": -2)", "norm"},
      {R"(, "norm": "-inf")", "norm"},
      {R"(, "clip_coefficient": -1)", "clip_coefficient"},
      {R"(, "owners": [[1, 1]])", "one for each of 2 parameters"},
      {R"(, "ranks": [{"gradients": ["0123456789abcdef"]}])", "one for each of 2 parameters"},
      {R"(, "axes": {"dp": 4}, "ranks": [{}, {}])", "the 4 that \"axes\" makes"},
      {R"(, "axes": {"dp": 4}, "counts": [[1], [2]])", "the 4 that \"axes\" makes"},
      {R"(, "ranks": [{"gradients": ["0123456789abcdef"]}, {}, {"gradients": ["0123456789abcdef",
          "0123456789abcdef"]}])",
       "ranks.2.gradients"},
      // A list without an entry is not what was not recorded.
      {R"(, "samples": [])", "an empty list"},
      {R"(, "counts": [])", "an empty list"},
      {R"(, "ranks": [])", "an empty list"},
      {R"(, "peers": {})", "an empty list"},
      {R"(, "peers": ["tp"])", "peers"},
      {R"(, "peers": {"a.bias": 2})", "peers.a.bias"},
      {R"(, "peers": {"b.bias": "tp"})", "names of gradients.safetensors"},
      {R"(, "peers": {"zz.weight": "tp"})", "no tensor zz.weight"},
      {R"(, "peers": {"a.bias": "tp", "zz.weight": "tp"})", "1 tensors"},
      {R"(, "findings": [])", "an empty list"},
      {R"(, "findings": {"id": "updates_differ"})", "findings"},
      {R"(, "findings": ["updates_differ"])", "an object for each finding"},
      {R"(, "findings": [{"id": "updates_differ"}])", R"(findings.0.sentence": found no such key)"},
      {R"(, "findings": [{"id": "updates_differ", "sentence": ""}])", "a text"},
      {R"(, "findings": [{"id": "gremlins", "sentence": "all over"}])", "a name of docs/museum.md"},
      {R"(, "findings": [{"id": "updates_differ", "sentence": "all over", "rank": 1}])", "findings.0.rank"},
      {R"(, "owners": [])", "an empty list"},
      {R"(, "ranks": [{"initial": []}])", "ranks.0.initial"},
      {R"(, "ranks": [{"initial": ["0123456789abcdef"]}])", "one for each of 2 parameters"},
      {R"(, "parameters": [1])", "parameters"},
      {R"(, "parameters": ["zz.weight"])", "2 tensors"},
      {R"(, "parameters": ["zz.weight", "zz.weight"])", "twice"},
      {R"(, "parameters": ["zz.weight", "b"])", "no tensor b"},
      {R"(, "terms": [1])", "terms"},
      {R"(, "terms": {"a": "b"})", "terms.a"},
      {R"(, "owners": [[1]])", "owners"},
      {R"(, "ranks": [3])", "ranks"},
      {R"(, "ranks": [{"initial": ["xyz"]}])", "ranks.0.initial"},
      {R"(, "ranks": [{"initial": 4}])", "ranks.0.initial"},
      {R"(, "ranks": [{"spreads": 4}])", "ranks.0.spreads"},
      {R"(, "los": 1)", "los"},
      {R"(, "loss": 1, "loss": 2)", "the key \"loss\" twice"},
      {R"(, "loss": )", "no JSON object"},
  };
  for (const auto& [text, expected] : wrong) EXPECT_THAT(with(text), HasSubstr(expected)) << text;
  for (const char* text : {"", "[]", "3", "{", "\xff\xfe", R"({"format": "tar", "version": 1})",
                           R"({"format": "isograd-dump"})", R"({"format": "isograd-dump", "version": 2})"}) {
    write_file(dump / "step.json", text);
    EXPECT_THAT(refusal(dump), HasSubstr("step.json")) << text;
  }
  std::string deep = R"({"format": )" + std::string(200000, '[');
  write_file(dump / "step.json", deep);
  EXPECT_THAT(refusal(dump), HasSubstr("no JSON object"));
}

// Whatever a byte becomes, the answer is a dump or a ConfigError.
TEST(DumpFiles, FlippedBytesNeverGoFurtherThanAnError) {
  const ScratchFolder folder;
  const fs::path dump = folder.path() / "d";
  write_dump(full_dump(), dump);
  int refused = 0;
  for (const char* name : {"step.json", "gradients.safetensors", "share-0-1.safetensors"}) {
    const std::string whole = read_file(dump / name);
    for (std::uint64_t i = 0; i < 300; ++i) {
      std::string spoilt = whole;
      const RandomKey key{.seed = i};
      // The headers, where bytes mean something.
      const std::size_t most = std::min<std::size_t>(whole.size(), 400);
      spoilt[random_bits(key, 0) % most] = static_cast<char>(random_bits(key, 1));
      write_file(dump / name, spoilt);
      refused += refusal(dump) != "no error";
    }
    write_file(dump / name, whole);
  }
  EXPECT_GT(refused, 300);
  EXPECT_EQ(refusal(dump), "no error");
}

// Without "precision" the coarsest type stored; fp64 is not said of what was rounded.
TEST(DumpFiles, PrecisionIsThatOfTheTensors) {
  const ScratchFolder folder;
  const fs::path dump = folder.path() / "d";
  const auto of = [&](at::ScalarType one, at::ScalarType other, const std::string& rest = "") {
    write_dump(full_dump(), dump);
    for (const char* file :
         {"applied.safetensors", "share-0-0.safetensors", "share-0-1.safetensors", "share-2-0.safetensors"})
      fs::remove(dump / file);
    write_safetensors(dump / "gradients.safetensors",
                      {{"zz.weight", at::ones({2, 3}, one)}, {"a.bias", at::ones({4}, other)}});
    write_file(dump / "step.json", R"({"format": "isograd-dump", "version": 1)" + rest + "}");
    return refusal(dump) == "no error" ? read_dump(dump).precision : refusal(dump);
  };
  EXPECT_EQ(of(at::kHalf, at::kHalf), "fp16");
  EXPECT_EQ(of(at::kHalf, at::kFloat), "fp16");
  EXPECT_EQ(of(at::kHalf, at::kBFloat16), "bf16");
  EXPECT_EQ(of(at::kDouble, at::kFloat), "fp32");
  EXPECT_EQ(of(at::kDouble, at::kDouble), "fp64");
  EXPECT_EQ(of(at::kDouble, at::kDouble, R"(, "precision": "fp64")"), "fp64");
  EXPECT_EQ(of(at::kDouble, at::kDouble, R"(, "precision": "bf16")"), "bf16");
  EXPECT_THAT(of(at::kDouble, at::kFloat, R"(, "precision": "fp64")"), HasSubstr("a.bias in Float"));
}

TEST(DumpFiles, BrokenTensorsAreRefusedByTheirFile) {
  const ScratchFolder folder;
  const fs::path dump = folder.path() / "d", gradients = dump / "gradients.safetensors";
  EXPECT_THAT(refusal(dump), HasSubstr("no such folder"));
  write_dump(full_dump(), dump);
  const std::string whole = read_file(gradients);
  for (std::size_t bytes : {std::size_t{0}, std::size_t{5}, std::size_t{60}, whole.size() - 1}) {
    write_file(gradients, whole.substr(0, bytes));
    EXPECT_THAT(refusal(dump), HasSubstr("gradients.safetensors")) << bytes;
  }
  write_safetensors(gradients, {{"zz.weight", at::ones({2, 3}, at::kLong)}, {"a.bias", at::ones({4})}});
  EXPECT_THAT(refusal(dump), HasSubstr("zz.weight in Long"));
  write_safetensors(gradients, {{"zz.weight", at::ones({2, 3})}, {"a.bias", at::ones({5})}});
  EXPECT_THAT(refusal(dump), HasSubstr("applied.safetensors: tensor a.bias"));
  fs::remove(gradients);
  EXPECT_THAT(refusal(dump), HasSubstr("gradients.safetensors"));
  fs::remove(dump / "step.json");
  EXPECT_THAT(refusal(dump), HasSubstr("step.json"));
}

}  // namespace
}  // namespace isograd
