// Which language is a line written in? Real data: your .cpp, .py and .md files, every fifth held out. Three
// ranks train by DDP, save, and go on under ZeRO-3.     classifier src/*/*.cpp tests/*.py docs/*.md
#include <torch/data.h>
#include <torch/nn/modules/linear.h>
#include <isograd/isograd.hpp>

#include <fstream>

const std::vector<std::filesystem::path> kLanguages = {".cpp", ".py", ".md"};
constexpr std::int64_t kPairs = 1024;
struct Lines : torch::data::datasets::BatchDataset<Lines, isograd::Batch> {
  at::Tensor pairs, languages;  // [N, kPairs]: how often pairs of bytes occur in a line; [N]
  Lines(const std::vector<std::filesystem::path>& paths, bool held_out) {
    std::vector<at::Tensor> rows;
    std::vector<std::int64_t> classes, files(3), left(3, 2000);  // at most 2000 lines of each
    for (const std::filesystem::path& file : paths) {
      const auto c = std::find(kLanguages.begin(), kLanguages.end(), file.extension()) - kLanguages.begin();
      if (c == 3 || (files[c]++ % 5 == 0) != held_out) continue;
      std::ifstream text(file);
      for (std::string line; left[c] > 0 && std::getline(text, line);) {
        if (line.size() < 12) continue;
        const at::Tensor bytes = at::from_blob(line.data(), std::ssize(line), at::kByte).to(at::kLong);
        rows.push_back(at::bincount((31 * bytes.slice(0, 1) + bytes.slice(0, 0, -1)) % kPairs, {}, kPairs));
        classes.push_back(c), left[c] -= 1;
      }
    }
    pairs = at::stack(rows).to(at::kFloat), languages = at::tensor(classes);
  }
  isograd::Batch get_batch(at::ArrayRef<std::size_t> numbers) override {
    const std::vector<std::int64_t> ids(numbers.begin(), numbers.end());
    const at::Tensor own = at::tensor(ids);
    return isograd::batch_of_samples({pairs.index_select(0, own)}, languages.index_select(0, own), ids);
  }
  std::optional<std::size_t> size() const override { return pairs.size(0); }
};
struct NetImpl : torch::nn::Module {
  isograd::Sharded<torch::nn::LinearImpl> hidden, output;  // units of ZeRO-3; under DDP as they are
  NetImpl() : hidden(torch::nn::Linear(kPairs, 32)), output(torch::nn::Linear(32, 3)) {
    register_module("hidden", hidden.ptr()), register_module("output", output.ptr());
  }
  at::Tensor forward(const at::Tensor& x) { return output(at::relu(hidden(x))); }
};
// Goes on from the newest checkpoint to step 150, or 300. Returns the share of held-out lines that are right.
double train(isograd::World& world, const Lines& lines, const Lines& held_out, bool zero3) {
  const isograd::Sharded<NetImpl> net(std::make_shared<NetImpl>());
  isograd::prepare_module(net, world.group);
  auto layout = zero3 ? isograd::fully_shard(net, {net->hidden, net->output}, world.group)
                      : isograd::bucketed(isograd::trainable_parameters(net), world.group);
  auto adamw = isograd::adamw({.learning_rate = 0.003});
  isograd::TokenMean mean;  // over all lines of a step
  const auto x = [](auto& b) { return b.inputs.empty() ? at::zeros({0, kPairs}) : b.inputs[0]; };  // step({})
  const auto sum = [&](auto& b) { return isograd::cross_entropy_sum(net(x(b)), b.targets); };
  isograd::Step step(sum, *layout, mean, *adamw);
  std::int64_t i = isograd::load_checkpoint("classifier.run", net, *layout, *adamw);  // 0: none yet
  isograd::Sampler sampler({.samples = lines.pairs.size(0),
                            .samples_per_step = 61,
                            .rank = world.rank,
                            .size = world.size,
                            .drop_last = true});
  sampler.seek({i / sampler.steps_per_epoch(), i % sampler.steps_per_epoch()});
  auto loader = torch::data::make_data_loader(lines, isograd::LoaderSampler(sampler), {});
  for (auto batch = loader->begin(); i < (zero3 ? 300 : 150); ++i, ++batch) step(*batch);
  isograd::save_checkpoint({.root = "classifier.run"}, i, net, *layout, *adamw);
  const at::NoGradGuard no_grad;
  return net(held_out.pairs).argmax(1).eq(held_out.languages).to(at::kDouble).mean().item<double>();
}

int main(int argc, char** argv) {
  if (argc < 2) return std::puts("classifier FILE..."), 2;
  const std::vector<std::filesystem::path> paths(argv + 1, argv + argc);
  const Lines lines(paths, false), held_out(paths, true);
  std::vector<double> right(3);  // by rank
  for (const bool zero3 : {false, true}) {
    isograd::run_ranks(3, [&](isograd::World& w) { right[w.rank] = train(w, lines, held_out, zero3); });
    std::printf("%s: %.1f %% of held-out lines are right\n", zero3 ? "ZeRO-3" : "DDP", 100 * right[0]);
  }
  std::filesystem::remove_all("classifier.run");
  return right[0] > 0.8 ? 0 : 1;
}
