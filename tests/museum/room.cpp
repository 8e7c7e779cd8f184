#include "museum/room.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "isograd/parameters.hpp"
#include "isograd/random.hpp"
#include "verify/diagnosis.hpp"

namespace isograd::museum {

at::Tensor kept_tokens(const Batch& batch, const Noise& noise) {
  at::Tensor kept = at::ones({batch.num_tokens(), 1}, at::kDouble);
  for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
    for (auto t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t)
      kept[t] = noise(batch.sample_ids[f], batch.positions[t].item<std::int64_t>()) < 0.25 ? 0 : 4.0 / 3;
  return kept;
}

Noise keyed_by(std::uint64_t rank) {
  return [rank](std::int64_t sample, std::int64_t position) {
    return random_uniform({.seed = 9,
                           .step = rank,
                           .sample = static_cast<std::uint64_t>(sample),
                           .layer = hash_name("dropout")},
                          static_cast<std::uint64_t>(position));
  };
}

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
  return logits * kept_tokens(batch, noise).to(logits.scalar_type());
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

void multiply_log(VerifyProblem& problem, int factor) {
  problem.make_model = [make = problem.make_model, factor](at::ScalarType type) {
    VerifyModel model = make(type);
    model.loss_terms = [inner = model.loss_terms, factor](const Batch& batch) {
      LossTerms terms = inner(batch);
      for (auto& term : terms) term.sum = term.sum + term.sum.detach() * (factor - 1);
      return terms;
    };
    return model;
  };
}

void with_model(VerifyProblem& problem, const std::function<void(RoomModel&)>& change) {
  problem.make_model = [change](at::ScalarType type) {
    auto model = std::make_shared<RoomModel>(type);
    change(*model);
    return as_verify_model(std::move(model));
  };
}

std::unique_ptr<DataParallel> plain_layout(TrainableParameters parameters, const Mesh& mesh) {
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
  const DataParallelPlan plan{.elements = {{.numel = numel, .shards = ranks}},
                              .bytes = {.parameter = bytes, .gradient = bytes}};
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
       .traffic =
           [ranks = world.size](DataParallel& layout, std::int64_t, at::ScalarType dtype) {
             std::int64_t padded = 0, numel = 0;
             for (const Bucket& bucket : layout.buckets()) {
               padded += bucket.plan.numel;
               for (const Slot& slot : bucket.plan.slots) numel += slot.numel;
             }
             return std::pair(plain_traffic(padded, ranks, dtype), plain_traffic(numel, ranks, dtype));
           }}};
  return problem;
}

DecoderConfig small_shape() {
  DecoderConfig config;
  config.vocabulary = 31, config.layers = 1, config.feed_forward = 20;
  config.max_positions = 128, config.initializer_range = 0.3;
  return config;
}

namespace {

VerifyModel model_of(const std::shared_ptr<DecoderLM>& model, const HeldTogether& how) {
  VerifyModel made;
  made.named = model->named();
  const auto quiet = std::make_shared<bool>(!how.noise);
  if (how.noise) made.without_noise = [quiet] { *quiet = true; };
  const auto outputs_of = [model, quiet, noise = how.noise](const Batch& batch) {
    DecoderOutputs outputs = model->outputs(batch);
    if (!*quiet && !outputs.passed_on.defined())  // the last stage alone has it
      outputs.hidden = outputs.hidden * kept_tokens(batch, noise).to(outputs.hidden.scalar_type());
    return outputs;
  };
  made.logits = [model, quiet, outputs_of](const Batch& batch) {
    return *quiet ? model->logits(batch) : model->logits_of(outputs_of(batch).hidden);
  };
  made.loss_terms = [model, outputs_of, how](const Batch& batch) -> LossTerms {
    const DecoderOutputs outputs = outputs_of(batch);
    if (outputs.passed_on.defined()) return {{"cross_entropy", outputs.passed_on}};
    const at::Tensor cross_entropy =
        cross_entropy_sum(model->logits_of(outputs.hidden), batch.targets,
                          {.weights = batch.weights, .shard = model->vocabulary()});
    // Every rank makes the backward of every round, with targets or without.
    LossTerms terms{{"cross_entropy", (how.change_loss ? how.change_loss(cross_entropy) : cross_entropy) +
                                          outputs.hidden.narrow(0, 0, 0).sum()}};
    if (how.term)
      terms.push_back({.name = how.term->name,
                       .sum = how.term->sum(*model, outputs, batch) * how.term->factor,
                       .mean = Mean::kTargets,
                       .weight = 0.5});
    return terms;
  };
  if (how.term)
    made.more_terms = {{how.term->name,
                        [model, sum = how.term->sum](const Batch& batch) {
                          return sum(*model, model->outputs(batch), batch);
                        },
                        Mean::kTargets, 0.5}};
  how.complete(made, model);
  return made;
}

// On fewer ranks, in an experiment, each of them has the whole model.
std::unique_ptr<DataParallel> layout_of(const VerifyModel& model, const Group& group,
                                        const HeldTogether& how) {
  std::vector<std::pair<std::string, at::Tensor>> held;
  for (const auto& one : model.named)
    if (!model.placed || model.placed->parameter(one.first).held) held.push_back(one);
  TrainableParameters parameters = trainable_parameters(held);
  if (model.placed) parameters.placements = model.placed->placements();
  if (how.change_placements) how.change_placements(parameters.placements);
  auto right = plain_layout(std::move(parameters), model.placed ? model.placed->mesh() : Mesh(group));
  return how.wrap ? how.wrap(std::move(right)) : std::move(right);
}

}  // namespace

