#include "museum/room.hpp"

#include "isograd/plan.hpp"
#include "isograd/random.hpp"
#include "verify/diagnosis.hpp"

namespace isograd::museum {

RoomModel::RoomModel(at::ScalarType type) : toy(type) {
  router = (at::arange(1, toy::kHidden + 1, at::kDouble) / 4).to(type).requires_grad_(true);
}

at::Tensor RoomModel::logits(const Batch& batch) const {
  Batch seen = batch;
  if (leaks && batch.num_fragments() > 1) {
    seen.cu_seqlens = {0, batch.num_tokens()};
    seen.sample_ids = {batch.sample_ids[0]};
  }
  at::Tensor logits = toy.logits(seen);
  if (!noise || quiet) return logits;
  at::Tensor kept = at::ones({batch.num_tokens(), 1}, at::kDouble);
  for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
    for (auto t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t)
      kept[t] = noise(batch.sample_ids[f], t - batch.cu_seqlens[f]) < 0.25 ? 0 : 4.0 / 3;
  return logits * kept.to(logits.scalar_type());
}

at::Tensor RoomModel::balance(const Batch& batch) const {
  const at::Tensor features = at::embedding(toy.embedding.detach(), batch.tokens);  // [T, H]
  return (at::matmul(features, router).square() * batch.targets.ne(kIgnoreIndex)).sum();
}

VerifyModel as_verify_model(std::shared_ptr<RoomModel> model, double router_factor) {
  VerifyModel made;
  const toy::Model& toy = model->toy;
  made.named = {{"embedding", toy.embedding}, {"twice", toy.twice}, {"bias", toy.bias},
                {"frozen", toy.frozen},       {"gain", toy.gain},   {"sometimes", toy.sometimes},
                {"unused", toy.unused}};
  if (model->with_router) made.named.emplace_back("router", model->router);
  made.logits = [model](const Batch& batch) { return model->logits(batch); };
  made.loss_terms = [model, router_factor](const Batch& batch) {
    LossTerms terms = {{"cross_entropy",
                        cross_entropy_sum(model->logits(batch), batch.targets, {.weights = batch.weights})}};
    if (model->with_router)
      terms.push_back({.name = "router",
                       .sum = model->balance(batch) * router_factor,
                       .mean = Mean::kTargets,
                       .weight = 0.5});
    return terms;
  };
  if (model->with_router)
    made.more_terms = {
        {"router", [model](const Batch& batch) { return model->balance(batch); }, Mean::kTargets, 0.5}};
  if (model->noise) made.without_noise = [model] { model->quiet = true; };
  return made;
}

void with_model(VerifyProblem& problem, const std::function<void(RoomModel&)>& change) {
  problem.make_model = [change](at::ScalarType type) {
    auto model = std::make_shared<RoomModel>(type);
    change(*model);
    return as_verify_model(std::move(model));
  };
}

std::unique_ptr<DataParallel> plain_layout(std::vector<NamedParameter> parameters, const Mesh& mesh) {
  return bucketed(std::move(parameters), mesh,
                  {.bucket_bytes = kBucketBytes, .first_bucket_bytes = 0, .overlap = false});
}

void SumsAgain::zero_gradients() {
  inner->zero_gradients();
  first = true;
}

void SumsAgain::begin_backward(bool last) {
  for (Bucket& bucket : buckets()) {
    AxisSet summed;
    for (const std::string& axis : bucket.plan.sync.summed)
      if (axes.count(axis)) summed.insert(axis);
    Group group = mesh().along(summed);
    if (!first && group.size() > 1) group.all_reduce(bucket.gradients);
  }
  first = false;
  inner->begin_backward(last);
}

double plain_traffic(std::int64_t numel, int ranks, at::ScalarType dtype) {
  const int bytes = dtype == at::kDouble ? 8 : 4;
  const DataParallelPlan plan{
      .numel = numel, .bytes = {.parameter = bytes, .gradient = bytes}, .shards = ranks};
  return traffic_bytes(plan).total();
}

VerifyProblem right_problem(World& world) {
  // Micro-batches of many sizes; rank 0 has an empty one and one without a target.
  const auto by_rank = toy::make_step(world.size, 3);
  VerifyProblem problem;
  with_model(problem, [](RoomModel&) {});
  problem.local = by_rank[static_cast<std::size_t>(world.rank)];
  problem.whole = [by_rank] { return MicroBatches{toy::concatenate(by_rank)}; };
  problem.dtype = at::kFloat;
  problem.step = {.max_norm = 0.005};  // far below the norm: every exhibit is clipped
  problem.updates = 2;
  problem.optimizer = AdamWOptions{.learning_rate = 1e-2};
  problem.subgroup = [&world](const std::vector<int>& ranks) {
    return ranks.size() == 1 ? Group::solo() : world.subgroup(ranks, "fewer");
  };
  problem.layouts = {
      {.name = "data parallel",
       .make = [](auto parameters, Group group) { return plain_layout(std::move(parameters), group); },
       .axes = {{"dp_shard", world.size}},
       .traffic = [ranks = world.size](std::int64_t numel, std::int64_t,
                                       at::ScalarType dtype) { return plain_traffic(numel, ranks, dtype); }}};
  return problem;
}

Verdict show(const Exhibit* exhibit, int ranks) {
  Verdict verdict;
  run_ranks(ranks, [&](World& world) {
    VerifyProblem problem = right_problem(world);
    if (exhibit) exhibit->plant(problem, world);
    Verdict own = verify(problem, world.group);
    if (world.rank == 0) verdict = std::move(own);
  });
  return verdict;
}

std::string first_finding(const Verdict& verdict) {
  if (!verdict.findings.empty()) return verdict.findings[0].id;
  return verdict.passed ? "pass" : "fail";
}

const std::vector<Exhibit>& exhibits() {
  static const std::vector<Exhibit> all = [] {
    std::vector<Exhibit> list;
    add_normalisation(list);
    add_reduction(list);
    add_norms(list);
    add_data(list);
    add_global(list);
    add_context(list);
    add_tensor(list);
    add_experts(list);
    add_waiting(list);
    // "B18a" -> 18, 'a'
    const auto place = [](const std::string& id) {
      std::size_t end = 0;
      const int number = std::stoi(id.substr(1), &end);
      return std::make_pair(number, id.substr(1 + end));
    };
    std::stable_sort(list.begin(), list.end(),
                     [&](const Exhibit& a, const Exhibit& b) { return place(a.id) < place(b.id); });
    return list;
  }();
  return all;
}

const Exhibit* find(const std::string& id) {
  for (const Exhibit& exhibit : exhibits())
    if (exhibit.id == id) return &exhibit;
  return nullptr;
}

const std::vector<ExhibitClass>& shared_classes() {
  static const std::vector<ExhibitClass> classes = {
      {"count_not_reduced",
       {"B3", "B4"},
       "a count of fewer ranks than hold data: the same numbers where ranks hold equally much"},
      {"summed_over_micro_batches",
       {"B2", "B32"},
       "micro-batches that are added up and not divided by their number: sums of the step's mean, or means"},
      {"multiplied_by_axis",
       {"B14", "B15"},
       "a sum over an axis where the loss expects an average: the axis is another one"},
      {"averaged_over_axis",
       {"B19", "B24"},
       "an average over an axis where parts are summed: the axis is another one"},
      {"not_summed_over_axis",
       {"B16", "B21", "B21k"},
       "parts that stay on their ranks: of whole gradients, of norms, of copied key heads"},
      {"counted_on_peers",
       {"B5", "B5t"},
       "peers that count what another has counted: the axis is another one"},
      {"norm_counts_replicas",
       {"B18a", "B18at"},
       "copies counted: of all elements, or of those that tp copies"},
      {"norm_of_own_shard",
       {"B18b", "B18bt"},
       "a part's norm: of a shard, or of the rows that tp gives a rank"},
      {"reduced_while_accumulating",
       {"B23", "B23t"},
       "sums of sums: over ranks that share samples, or of parts along tp"},
      {"term_scaled",
       {"B22", "B22e", "B22t"},
       "a term multiplied by ranks: with other data, or with the same"},
      {"cut_parameters_scaled",
       {"B13", "B13d", "B13g", "B13w"},
       "one factor too many, or its inverse: of ep, of all ranks, of accumulation"},
      {"documents_leak",
       {"B20a", "B20b"},
       "the same mistake within a pack and across the boundary of two shards"},
  };
  return classes;
}

}  // namespace isograd::museum
