// Mistakes in what is divided by, in sums over ranks and micro-batches, and in the norm.
#include <cmath>

#include "hybrid_mutants.hpp"
#include "isograd/optimizer.hpp"
#include "museum/room.hpp"

namespace isograd::hybrid {
namespace {

using planted::Wrapped;

bool token_mean(const Cell& cell) {
  return cell.is(kMean, "token_mean");
}
bool sample_mean(const Cell& cell) {
  return cell.is(kMean, "sample_mean");
}
bool several_data_ranks(const Cell& cell) {
  return cell.number(kReplicate) * cell.number(kShard) > 1;
}

template <class Wrong, class... Arguments>
Change mean_is(Arguments... arguments) {
  return [=](VerifyProblem& problem, World&) {
    problem.make_normalizer = [=] { return std::make_unique<Wrong>(arguments...); };
  };
}
// Counts as many times as there are ranks along an axis.
Change counted_along(const std::string& axis) {
  return [axis](VerifyProblem& problem, World& world) {
    const int peers = problem.mesh ? size_of(*problem.mesh, axis) : world.size;
    problem.make_normalizer = [peers] { return std::make_unique<planted::CountsPeers>(peers); };
  };
}

struct SamplesOfThisRank : SampleMean {
  Denominator denominator(const Census& census) const override {
    Denominator wrong = SampleMean::denominator(census);
    wrong.value = std::max(1.0, double(census.samples_by_rank.at(static_cast<std::size_t>(census.rank))));
    return wrong;
  }
};
struct DividedByRounds : TokenMean {  // B31
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value *= static_cast<double>(census.global_micro_batches);
    return wrong;
  }
};
struct CountsTokens : TokenMean {  // those without a target too
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value = static_cast<double>(census.tokens);
    return wrong;
  }
};

void add_means(std::vector<Mutant>& all) {
  const auto add = [&](const char* what, std::function<bool(const Cell&)> exists, Change change) {
    all.push_back({"mean", what, std::move(exists), {.meshes = {}, .change = std::move(change)}});
  };
  add(
      "each micro-batch's own mean, averaged",
      [](const Cell& c) { return token_mean(c) && !c.is(kPacks, "9"); },
      mean_is<planted::MeanOfMicroBatchMeans>());
  add(
      "each rank's own mean, averaged", [](const Cell& c) { return token_mean(c) && several_data_ranks(c); },
      mean_is<planted::MeanOfRankMeans>());
  add(
      "a count that stays on its rank", [](const Cell& c) { return token_mean(c) && several_data_ranks(c); },
      mean_is<planted::CountNotReduced>());
  add(
      "targets counted on ranks along tp", [](const Cell& c) { return token_mean(c) && above(c, kTp); },
      counted_along("tp"));
  add(
      "targets counted in every stage", [](const Cell& c) { return token_mean(c) && above(c, kPp); },
      counted_along("pp"));
  add(
      "targets counted on ranks along ep again", [](const Cell& c) { return token_mean(c) && above(c, kEp); },
      counted_along("ep"));
  add("nothing divides", token_mean, mean_is<planted::NothingDivides>());
  add(
      "divided by the micro-batches too", [](const Cell& c) { return token_mean(c) && !c.is(kPacks, "9"); },
      mean_is<DividedByRounds>());
  add(
      "tokens counted in the place of targets",
      [](const Cell& c) { return token_mean(c) && !c.is(kModel, "video"); }, mean_is<CountsTokens>());
  add(
      "samples of this rank alone", [](const Cell& c) { return sample_mean(c) && several_data_ranks(c); },
      mean_is<SamplesOfThisRank>());
}

Change multiplied(const std::string& part, const std::function<double(const Mesh&)>& factor) {
  return after_sum([part, factor](std::vector<Bucket>& buckets, const Mesh& mesh) {
    for (Bucket& bucket : buckets)
      for (const Slot& slot : bucket.plan.slots)
        if (named(slot.name, part)) held_of(bucket, slot).mul_(factor(mesh));
  });
}

// Of one parameter the part of one rank.
struct ForgetsAPart : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->begin_backward(false);  // naive() takes the last backward's gradients into the buckets
    if (mesh().rank() == 0) buckets().back().gradients.zero_();
    inner->finish_reduction();
  }
};
struct SumsAgain : Wrapped {  // along all that parts lie on
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) {
      Group group = mesh().along(bucket.plan.sync.summed);
      if (group.size() > 1) group.all_reduce(bucket.gradients);
    }
  }
};

