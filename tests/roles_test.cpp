// Every kind of placement at 2 to 8 ranks: cut along tp, copied and summed along it, copied and the same on
// it, held by one stage, held by two, and experts. The gradient is that of one process (E1), and the norm
// that of two twins. Mistakes B5, B13, B18a, B18b and B21, put in from outside, are each seen and told apart.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hybrid_norm.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "roles_toy.hpp"

namespace isograd::roles {
namespace {

using ::testing::IsEmpty;
using Gradients = std::vector<at::Tensor>;

constexpr double kExact = 1e-10;  // E1

double squares(const at::Tensor& tensor) { return tensor.square().sum().item<double>(); }

using hybrid::summed;

// One place of the loop each, where a mistake can be made.
struct Loop {
  std::function<Group(const Layout&)> counting = [](const Layout& layout) {
    return layout.mesh().counting();
  };
  std::function<void(Layout::Named&)> place = [](Layout::Named&) {};
  std::function<void(const Layout&, Gradients&)> before_sum = [](const Layout&, Gradients&) {};
  std::function<double(const Layout&, const Gradients&)> norm = [](const Layout& layout,
                                                                   const Gradients& gradients) {
    std::vector<double> none{0};
    return global_norm(layout, gradients, none).norm;
  };
};

struct Outcome {
  std::map<std::string, double> before, after;  // errors of the whole gradients, before and after their sum
  Tensors gradients;
  double loss = 0, targets = 0, norm = 0, assembled_norm = 0, staged_norm = 0;
  std::string copies = "the same";
};

std::vector<std::string> wrong(const std::map<std::string, double>& errors) {
  std::vector<std::string> names;
  for (const auto& [name, error] : errors)
    if (!(error < kExact)) names.push_back(name);
  return names;
}

// As every rank sees it.
std::vector<Outcome> run(const Sizes& sizes, const Loop& loop = {}) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(sizes.ranks()));
  const Tensors wanted = reference(sizes.dp_replicate * sizes.dp_shard).gradients;
  run_ranks(sizes.ranks(), [&](World& world) {
    Layout::Named named = placements(grid_of(sizes));
    loop.place(named);
    const Layout layout(Mesh(world, grid_of(sizes)), named);
    const Mesh& mesh = layout.mesh();
    Outcome& mine = outcomes[static_cast<std::size_t>(world.rank)];

    Tensors parameters;
    for (auto& [name, value] : whole_model()) {
      parameters[name] = layout.local(name, value);
      EXPECT_TRUE(at::equal(layout.whole(name, parameters[name]), value)) << name;
      parameters[name].requires_grad_();
    }
    const Tokens tokens = tokens_of(mesh.place(mesh.data()), mesh.size(mesh.data()));
    at::Tensor counted = tokens.valid.sum().view({1});
    loop.counting(layout).all_reduce(counted);
    mine.targets = counted.item<double>();
    const double loss = backward(layout, parameters, tokens, mine.targets);
    // One of the ranks along tp, which hold the same loss, contributes.
    mine.loss = summed(mesh.place({"tp"}) == 0 ? loss : 0, mesh, mesh.grid().names());

    Gradients gradients;
    for (const PlacedParameter& parameter : layout.parameters()) {
      const at::Tensor& tensor = parameters[parameter.name];
      gradients.push_back(tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor.detach()));
    }
    const auto assembled = [&] {
      Tensors result;
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const std::string& name = layout.parameters()[i].name;
        result[name] = layout.whole(name, gradients[i]);
      }
      return result;
    };
    mine.before = errors(assembled(), wanted);
    loop.before_sum(layout, gradients);
    layout.sum_gradients(gradients);
    try {
      layout.check_copies(gradients, "gradient");
    } catch (const PeerError& error) {
      mine.copies = error.what();
    }
    mine.gradients = assembled();
    mine.after = errors(mine.gradients, wanted);
    mine.norm = loop.norm(layout, gradients);
    std::map<std::string, at::Tensor> by_name;
    for (std::size_t i = 0; i < gradients.size(); ++i) by_name[layout.parameters()[i].name] = gradients[i];
    mine.staged_norm = hybrid::staged_norm(mesh, &layout, by_name);
    for (const auto& [name, gradient] : mine.gradients) mine.assembled_norm += squares(gradient);
    mine.assembled_norm = std::sqrt(mine.assembled_norm);
  });
  return outcomes;
}

class Roles : public ::testing::TestWithParam<Sizes> {};

