// Weights and checkpoints of a user's own module: files that any number of ranks reads, and the same bits
// after a resume.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <torch/nn/pimpl.h>
#include <unistd.h>

#include <atomic>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/step.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/world.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kVocabulary = 13, kHidden = 7;  // odd: no size is a multiple of a number of ranks

struct BlockImpl : torch::nn::Module {
  at::Tensor weight, bias;
  explicit BlockImpl(at::Generator generator) {
    weight = register_parameter("weight", at::randn({kHidden, kHidden}, generator, at::kDouble) * 0.3);
    bias = register_parameter("bias", at::randn({kHidden}, generator, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return x + at::tanh(at::linear(x, weight, bias)); }
};
TORCH_MODULE(Block);

// A table that is tied with the output, a frozen parameter, a parameter of one element, two buffers.
struct NetImpl : torch::nn::Module {
  at::Tensor table, frozen, gain, scale, count;
  std::vector<Sharded<BlockImpl>> blocks;
  explicit NetImpl(std::uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto random = [&](at::IntArrayRef shape) { return at::randn(shape, generator, at::kDouble) * 0.5; };
    table = register_parameter("table", random({kVocabulary, kHidden}));
    register_parameter("output", table);
    frozen = register_parameter("frozen", random({kHidden}), /*requires_grad=*/false);
    gain = register_parameter("gain", random({1}));
    scale = register_buffer("scale", random({1, kHidden}));
    count = register_buffer("count", at::full({}, static_cast<std::int64_t>(seed), at::kLong));
    for (int i = 0; i < 2; ++i)
      blocks.emplace_back(register_module(fmt::format("block{}", i), Block(generator)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = at::embedding(table, tokens) * scale + frozen;
    for (auto& block : blocks) x = block(x);
    return at::linear(x * gain, table);
  }
};
TORCH_MODULE(Net);
using Model = Sharded<NetImpl>;  // as fully_shard() takes it, and everything else too
Model model_of(std::uint64_t seed) { return Net(seed); }

// Batch `number` of a step: 2 to 8 tokens. A step has three, so that of five ranks two have none.
Batch batch_of(std::int64_t step, std::int64_t number) {
  const std::int64_t length = 2 + (5 * step + 3 * number) % 7;
  Batch batch = empty_batch();
  batch.tokens = (at::arange(length) * (number + 2) + step) % kVocabulary;
  batch.targets = (batch.tokens * 3 + 1) % kVocabulary;
  batch.positions = at::arange(length);
  batch.cu_seqlens = {0, length};
  batch.sample_ids = {number};
  batch.sample_targets = {length};
  return batch;
}

const std::vector<std::string> kLayouts = {"ddp", "zero1", "zero2", "zero3", "shared"};

std::unique_ptr<DataParallel> layout_of(const Model& net, const std::string& kind, const Group& group) {
  if (kind == "zero3") return fully_shard(net, {net->blocks.begin(), net->blocks.end()}, group);
  const bool shared = kind == "shared";
  const int stage = kind == "ddp" || shared ? 0 : kind.back() - '0';
  return bucketed(trainable_parameters(net), group,
                  {.stage = stage, .share_parameters = shared, .bucket_bytes = 300});
}
std::unique_ptr<Optimizer> optimizer_of(const std::string& kind) {
  if (kind == "adamw") return adamw({});
  return sgd({.momentum = 0.9, .weight_decay = 0.01});
}

// Steps first to last - 1 of this rank; the last loss.
double train(const World& world, const Model& net, DataParallel& layout, Optimizer& optimizer,
             std::int64_t first, std::int64_t last) {
  TokenMean mean;
  Step step([&](const Batch& batch) { return cross_entropy_sum(net(batch.tokens), batch.targets); }, layout,
            mean, optimizer);
  const Schedule schedule{.peak = 0.05, .warmup = 2, .total = 8};
  double loss = 0;
  for (std::int64_t i = first; i < last; ++i) {
    optimizer.set_learning_rate(schedule.at(i));
    MicroBatches own;
    for (std::int64_t number = world.rank; number < 3; number += world.size)
      own.push_back(batch_of(i, number));
    loss = step(own).loss;
  }
  return loss;
}

// Copies of all values by name: whole parameters, then buffers. Collective.
using Values = std::map<std::string, at::Tensor>;
Values values_of(const Model& net, DataParallel& layout) {
  Values values;
  for (const auto& view : layout.views()) values[view.name] = view.parameter.detach().clone();
  {
    const auto whole = layout.whole_parameters();
    values["frozen"] = net->frozen.detach().clone();
  }
  for (const auto& item : net->named_buffers()) values[item.key()] = item.value().clone();
  return values;
}
void expect_same(const Values& a, const Values& b, const std::string& where) {
  ASSERT_EQ(a.size(), 9u) << where;
  ASSERT_EQ(b.size(), a.size()) << where;
  for (const auto& [name, value] : a) EXPECT_TRUE(at::equal(value, b.at(name))) << where << ": " << name;
}
bool differ(const Values& a, const Values& b) {
  return std::any_of(a.begin(), a.end(),
                     [&](const auto& each) { return !at::equal(each.second, b.at(each.first)); });
}

class OwnModule : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(::testing::TempDir()) /
            fmt::format("isograd-own-{}-{}", getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  // Weights of a net of this seed, written by one process.
  fs::path weights(std::uint64_t seed = 3) const {
    write_weights(root_ / "weights", Net(seed));
    return root_ / "weights";
  }
  fs::path root_;
};

TEST_F(OwnModule, WeightsAreReadOnAnyNumberOfRanksUnderAnyLayout) {
  for (const std::string& kind : kLayouts)
    for (const int ranks : {1, 2, 3, 5}) {
      const std::string where = fmt::format("{} on {} ranks", kind, ranks);
      const fs::path folder = root_ / kind / std::to_string(ranks) / "";  // as a shell completes it
      Values written;
      run_ranks(ranks, [&](World& world) {
        const Model net = model_of(3);
        const auto layout = layout_of(net, kind, world.group);
        const auto optimizer = optimizer_of("adamw");
        const Values before = values_of(net, *layout);
        train(world, net, *layout, *optimizer, 0, 2);
        const Values after = values_of(net, *layout);
        write_weights(folder, net, *layout, nullptr, /*file_bytes=*/500);
        EXPECT_TRUE(differ(before, after)) << "nothing was trained: the test shows nothing";
        if (world.rank == 0) written = after;
      });
      EXPECT_TRUE(fs::exists(folder / "model.safetensors.index.json"));
      EXPECT_TRUE(fs::exists(folder / "model-00001-of-00004.safetensors"));

      const Model alone = model_of(4);
      read_weights(folder, alone);
      World world;
      expect_same(values_of(alone, *layout_of(alone, "ddp", world.group)), written, where);
      const std::string other = kLayouts[static_cast<std::size_t>(ranks + 1) % 5];
      run_ranks(6 - ranks, [&](World& others) {
        const Model net = model_of(4);
        const auto layout = layout_of(net, other, others.group);
        EXPECT_TRUE(differ(values_of(net, *layout), written));
        read_weights(folder, net, *layout);
        expect_same(values_of(net, *layout), written, where + ", read under " + other);
      });
    }
}

TEST_F(OwnModule, AResumedRunHasTheSameBits) {
  for (const std::string& kind : kLayouts)
    for (const std::string optimizes : {"adamw", "sgd"})
      for (const int ranks : {1, 2, 3, 5}) {
        const std::string where = fmt::format("{} {} on {} ranks", kind, optimizes, ranks);
        const fs::path root = root_ / fmt::format("{}-{}-{}", kind, optimizes, ranks);
        run_ranks(ranks, [&](World& world) {
          const Model straight = model_of(3);
          const auto layout = layout_of(straight, kind, world.group);
          const auto optimizer = optimizer_of(optimizes);
          EXPECT_EQ(load_checkpoint(root, straight, *layout, *optimizer), 0);
          train(world, straight, *layout, *optimizer, 0, 3);
          save_checkpoint({.root = root}, 3, straight, *layout, *optimizer);
          const double loss = train(world, straight, *layout, *optimizer, 3, 6);
          const Values expected = values_of(straight, *layout);

          // Planted: the same without the optimizer's state.
          for (const bool forgets : {false, true}) {
            const Model net = model_of(8);
            const auto resumed_layout = layout_of(net, kind, world.group);
            const auto resumed = optimizer_of(optimizes);
            std::int64_t first = 3;
            if (forgets)
              read_weights(root / "step-00000003", net, *resumed_layout);
            else
              first = load_checkpoint(root, net, *resumed_layout, *resumed);
            EXPECT_EQ(first, 3);
            const double again = train(world, net, *resumed_layout, *resumed, first, 6);
            const Values values = values_of(net, *resumed_layout);
            if (forgets) {
              EXPECT_TRUE(differ(values, expected)) << where << ": the comparison sees nothing";
            } else {
              expect_same(values, expected, where);
              EXPECT_EQ(again, loss) << where;
            }
          }
        });
      }
}

// On other ranks the loaded state is the saved one, to the byte, and the run is the same up to rounding.
TEST_F(OwnModule, ACheckpointGoesOnOnAnotherNumberOfRanks) {
  for (const std::string optimizes : {"adamw", "sgd"}) {
    const fs::path root = root_ / optimizes;
    Values expected;
    run_ranks(3, [&](World& world) {
      const Model net = model_of(3);
      const auto layout = layout_of(net, "zero2", world.group);
      const auto optimizer = optimizer_of(optimizes);
      train(world, net, *layout, *optimizer, 0, 3);
      save_checkpoint({.root = root}, 3, net, *layout, *optimizer);
      train(world, net, *layout, *optimizer, 3, 6);
      const Values values = values_of(net, *layout);
      if (world.rank == 0) expected = values;
    });
    const auto bytes = [](const fs::path& folder, const char* name) {
      return read_file(folder / "step-00000003" / name);
    };
    for (const auto& [kind, ranks] :
         std::vector<std::pair<std::string, int>>{{"ddp", 1}, {"zero3", 2}, {"zero1", 5}, {"zero3", 5}}) {
      const std::string where = fmt::format("{} {} on {} ranks", kind, optimizes, ranks);
      const fs::path again = root_ / fmt::format("{}-{}-{}", optimizes, kind, ranks);
      run_ranks(ranks, [&](World& world) {
        const Model net = model_of(8);
        const auto layout = layout_of(net, kind, world.group);
        const auto optimizer = optimizer_of(optimizes);
        const std::int64_t first = load_checkpoint(root, net, *layout, *optimizer);
        save_checkpoint({.root = again}, first, net, *layout, *optimizer);
        train(world, net, *layout, *optimizer, first, 6);
        for (const auto& [name, value] : values_of(net, *layout))
          EXPECT_TRUE(at::allclose(value.to(at::kDouble), expected.at(name).to(at::kDouble), 1e-10, 1e-12))
              << where << ": " << name;
      });
      for (const char* name : {"model.safetensors", "optimizer.safetensors"})
        EXPECT_TRUE(bytes(again, name) == bytes(root, name)) << where << ": " << name;
    }
  }
}

TEST_F(OwnModule, AForwardOfOneTensorIsALossOfOneTerm) {
  run_ranks(2, [&](World& world) {
    StepReport reports[3];
    for (const int form : {0, 1, 2}) {
      const Model net = model_of(3);
      const auto layout = layout_of(net, "ddp", world.group);
      const auto optimizer = optimizer_of("sgd");
      TokenMean mean;
      const auto sum = [&](const Batch& batch) {
        return cross_entropy_sum(net(batch.tokens), batch.targets);
      };
      const auto terms = [&](const Batch& batch) -> LossTerms { return {{"loss", sum(batch)}}; };
      const Batch batch = batch_of(0, world.rank);
      if (form == 0) reports[0] = Step(terms, *layout, mean, *optimizer)({batch});
      if (form == 1) reports[1] = Step(sum, *layout, mean, *optimizer)(batch);
      if (form == 2) reports[2] = Step(one_term(sum, "named"), *layout, mean, *optimizer)(batch);
    }
    for (const int form : {1, 2}) {
      EXPECT_EQ(reports[form].loss, reports[0].loss);
      EXPECT_EQ(reports[form].norm, reports[0].norm);
      EXPECT_GT(reports[form].step_counts.targets, batch_of(0, world.rank).num_targets());
      ASSERT_EQ(reports[form].terms.size(), 1u);
      EXPECT_EQ(reports[form].terms[0].name, form == 1 ? "loss" : "named");
    }
  });
}

// ---- a module that cut() has sharded ----

struct PairImpl : torch::nn::Module {
  at::Tensor up, down, norm, seen;
  explicit PairImpl(double value) {
    up = register_parameter("up", at::arange(11.0 * 3).view({11, 3}) + value);
    down = register_parameter("down", at::arange(3.0 * 11).view({3, 11}) * value);
    norm = register_parameter("norm", at::full({3}, value, at::kDouble));
    seen = register_buffer("seen", at::full({2}, value));
  }
};
TORCH_MODULE(Pair);

TEST_F(OwnModule, PartsAlongTensorRanksAreWholeInTheFiles) {
  const auto on = [&](const std::vector<Axis>& axes, double value, const auto& use) {
    Grid grid(axes);
    run_ranks(grid.ranks(), [&](World& world) {
      const Mesh mesh(world, grid);
      Pair pair(value);
      const Layout placed = cut(pair, mesh, {cut_along("up", 0), cut_along("down", 1)});
      TrainableParameters parameters = trainable_parameters(pair);
      parameters.placements = placed.placements();
      const auto layout = bucketed(std::move(parameters), mesh, {.stage = 2});
      const auto optimizer = optimizer_of("adamw");
      use(pair, placed, *layout, *optimizer);
    });
  };
  const auto update = [](const Pair& pair, DataParallel& layout, Optimizer& optimizer) {
    layout.zero_gradients();
    layout.begin_backward(true);
    (pair->up.sin().sum() + pair->down.square().sum() + pair->norm.sum()).backward();
    layout.finish_reduction();
    optimizer.update(layout.buckets(), 1);
    layout.publish_parameters();
  };
  const fs::path root = root_ / "run", again = root_ / "again", folder = root_ / "weights";
  on({{"dp_shard", 2}, {"tp", 2}}, 0.5,
     [&](Pair& pair, const Layout& placed, DataParallel& layout, Optimizer& optimizer) {
       update(pair, layout, optimizer);
       write_weights(folder, pair, layout, &placed);
       save_checkpoint({.root = root, .placed = &placed}, 1, pair, layout, optimizer);
       EXPECT_THAT(error_of([&] { write_weights(root_ / "parts", pair, layout); }),
                   AllOf(HasSubstr("parts of it on the ranks along tp"), HasSubstr("&placed")));
     });
  const auto stored = read_safetensors(folder / "model.safetensors");
  ASSERT_EQ(stored.size(), 4u);
  EXPECT_EQ(stored.at("up").sizes(), (std::vector<std::int64_t>{11, 3}));
  Pair whole(7);
  read_weights(folder, whole);
  for (const auto& item : whole->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), stored.at(item.key()))) << item.key();
    EXPECT_FALSE(at::equal(item.value(), Pair(0.5)->named_parameters()[item.key()])) << "not updated";
  }
  on({{"tp", 3}}, 9, [&](Pair& pair, const Layout& placed, auto& layout, auto& optimizer) {
    EXPECT_EQ(load_checkpoint(root, pair, layout, optimizer, &placed), 1);
    for (const auto& item : pair->named_parameters())
      EXPECT_TRUE(at::equal(placed.whole(item.key(), item.value().detach()), stored.at(item.key())))
          << item.key();
    EXPECT_TRUE(at::equal(pair->seen, stored.at("seen")));
    save_checkpoint({.root = again, .placed = &placed}, 1, pair, layout, optimizer);
    pair->norm.detach().zero_();
    read_weights(folder, pair, layout, &placed);
    EXPECT_TRUE(at::equal(pair->norm.detach(), stored.at("norm")));
    EXPECT_THAT(error_of([&] { read_weights(folder, pair); }),
                AllOf(HasSubstr("shape [11, 3]"), HasSubstr("cut() has sharded")));
  });
  for (const char* name : {"model.safetensors", "optimizer.safetensors"})
    EXPECT_TRUE(read_file(root / "step-00000001" / name) == read_file(again / "step-00000001" / name))
        << name;
}

TEST_F(OwnModule, MastersOfBf16GoOnToo) {
  const fs::path root = root_ / "run";
  run_ranks(2, [&](World& world) {
    const auto run = [&](double value, std::int64_t steps, const auto& before) {
      const at::Tensor slopes = at::arange(33.0).view({11, 3}) + 1;
      Pair pair(value);
      pair->to(at::kBFloat16);
      const auto layout = bucketed(trainable_parameters(pair), world.group, {.stage = 1});
      const auto optimizer = optimizer_of("adamw");
      for (std::int64_t i = before(pair, *layout, *optimizer); i < steps; ++i) {
        layout->zero_gradients();
        layout->begin_backward(true);
        (pair->up.to(at::kDouble) * slopes).sin().sum().backward();
        layout->finish_reduction();
        optimizer->update(layout->buckets(), 1);
        layout->publish_parameters();
        if (i == 2) save_checkpoint({.root = root}, 3, pair, *layout, *optimizer);
      }
      return layout->views()[0].master.clone();
    };
    const auto from_start = [](auto&...) { return std::int64_t{0}; };
    const at::Tensor straight = run(0.5, 6, from_start);
    const at::Tensor resumed = run(4, 6, [&](Pair& pair, DataParallel& layout, Optimizer& optimizer) {
      return load_checkpoint(root, pair, layout, optimizer);
    });
    EXPECT_EQ(straight.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(straight, resumed));
    EXPECT_FALSE(at::equal(straight, run(0.5, 3, from_start)));
  });
}

// ---- bad input ----

// Modules of which one thing is not as in Net.
struct OtherImpl : NetImpl {
  explicit OtherImpl(const std::string& change) : NetImpl(1) {
    if (change == "name") register_parameter("more", at::zeros({2}));
    if (change == "shape") table.set_data(at::zeros({kVocabulary + 1, kHidden}, at::kDouble));
    if (change == "type") scale.set_data(at::zeros({1, kHidden}, at::kLong));
    if (change == "less") unregister_module("block1");
    if (change == "float") to(at::kFloat), count.set_data(count.to(at::kLong));
  }
};

TEST_F(OwnModule, WeightsThatDoNotFitAreNamed) {
  const fs::path folder = weights();
  const auto error = [&](const std::string& change) {
    return error_of([&] { read_weights(folder, OtherImpl(change)); });
  };
  EXPECT_THAT(error("name"), AllOf(HasSubstr(folder.string() + ": more"), HasSubstr("no such tensor"),
                                   HasSubstr("shape [2]"), HasSubstr("Make the module as it was")));
  EXPECT_THAT(error("shape"), AllOf(HasSubstr("model.safetensors: table"), HasSubstr("found shape [13, 7]"),
                                    HasSubstr("expected shape [14, 7]")));
  EXPECT_THAT(error("type"),
              AllOf(HasSubstr("scale"), HasSubstr("found Double"), HasSubstr("expected Long")));
  EXPECT_THAT(error("less"), AllOf(HasSubstr("block1.bias"), HasSubstr("no place for")));
  EXPECT_THAT(error_of([&] { read_weights(folder, Pair(1)); }),
              AllOf(HasSubstr("weights of another model: block0.bias, block0.weight, block1.bias, ..."),
                    HasSubstr("those of this module: up, ...")));
  EXPECT_EQ(error("float"), "no error");  // rounded

  // Nothing is written before everything has been checked, and all ranks have the error.
  run_ranks(3, [&](World& world) {
    auto net = std::make_shared<OtherImpl>("name");
    const auto layout = bucketed(trainable_parameters(net), world.group, {.stage = 2});
    EXPECT_THAT(error_of([&] { read_weights(folder, net, *layout); }), HasSubstr("no such tensor"));
    EXPECT_TRUE(at::equal(net->table, Net(1)->table));
  });
}

TEST_F(OwnModule, FoldersThatAreNoWeightsAreRefused) {
  const fs::path folder = weights();
  const auto reads = [&](const fs::path& from) { return error_of([&] { read_weights(from, Net(1)); }); };
  EXPECT_THAT(reads(root_ / "weight"), AllOf(HasSubstr("no such folder"), HasSubstr("weights")));
  EXPECT_THAT(reads(folder / "model.safetensors"), HasSubstr("found a file"));
  fs::create_directories(root_ / "empty");
  EXPECT_THAT(reads(root_ / "empty"), HasSubstr("no weights"));

  const auto writes = [&](const fs::path& to) { return error_of([&] { write_weights(to, Net(1)); }); };
  EXPECT_EQ(writes(folder), "no error");
  EXPECT_EQ(writes(root_ / "empty"), "no error");
  write_file(folder / "notes.txt", "mine");
  EXPECT_THAT(writes(folder), AllOf(HasSubstr("notes.txt"), HasSubstr("a folder of their own")));
  EXPECT_EQ(read_file(folder / "notes.txt"), "mine");
  EXPECT_THAT(writes(folder / "notes.txt"), HasSubstr("found a file"));
  EXPECT_THAT(writes(""), HasSubstr("an empty name"));
  fs::remove(folder / "notes.txt"), fs::remove(folder / "checksums.json");
  EXPECT_EQ(reads(folder), "no error") << "files of other programs have no checksums";
  EXPECT_THAT(writes(folder), HasSubstr("weights of another program"));
}

TEST_F(OwnModule, DamageAndValuesThatAreNotFiniteAreNamed) {
  const fs::path file = weights() / "model.safetensors";
  std::string bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(file, bytes);
  EXPECT_THAT(error_of([&] { read_weights(file.parent_path(), Net(1)); }),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("checksum")));
  Net net(3);
  net->gain.detach().fill_(std::nan(""));
  write_weights(root_ / "diverged", net);
  EXPECT_THAT(error_of([&] { read_weights(root_ / "diverged", Net(1)); }), HasSubstr("gain"));
  // A name of a tied tensor, from a program that writes both.
  write_safetensors(root_ / "model.safetensors", {{"a", at::zeros({2})}, {"b", at::ones({2})}});
  torch::nn::Module tied;
  const at::Tensor both = tied.register_parameter("a", at::ones({2}));
  tied.register_parameter("b", both);
  EXPECT_THAT(error_of([&] { read_weights(root_, tied); }), HasSubstr("the module ties them"));
}