void add_sums(std::vector<Mutant>& all) {
  const auto add = [&](const char* what, std::function<bool(const Cell&)> exists, Change change) {
    all.push_back({"sum", what, std::move(exists), {.meshes = {}, .change = std::move(change)}});
  };
  const auto data = [](const Cell& c) { return c.data() > 1; };
  add(
      "averaged over all ranks", [](const Cell& c) { return c.ranks() > 1; },
      around_layout([](auto right) -> std::unique_ptr<DataParallel> {
        return std::make_unique<planted::Averages>(std::move(right));
      }));
  add(
      "multiplied by the replicas", [](const Cell& c) { return above(c, kReplicate); },
      multiplied("", [](const Mesh& mesh) { return size_of(mesh, "dp_replicate"); }));
  add(
      "context ranks averaged", [](const Cell& c) { return c.number(kRing) * c.number(kUlysses) > 1; },
      multiplied("", [](const Mesh& mesh) { return 1.0 / mesh.size(kContextAxes); }));
  add(
      "a stage's gradients divided by the stages", [](const Cell& c) { return above(c, kPp); },
      multiplied("",
                 [](const Mesh& mesh) { return mesh.has_first_stage() ? 1.0 / size_of(mesh, "pp") : 1.0; }));
  add(
      "experts multiplied by ep", [](const Cell& c) { return above(c, kEp); },
      multiplied(".experts.", [](const Mesh& mesh) { return size_of(mesh, "ep"); }));
  add(
      "experts divided by ep", [](const Cell& c) { return above(c, kEp); },
      multiplied(".experts.", [](const Mesh& mesh) { return 1.0 / size_of(mesh, "ep"); }));
  add(
      "experts multiplied by their copies",
      [](const Cell& c) { return above(c, kEp) && c.data() > c.number(kEp); },
      multiplied(".experts.", [](const Mesh& mesh) { return size_of(mesh, "edp"); }));
  add(
      "routers cut off", [](const Cell& c) { return c.has_experts(); },
      multiplied(".mlp.gate.", [](const Mesh&) { return 0.0; }));
  add(
      "a parameter off by a millionth of a thousandth", [](const Cell& c) { return !c.is(kModel, "video"); },
      multiplied("model.norm.weight", [](const Mesh&) { return 1 + 1e-9; }));
  add(
      "the embedding of a tied output off", [](const Cell& c) { return c.is(kModel, "tied"); },
      multiplied("embed_tokens", [](const Mesh&) { return 2.0; }));
  add(
      "summed twice", [=](const Cell& c) { return whole(c) && data(c); },
      around_layout([](auto right) -> std::unique_ptr<DataParallel> {
        return std::make_unique<SumsAgain>(std::move(right));
      }));
  add("one rank's part of a bucket forgotten", plain,
      around_layout([](auto right) -> std::unique_ptr<DataParallel> {
        return std::make_unique<ForgetsAPart>(std::move(right));
      }));
  add(
      "scaled again with every micro-batch", [](const Cell& c) { return plain(c) && !c.is(kPacks, "9"); },
      around_layout([](auto right) -> std::unique_ptr<DataParallel> {
        return std::make_unique<planted::RescalesTheBuffer>(std::move(right), [] { return 2.0; });
      }));
  for (const auto& [what, which, axes] :
       {std::tuple{"summed along tp with every micro-batch", kTp, AxisSet{"tp"}},
        {"summed over the ring with every micro-batch", kRing, AxisSet{"cp_ring"}},
        {"summed over Ulysses with every micro-batch", kUlysses, AxisSet{"cp_ulysses"}}})
    add(
        what, [which](const Cell& c) { return plain(c) && above(c, which) && !c.is(kPacks, "9"); },
        around_layout([axes](auto right) -> std::unique_ptr<DataParallel> {
          return std::make_unique<museum::SumsAgain>(std::move(right), axes);
        }));
}

// Which elements this rank counts, of each bucket.
using Owns = std::function<Range(const Bucket& bucket, const Mesh& mesh)>;
struct Owned : Wrapped {
  Owned(std::unique_ptr<DataParallel> inner_, const Owns& owns) : Wrapped(std::move(inner_)) {
    for (Bucket& bucket : buckets()) bucket.owned = owns(bucket, mesh());
  }
};
Change owned(const Owns& owns) {
  return around_layout([owns](auto right) -> std::unique_ptr<DataParallel> {
    return std::make_unique<Owned>(std::move(right), owns);
  });
}
// Dealt to the ranks that hold copies along some of the axes of copies alone.
Range dealt_along(const Bucket& bucket, const Mesh& mesh,
                  const std::function<bool(const std::string&)>& counts) {
  AxisSet along;
  for (const std::string& axis : bucket.plan.sync.copies)
    if (counts(axis)) along.insert(axis);
  return owned_slice(bucket.plan.numel, mesh.place(along), mesh.size(along));
}
bool of(const Mesh& mesh, const std::string& axis, const AxisSet& axes) {
  for (const std::string& each : mesh.grid().axes_of(axis))
    if (!axes.contains(each)) return false;
  return true;
}