TEST_P(Roles, GiveTheGradientAndTheNormOfOneProcess) {
  const Sizes sizes = GetParam();
  const Grid grid = grid_of(sizes);
  const Reference wanted = reference(sizes.dp_replicate * sizes.dp_shard);
  double numel = 0;
  for (const auto& [name, gradient] : wanted.gradients) numel += static_cast<double>(gradient.numel());
  const double rounding = numel * 0x1p-53;  // of a sum of squares taken in another order, relative
  const auto outcomes = run(sizes);
  for (const Outcome& outcome : outcomes) {
    EXPECT_THAT(wrong(outcome.after), IsEmpty());
    EXPECT_EQ(outcome.copies, "the same");
    EXPECT_EQ(outcome.targets, wanted.targets);
    EXPECT_NEAR(outcome.loss, wanted.loss, 1e-12 * wanted.loss);
    EXPECT_NEAR(outcome.norm, outcome.assembled_norm, rounding * outcome.norm);
    EXPECT_NEAR(outcome.norm, outcome.staged_norm, rounding * outcome.norm);
    EXPECT_EQ(outcome.norm, outcomes[0].norm);
  }
  // Before the sum a rank holds a part alone: otherwise this would be no test of it.
  for (const auto& [name, placement] : placements(grid))
    for (int rank = 0; rank < grid.ranks(); ++rank) {
      if (!holds(placement, grid, rank)) continue;
      if (holders_along(placement, grid, placement.summed, rank).size() == 1) continue;
      EXPECT_GT(outcomes[static_cast<std::size_t>(rank)].before.at(name), 1e-3)
          << name << " on rank " << rank;
    }
}

INSTANTIATE_TEST_SUITE_P(Grids, Roles,
                         ::testing::Values(Sizes{.tp = 2}, Sizes{.dp_shard = 3, .ep = 3}, Sizes{.pp = 3},
                                           Sizes{.dp_shard = 4, .ep = 2}, Sizes{.pp = 2, .tp = 2},
                                           Sizes{.tp = 5}, Sizes{.dp_shard = 5, .ep = 5}, Sizes{.tp = 6},
                                           Sizes{.pp = 3, .dp_replicate = 2},
                                           Sizes{.pp = 2, .dp_shard = 2, .ep = 2, .tp = 2},
                                           Sizes{.dp_replicate = 2, .dp_shard = 2, .ep = 2, .tp = 2},
                                           Sizes{.pp = 4, .tp = 2}),
                         [](const auto& one) {
                           const Sizes& s = one.param;
                           return fmt::format("ranks{}_pp{}_replicas{}_shards{}_ep{}_tp{}", s.ranks(), s.pp,
                                              s.dp_replicate, s.dp_shard, s.ep, s.tp);
                         });

constexpr Sizes kAll{.pp = 2, .dp_shard = 2, .ep = 2, .tp = 2};

double ratio(const Outcome& outcome, const std::string& name) {
  const at::Tensor wanted = reference(kAll.dp_shard).gradients.at(name);
  return (outcome.gradients.at(name) * wanted).sum().item<double>() / squares(wanted);
}

TEST(RolesPlanted, AreSeenAndToldApart) {
  struct Planted {
    const char* what;
    Loop loop;
    std::vector<std::string> wrong{};             // parameters
    double ratio = 1;                             // of their gradients to the right ones; 0: none
    double least = 1, most = 1;                   // of the norm to that of the gradient
    std::vector<const char*> copies{"the same"};  // what check_copies() says
  };
  const double off = 1e-10;
  const std::vector<Planted> all = {
      {"B5, targets counted on peers that hold the same",
       {.counting = [](const Layout& layout) { return layout.mesh().all(); }},
       {"bias", "down", "experts", "head_norm", "middle", "tied", "up"},
       0.25},
      {"B13, experts multiplied by ep",
       {.before_sum = [](const Layout& layout,
                         Gradients& gradients) { gradients.back().mul_(layout.mesh().size({"ep"})); }},
       {"experts"},
       2},
      {"B21, parts along tp left unsummed",
       {.place =
            [](Layout::Named& named) {
              for (auto& [name, placement] : named)
                if (name == "head_norm") placement.summed.erase("tp");
            }},
       {"head_norm"},
       0,
       0,
       9,
       {"the gradient of parameter 'head_norm'", "tp"}},
      {"B18a, every copy counts",
       {.norm =
            [](const Layout& layout, const Gradients& gradients) {
              double sum = 0;
              for (const at::Tensor& gradient : gradients) sum += squares(gradient);
              return std::sqrt(summed(sum, layout.mesh(), layout.mesh().grid().names()));
            }},
       {},
       1,
       1.2,  // √2 and more of what is copied
       9},
      {"B18b, the norm of the own part",
       {.norm =
            [](const Layout& layout, const Gradients& gradients) {
              return std::sqrt(summed(owned_squares(layout, gradients), layout.mesh(), layout.mesh().data()));
            }},
       {},
       1,
       0,
       0.99}};
  for (const Planted& planted : all)
    for (const Outcome& outcome : run(kAll, planted.loop)) {
      SCOPED_TRACE(planted.what);
      EXPECT_THAT(wrong(outcome.after), ::testing::ElementsAreArray(planted.wrong));
      for (const std::string& name : planted.wrong)
        if (planted.ratio > 0) EXPECT_NEAR(ratio(outcome, name), planted.ratio, off) << name;
      EXPECT_GE(outcome.norm, (planted.least - off) * outcome.assembled_norm);
      EXPECT_LE(outcome.norm, (planted.most + off) * outcome.assembled_norm);
      for (const char* part : planted.copies) EXPECT_THAT(outcome.copies, ::testing::HasSubstr(part));
    }
}