TEST_F(OwnModule, AnEmptyHolderIsRefusedWithItsLine) {
  const Block holder(nullptr);
  const std::shared_ptr<BlockImpl> pointer;
  World world;
  const auto refusals = {error_of([&] { prepare_module(holder, world.group); }),
                         error_of([&] { prepare_module(pointer, world.group); }),
                         error_of([&] { trainable_parameters(holder); }),
                         error_of([&] { check_buffers(pointer, world.group); }),
                         error_of([&] { write_weights(root_ / "w", holder); }),
                         error_of([&] { read_weights(root_ / "w", pointer); }),
                         error_of([&] { Sharded<BlockImpl> sharded(holder); })};
  for (const std::string& text : refusals)
    EXPECT_THAT(text, AllOf(HasSubstr("own_module_test.cpp:"), HasSubstr("an empty holder or a null pointer"),
                            HasSubstr("Make it before the call")));
  // All forms of a module are one argument.
  const Net net(3);
  const auto as = [&](const ModuleRef& module) { return trainable_parameters(module).size(); };
  EXPECT_EQ(as(net), 6u);
  EXPECT_EQ(as(*net), 6u);
  EXPECT_EQ(as(net.ptr()), 6u);
  EXPECT_EQ(as(Sharded<NetImpl>(net)), 6u);
}

