// Checkpoints from any mesh to any mesh (E3): what one mesh has saved is loaded by another and saved again,
// to the last bit of every file, and by the next, and by the first one again.
#include <gtest/gtest.h>

#include "base/files.hpp"
#include "full_tests.hpp"
#include "hybrid_testing.hpp"
#include "isograd/checkpoint.hpp"
#include "train/prepared_run.hpp"
#include "train/run_folder.hpp"

namespace isograd::hybrid {
namespace {

namespace fs = std::filesystem;

using Files = std::map<std::string, std::string>;  // by name

Files files_of(const fs::path& folder) {
  Files files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) files[fs::relative(entry.path(), folder).string()] = read_file(entry.path());
  return files;
}

// Names of files that are not the same.
std::string differing(const Files& found, const Files& expected) {
  std::string names;
  for (const auto& [name, bytes] : expected)
    if (!found.count(name) || found.at(name) != bytes) names += " " + name;
  for (const auto& [name, bytes] : found)
    if (!expected.count(name)) names += " " + name + " (new)";
  return names;
}

using Touch = std::function<void(World&, DataParallel&)>;

class HybridCheckpoints : public HybridCells {
 protected:
  // Moments are saved, and masters where the parameters are bf16. As many layers as the longest pipeline has
  // stages, so that all meshes have one model.
  RunConfig configured(const Cell& cell, const std::string& name) const {
    RunConfig config = config_for(cell);
    config.run.directory = (root_ / name).string();
    config.train.steps = 2;
    config.train.evaluate_every = 0;
    config.train.dtype = cell.is(kModel, "biased") ? "bfloat16" : "float32";
    if (!cell.is(kModel, "video")) config.model.shape.layers = 8, config.batch.packs_per_step = 9;
    return config;
  }

  // The checkpoint that `cell` saves after loading `from`. `touch` the layout between.
  fs::path saved_again(const Cell& cell, const fs::path& from, const std::string& name,
                       const Touch& touch = {}) const {
    RunConfig config = configured(cell, name);
    config.checkpoint.resume = from.string();
    fs::path saved;
    run_ranks(cell.ranks(), [&](World& world) {
      PreparedRun run(config, world);
      if (touch) touch(world, *run.layout);
      const fs::path folder = save_checkpoint(
          {.root = checkpoint_root(config), .placed = run.placed()}, open_checkpoint(from),
          [&](const fs::path& directory, const TensorStream& weights) {
            run.model->write(directory, weights);
          },
          *run.layout, *run.optimizer);
      if (world.rank == 0) saved = folder;
    });
    return saved;
  }
};

// The cells of the pairwise sweep, by model: each axis of one mesh meets all others on the way. Some of them,
// of three models; with ISOGRAD_FULL_TESTS=1 all.
TEST_F(HybridCheckpoints, FromAnyMeshToAnyMeshAndBackTheSameBits) {
  std::map<std::string, std::vector<Cell>> by_model;
  for (const Cell& cell : pairwise_cells()) by_model[cell.text(kModel)].push_back(cell);
  ASSERT_EQ(by_model.size(), factors()[kModel].values.size());
  if (!full_tests())
    for (const char* alike : {"dense", "sigmoid", "video"}) by_model.erase(alike);
  std::size_t links = 0, bytes = 0;
  for (auto& [model, cells] : by_model) {
    // Those with the most ranks first: most axes at once.
    std::stable_sort(cells.begin(), cells.end(),
                     [](const Cell& a, const Cell& b) { return a.ranks() > b.ranks(); });
    constexpr std::size_t kSome = 3;
    std::vector<Cell> chain;
    const std::size_t stride = full_tests() ? 1 : std::max<std::size_t>(1, cells.size() / kSome);
    for (std::size_t i = 0; i < cells.size(); i += stride) chain.push_back(cells[i]);
    chain.push_back(chain.front());
    const Run run_of_first = run(configured(chain[0], model), chain[0].ranks());
    fs::path last = run_of_first.outcomes[0].checkpoint;
    const Files expected = files_of(last);
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"})
      ASSERT_TRUE(expected.count(file)) << model << ": " << file;
    for (std::size_t i = 1; i < chain.size(); ++i, ++links) {
      const fs::path again = saved_again(chain[i], last, fmt::format("{}-{}", model, i));
      EXPECT_NE(again, last);
      EXPECT_EQ(differing(files_of(again), expected), "")
          << chain[i - 1].name() << ", then " << chain[i].name();
      last = again;
    }
    for (const auto& [name, text] : expected) bytes += text.size();
  }
  std::printf("%zu times loaded and saved again, %zu models of %zu bytes together\n", links, by_model.size(),
              bytes);
}

// One element that its owner alone holds, turned round: the weights that are saved are others.
TEST_F(HybridCheckpoints, AnElementThatOneRankTurnsRoundIsSeen) {
  const Cell cell = Cell{}.with(kShard, "2").with(kTp, "2").with(kStrategy, "zero3");
  const fs::path saved = run(configured(cell, "right"), cell.ranks()).outcomes[0].checkpoint;
  const Files expected = files_of(saved);
  const auto from = [&](const std::string& name, const Touch& touch) {
    return differing(files_of(saved_again(cell, saved, name, touch)), expected);
  };
  EXPECT_EQ(from("untouched", {}), "");
  EXPECT_EQ(from("touched",
                 [](World& world, DataParallel& layout) {
                   const at::NoGradGuard no_grad;
                   Bucket& bucket = layout.buckets().back();
                   if (world.rank == world.size - 1)
                     bucket.parameters.narrow(0, bucket.owned.begin - bucket.held.begin, 1).neg_();
                 }),
            " checksums.json model.safetensors");
}

}  // namespace
}  // namespace isograd::hybrid