using Norm = std::function<double(const std::vector<Bucket>& buckets, const Mesh& mesh)>;
Change norm_is(const Norm& norm) {
  return [norm](VerifyProblem& problem, World&) {
    const auto mesh = std::make_shared<std::optional<Mesh>>();
    wrap(problem.layouts[0], [mesh](auto right, const VerifyModel&) {
      mesh->emplace(right->mesh());
      return right;
    });
    problem.clipping = OwnClipping{
        .norm = [norm, mesh](std::vector<Bucket>& buckets, Group&) { return norm(buckets, **mesh); }};
  };
}
double summed_squares(double norm, const Mesh& mesh, const AxisSet& along) {
  return std::sqrt(summed(norm * norm, mesh, along));
}

void add_norms(std::vector<Mutant>& all) {
  const auto add = [&](const char* what, std::function<bool(const Cell&)> exists, Change change) {
    all.push_back({"norm", what, std::move(exists), {.meshes = {}, .change = std::move(change)}});
  };
  const auto several = [](const Cell& c) { return c.ranks() > 1; };
  add(
      "every copy counts", [](const Cell& c) { return c.data() > 1 && whole(c); },
      owned([](const Bucket& b, const Mesh&) { return b.held; }));
  add(
      "copies along tp count", [](const Cell& c) { return above(c, kTp) && whole(c); },
      owned([](const Bucket& b, const Mesh& mesh) {
        return dealt_along(b, mesh, [&](const std::string& axis) { return !of(mesh, axis, {"tp"}); });
      }));
  add(
      "replicas count", [](const Cell& c) { return above(c, kReplicate) && whole(c); },
      owned([](const Bucket& b, const Mesh& mesh) {
        return dealt_along(b, mesh, [&](const std::string& axis) { return axis != "dp_replicate"; });
      }));
  add(
      "both ends of a tied embedding count",
      [](const Cell& c) {
        return above(c, kPp) && c.is(kModel, "tied") && whole(c) && !c.is(kSchedule, "zb-v");
      },
      owned([](const Bucket& b, const Mesh& mesh) {
        return dealt_along(b, mesh, [&](const std::string& axis) { return !of(mesh, axis, {kStageAxis}); });
      }));
  add(
      "experts dealt to all data ranks, as dense ones are",
      [](const Cell& c) { return above(c, kEp) && whole(c); }, owned([](const Bucket& b, const Mesh& mesh) {
        if (b.plan.slots.empty() || !named(b.plan.slots[0].name, ".experts.")) return b.owned;
        return owned_slice(b.plan.numel, mesh.place(mesh.data()), mesh.size(mesh.data()));
      }));
  add(
      "experts left out", [](const Cell& c) { return above(c, kEp); },
      owned([](const Bucket& b, const Mesh&) {
        return !b.plan.slots.empty() && named(b.plan.slots[0].name, ".experts.")
                   ? Range{b.owned.begin, b.owned.begin}
                   : b.owned;
      }));
  add("the norm of what this rank owns", several,
      norm_is([](const auto& buckets, const Mesh&) { return museum::norm_of_own(buckets); }));
  add("the mean of the ranks' norms", several, norm_is([](const auto& buckets, const Mesh& mesh) {
        return museum::mean_over(mesh.all(), museum::norm_of_own(buckets));
      }));
  add(
      "the norm of this stage", [](const Cell& c) { return above(c, kPp); },
      norm_is([](const auto& buckets, const Mesh& mesh) {
        return summed_squares(museum::norm_of_own(buckets), mesh, without(mesh.grid().names(), {kStageAxis}));
      }));
  add(
      "the largest norm of any stage", [](const Cell& c) { return above(c, kPp); },
      norm_is([](const auto& buckets, const Mesh& mesh) {
        at::Tensor norm = at::full(
            {1},
            summed_squares(museum::norm_of_own(buckets), mesh, without(mesh.grid().names(), {kStageAxis})),
            at::kDouble);
        mesh.all().all_reduce(norm, ReduceOp::kMax);
        return norm.item<double>();
      }));
  add(
      "the norm over data ranks alone", [](const Cell& c) { return above(c, kTp); },
      norm_is([](const auto& buckets, const Mesh& mesh) {
        return summed_squares(museum::norm_of_own(buckets), mesh, mesh.data());
      }));
  add("norms added up, not squares", several, norm_is([](const auto& buckets, const Mesh& mesh) {
        return summed(museum::norm_of_own(buckets), mesh, mesh.grid().names());
      }));
  add(
      "the largest element", [](const Cell&) { return true; },
      norm_is([](const auto& buckets, const Mesh& mesh) { return infinity_norm(buckets, mesh.all()); }));
}

}  // namespace

void add_mutants_of_sums(std::vector<Mutant>& all) {
  add_means(all);
  add_sums(all);
  add_norms(all);
}

}  // namespace isograd::hybrid