TEST_F(OwnModule, CallsThatDoNotFitTheLayoutAreRefusedOnAllRanks) {
  run_ranks(3, [&](World& world) {
    const Model net = model_of(3);
    const auto layout = layout_of(net, "zero3", world.group);
    const auto optimizer = optimizer_of("adamw");
    EXPECT_THAT(error_of([&] { write_weights(root_ / "w", net); }),
                AllOf(HasSubstr("keeps a shard"), HasSubstr("write_weights(directory, module, *layout)")));
    EXPECT_THAT(error_of([&] { write_weights(root_ / "w", Pair(1), *layout); }),
                AllOf(HasSubstr("of the layout"), HasSubstr("Pass the module")));
    EXPECT_THAT(error_of([&] { save_checkpoint({.root = root_ / "run"}, -1, net, *layout, *optimizer); }),
                HasSubstr("step -1"));
    const at::Tensor scale = net->scale.clone();
    net->scale.add_(world.rank);
    EXPECT_THAT(error_of([&] { write_weights(root_ / "w", net, *layout); }),
                AllOf(HasSubstr("scale"), HasSubstr("SyncBatchNorm")));
    EXPECT_FALSE(fs::exists(root_ / "w"));
    net->scale.copy_(scale);
    save_checkpoint({.root = root_ / "run"}, 4, net, *layout, *optimizer);
    EXPECT_THAT(error_of([&] { load_checkpoint(root_ / "run", net, *layout, *optimizer_of("sgd")); }),
                AllOf(HasSubstr("found \"adamw\""), HasSubstr("\"sgd\", the optimizer given")));
    write_weights(root_ / "w", net, *layout);
    EXPECT_THAT(error_of([&] { load_checkpoint(root_ / "w", net, *layout, *optimizer); }),
                HasSubstr("read_weights()"));
    EXPECT_EQ(load_checkpoint(root_ / "run" / "step-00000004", net, *layout, *optimizer), 4);
    EXPECT_THAT(error_of([&] {
                  save_checkpoint({.root = root_ / "run" / "step-00000004"}, 5, net, *layout, *optimizer);
                }),
                AllOf(HasSubstr("found a checkpoint"), HasSubstr("the folder above it")));
  });
}