std::string refusal_of(World& world, const Layout::Named& named, const Sizes& sizes) {
  try {
    Layout(Mesh(world, grid_of(sizes)), named);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(RolesRefused, PlacementsThatDifferBetweenRanks) {
  const Sizes sizes{.dp_shard = 3};
  run_ranks(3, [&](World& world) {
    using Change = std::function<void(Layout::Named&)>;
    const auto refused = [&](const Change& on_rank_two) {
      Layout::Named named = placements(grid_of(sizes));
      if (world.rank == 2) on_rank_two(named);
      return refusal_of(world, named, sizes);
    };
    using ::testing::AllOf;
    using ::testing::HasSubstr;
    EXPECT_THAT(refused([](Layout::Named& named) { named[2].second.summed.erase("tp"); }),
                AllOf(HasSubstr("parameter 'head_norm'"), HasSubstr("tp on rank 0"), HasSubstr("on rank 2")));
    EXPECT_THAT(refused([](Layout::Named& named) { named[1].second.cuts[0].dim = 1; }),
                AllOf(HasSubstr("parameter 'up'"), HasSubstr("dimension 0 along axis 'tp'")));
    EXPECT_THAT(refused([](Layout::Named& named) { named[5].second.stages.clear(); }),
                AllOf(HasSubstr("parameter 'middle'"), HasSubstr("every stage on rank 2")));
    EXPECT_THAT(refused([](Layout::Named& named) { named.pop_back(); }),
                AllOf(HasSubstr("parameter 'experts'"), HasSubstr("no such parameter on rank 2")));
    EXPECT_THAT(refused([](Layout::Named& named) { named[0].first = "other"; }),
                HasSubstr("'other' on rank 2"));
    EXPECT_EQ(refused([](Layout::Named&) {}), "no error");
  });
}

TEST(RolesRefused, NamesTwiceAndTensorsThatDoNotFit) {
  run_ranks(2, [](World& world) {
    const Sizes sizes{.tp = 2};
    Layout::Named named = placements(grid_of(sizes));
    const Layout layout(Mesh(world, grid_of(sizes)), named);
    named.push_back(named.front());
    EXPECT_THAT(refusal_of(world, named, sizes), ::testing::HasSubstr("'tied'"));
    EXPECT_THROW(layout.parameter("none"), ConfigError);
    EXPECT_THROW(layout.local("up", at::zeros({2})), ConfigError);
    EXPECT_THROW(layout.whole("up", at::zeros({kFeatures, kHidden})), ConfigError);
  });
}

// Placements that have no group, or do not fit what a rank holds, where a layout is made of them.
TEST(RolesRefused, PlacementsOfOtherParametersOrParts) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, grid_of({.tp = 2}));
    const Layout layout(mesh, placements(mesh.grid()));
    std::vector<std::pair<std::string, at::Tensor>> own;
    for (auto& [name, value] : whole_model())
      own.emplace_back(name, layout.local(name, value).requires_grad_());
    const auto refused = [&](const Layout::Named& named) {
      TrainableParameters parameters = trainable_parameters(own);
      parameters.placements = named;
      return isograd::testing::error_of([&] { bucketed(parameters, mesh); });
    };
    EXPECT_THAT(refused({{"none", placed(mesh.grid(), {3})}}), ::testing::HasSubstr("parameter 'none'"));
    EXPECT_THAT(refused({{"up", placed(mesh.grid(), {kFeatures, kHidden})}}),
                ::testing::AllOf(::testing::HasSubstr("parameter 'up'"),
                                 ::testing::HasSubstr("its part there, [15, 6]")));
  });
}

}  // namespace
}  // namespace isograd::roles