VerifyProblem problem_of(World& world, HeldTogether how) {
  VerifyProblem problem = right_problem(world);
  problem.mesh = Mesh(world, how.grid);
  problem.make_model = [how](at::ScalarType type) {
    return model_of(std::make_shared<DecoderLM>(how.shape, type, 3), how);
  };
  problem.layouts[0] = {.name = how.name,
                        .make = nullptr,
                        .make_from_model = [how](const VerifyModel& model,
                                                 const Group& group) { return layout_of(model, group, how); },
                        .axes = how.grid.axes()};
  return problem;
}

double CountedStep::own_micro_batches() const {
  return std::max(1.0, static_cast<double>(
                           step_counts.micro_batches_by_rank.at(static_cast<std::size_t>(step_counts.rank))));
}

void count_into(std::shared_ptr<CountedStep> counted, VerifyProblem& problem) {
  struct Counting : Normalizer {
    std::shared_ptr<CountedStep> counted;
    Counting(Mean mean, std::shared_ptr<CountedStep> counted_)
        : Normalizer(mean), counted(std::move(counted_)) {}
    Denominator denominator(const StepCounts& step_counts) const override {
      const Denominator right = Normalizer::denominator(step_counts);
      *counted = {step_counts, right.value};
      return right;
    }
  };
  problem.make_normalizer = [&problem, counted] {
    return std::make_unique<Counting>(problem.loss.mean, counted);
  };
}

Plant then(Plant first, Plant second) {
  return [first, second](VerifyProblem& problem, World& world) {
    first(problem, world);
    second(problem, world);
  };
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

namespace {

const nlohmann::json& catalogue() {
  static const auto read = nlohmann::json::parse(read_file(ISOGRAD_MUSEUM_CATALOGUE));
  return read;
}

}  // namespace

const std::vector<Exhibit>& exhibits() {
  static const std::vector<Exhibit> all = [] {
    std::vector<Exhibit> planted, list;
    for (const auto add : {add_normalisation, add_reduction, add_norms, add_data, add_global, add_context,
                           add_tensor, add_experts, add_pipeline})
      add(planted);
    for (const auto& entry : catalogue().at("exhibits")) {
      const auto own = std::ranges::find(planted, entry.at("id").get<std::string>(), &Exhibit::id);
      ISOGRAD_INVARIANT(own != planted.end(), "an exhibit that nobody makes");
      list.push_back(*own);
      entry.at("title").get_to(list.back().title);
      entry.at("mistake").get_to(list.back().mistake);
      entry.at("who").get_to(list.back().who);
      entry.at("number").get_to(list.back().number);
      entry.at("diagnosis").get_to(list.back().diagnosis);
      list.back().words = entry.value("words", "");
    }
    ISOGRAD_INVARIANT(list.size() == planted.size(), "an exhibit that no catalogue describes");
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
  static const std::vector<ExhibitClass> classes = [] {
    std::vector<ExhibitClass> list;
    for (const auto& entry : catalogue().at("one diagnosis for several"))
      list.push_back({entry.at("diagnosis"), entry.at("exhibits"), entry.at("why")});
    return list;
  }();
  return classes;
}

}  // namespace isograd::museum