TEST_F(OwnModule, RanksThatEachWriteAsIfAloneDoNotMixTheirFiles) {
  const fs::path folder = weights();
  const int other = open_lock(root_ / ".weights.lock");
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  EXPECT_THAT(error_of([&] { write_weights(folder, Net(5)); }),
              AllOf(HasSubstr("another write"), HasSubstr("write_weights(directory, module, *layout)")));
  ::close(other);
  fs::remove(root_ / ".weights.lock");
  std::atomic<int> written = 0;
  run_ranks(3, [&](World&) {
    const std::string error = error_of([&] { write_weights(folder, Net(5)); });
    EXPECT_THAT(error, ::testing::AnyOf("no error", HasSubstr("another write")));
    written += error == "no error";
  });
  EXPECT_GE(written, 1);
  Net net(1);
  read_weights(folder, net);
  EXPECT_TRUE(at::equal(net->table, Net(5)->table));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1) << "leftovers";
}

// A write that was killed: before the folder was moved aside, and between the two renames.
TEST_F(OwnModule, AKilledWriteLosesNothing) {
  const fs::path folder = weights();
  fs::create_directories(root_ / ".weights.partial");
  write_file(root_ / ".weights.partial" / "model-00001-of-00002.safetensors", "half");
  fs::rename(folder, root_ / ".weights.replaced");
  Net net(1);
  read_weights(folder, net);
  EXPECT_TRUE(at::equal(net->table, Net(3)->table));
  write_weights(folder, Net(5));
  read_weights(folder, net);
  EXPECT_TRUE(at::equal(net->table, Net(5)->table));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1) << "leftovers";
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 2);
}

}  // namespace
}  // namespace isograd
