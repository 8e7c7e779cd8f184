// Mistakes on the tensor axis: B5, B6, B18, B21, B22, B23 and B26. A small decoder whose matrices are cut
// over ranks.
#include "isograd/model.hpp"
#include "isograd/tensor_parallel.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

// The parts that an exhibit replaces.
struct Wrong {
  std::function<bool(const std::string& name)> unsummed{};  // parameters whose sum along tp is left out
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>)> layout{};
  double term_factor = 1;  // of the auxiliary term, on every rank
  bool with_term = false, sequence_parallel = true;
  Noise noise{};
};

// Twelve heads that read one key head: every rank has it whole, for its own heads.
DecoderConfig shape() {
  DecoderConfig config = small_shape();
  config.hidden = 24, config.heads = 12, config.key_value_heads = 1, config.head_dim = 2;
  return config;
}

MicroBatches packs() {
  MicroBatches all;
  for (std::int64_t pack = 0; pack < 7; ++pack)  // no number of ranks in a test
    all.push_back(toy::make_batch({3 + pack, 9 - pack, 5}, 3 * pack));
  return all;
}

// A term that the last norm's weight alone has a gradient of, the same on all ranks.
at::Tensor size_of_norm(DecoderLM& model, const DecoderOutputs&, const Batch& batch) {
  for (const auto& [name, tensor] : model.named())
    if (name == "model.norm.weight") return tensor.square().sum() * batch.num_targets();
  return {};
}

VerifyProblem tensor_problem(World& world, const Wrong& wrong) {
  HeldTogether how{.name = "tensor parallel",
                   .grid = Grid({{"tp", world.size}}),
                   .shape = shape(),
                   .noise = wrong.noise,
                   .wrap = wrong.layout};
  how.complete = [wrong](VerifyModel& made, const std::shared_ptr<DecoderLM>& model) {
    made.cut = [model, wrong](const Mesh& mesh) {
      return cut_decoder(*model, mesh, {.sequence_parallel = wrong.sequence_parallel});
    };
  };
  if (wrong.with_term) how.term = HeldTogether::Term{"norm", size_of_norm, wrong.term_factor};
  how.change_placements = [wrong](Layout::Named& placements) {
    for (auto& [name, placement] : placements)
      if (wrong.unsummed && wrong.unsummed(name)) placement.summed.erase("tp");
  };
  VerifyProblem problem = problem_of(world, std::move(how));
  problem.local = packs();
  problem.whole = packs;
  return problem;
}

Plant plants(Wrong wrong) {
  return [wrong = std::move(wrong)](VerifyProblem& problem, World& world) {
    problem = tensor_problem(world, wrong);
  };
}

template <class Layout>
std::unique_ptr<DataParallel> around(std::unique_ptr<DataParallel> right) {
  return std::make_unique<Layout>(std::move(right));
}

}  // namespace

void cut_over_tensor(VerifyProblem& problem, World& world) {
  plants({.with_term = true, .sequence_parallel = false, .noise = keyed_by(0)})(problem, world);
}

void add_tensor(std::vector<Exhibit>& list) {
  list.push_back({.id = "B5t", .plant = then(plants({}), [](VerifyProblem& problem, World& world) {
                                 problem.make_normalizer = [ranks = world.size] {
                                   return std::make_unique<planted::CountsPeers>(ranks);
                                 };
                               })});
  list.push_back({.id = "B6t", .plant = then(plants({}), [](VerifyProblem& problem, World& world) {
                                 multiply_log(problem, world.size);
                               })});
  list.push_back({.id = "B18ct", .plant = then(plants({}), clips_by(mean_of_own_norms))});
  list.push_back({.id = "B18at", .plant = plants({.layout = around<OwnedOnEveryRank>})});
  list.push_back({.id = "B18bt", .plant = then(plants({}), clips_by(own_norm))});
  list.push_back({.id = "B18ft", .plant = then(plants({}), clips_by(largest_of_own_norms))});
  list.push_back({.id = "B21", .plant = plants({.unsummed = [](const std::string& name) {
                                 return name.find("layernorm") != std::string::npos ||
                                        name == "model.norm.weight";
                               }})});
  list.push_back({.id = "B21k", .plant = plants({.unsummed = [](const std::string& name) {
                                  return name.find("k_proj") != std::string::npos ||
                                         name.find("v_proj") != std::string::npos;
                                }})});
  list.push_back({.id = "B22t", .plant = [](VerifyProblem& problem, World& world) {
                    problem = tensor_problem(world, {.term_factor = static_cast<double>(world.size),
                                                     .with_term = true,
                                                     .sequence_parallel = false});
                  }});
  list.push_back({.id = "B23t", .plant = plants({.layout = [](auto right) -> std::unique_ptr<DataParallel> {
                                  return std::make_unique<SumsAgain>(std::move(right), AxisSet{"tp"});
                                }})});
  list.push_back({.id = "B26bt", .plant = [](VerifyProblem& problem, World& world) {
                    problem = tensor_problem(world,
                                             {.sequence_parallel = false,
                                              .noise = keyed_by(static_cast<std::uint64_t>(world.rank) + 1)});
                  }});
}

}  // namespace isograd::museum
