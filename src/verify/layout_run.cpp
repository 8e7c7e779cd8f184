#include "verify/layout_run.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>

#include "base/files.hpp"
#include "layout/flat.hpp"
#include "optim/norm/norm.hpp"
#include "parallel/data/same_parameters.hpp"
#include "train/build.hpp"
#include "verify/replayed_choices.hpp"

namespace isograd {

at::Tensor digest(const std::vector<at::Tensor>& tensors) {
  at::Tensor digests = at::empty({static_cast<std::int64_t>(tensors.size())}, at::kLong);
  auto* value = digests.data_ptr<std::int64_t>();
  for (const auto& tensor : tensors) {
    const at::Tensor flat = tensor.detach().cpu().contiguous();
    const auto hex = checksum(flat.const_data_ptr(), static_cast<std::size_t>(flat.nbytes()));
    *value++ = std::bit_cast<std::int64_t>(static_cast<std::uint64_t>(std::stoull(hex, nullptr, 16)));
  }
  return digests;
}

std::vector<std::uint64_t> checksums(const at::Tensor& digests) {
  const at::Tensor list = digests.contiguous();
  const auto* bits = list.const_data_ptr<std::int64_t>();
  return {bits, bits + list.numel()};
}

std::vector<std::size_t> differing_over_ranks(const at::Tensor& digests, Group& group) {
  const at::Tensor all = group.all_gather(digests);  // [W, P]
  const at::Tensor same = all.eq(all.select(0, 0)).all(0);
  std::vector<std::size_t> differing;
  for (std::int64_t i = 0; i < digests.numel(); ++i)
    if (!same[i].item<bool>()) differing.push_back(static_cast<std::size_t>(i));
  return differing;
}

std::uint64_t digest(const MicroBatches& batches) {
  std::uint64_t sum = 0;
  const auto add = [&](const std::vector<std::int64_t>& of) {
    sum += XXH3_64bits(of.data(), of.size() * sizeof(std::int64_t));
  };
  const auto flat = [](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.defined() ? tensor.detach().to(at::kCPU, dtype).contiguous() : tensor;
  };
  for (const auto& batch : batches) {
    const at::Tensor tokens = flat(batch.tokens, at::kLong), targets = flat(batch.targets, at::kLong),
                     weights = flat(batch.weights, at::kDouble), positions = flat(batch.positions, at::kLong);
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
      if (batch.sample_ids[f] == kPaddingSample) continue;
      const auto begin = batch.cu_seqlens[f], end = batch.cu_seqlens[f + 1];
      const auto before = batch.cut ? batch.cut->own()[f].begin : 0;  // tokens of the fragment elsewhere
      for (auto t = begin; t < end; ++t) {
        const auto place = before + t - begin;
        add({batch.sample_ids[f], place, tokens.const_data_ptr<std::int64_t>()[t],
             targets.const_data_ptr<std::int64_t>()[t],
             std::bit_cast<std::int64_t>(weights.defined() ? weights.const_data_ptr<double>()[t] : 1.0),
             positions.defined() ? positions.const_data_ptr<std::int64_t>()[t] : place});
      }
      for (std::size_t i = 0; i < batch.inputs.size(); ++i)
        add({batch.sample_ids[f], static_cast<std::int64_t>(i),
             digest(std::vector<at::Tensor>{batch.inputs[i][static_cast<std::int64_t>(f)]})
                 .item<std::int64_t>()});
    }
  }
  return sum;
}

std::uint64_t digest_over_ranks(const MicroBatches& local, Group& group) {
  const auto own = std::bit_cast<std::int64_t>(digest(local));
  const at::Tensor all = group.all_gather(at::full({1}, own, at::kLong));
  std::uint64_t sum = 0;
  for (std::int64_t rank = 0; rank < group.size(); ++rank)
    sum += std::bit_cast<std::uint64_t>(all[rank].item<std::int64_t>());
  return sum;
}

namespace {

at::Tensor copied(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

VerifyModel with_values(VerifyModel made, const std::vector<at::Tensor>& values) {
  at::NoGradGuard no_grad;
  ISOGRAD_INVARIANT(made.named.size() == values.size(), "another number of parameters in another precision");
  for (std::size_t i = 0; i < values.size(); ++i) made.named[i].second.copy_(values[i]);
  return made;
}

}  // namespace

Initial::Initial(const VerifyModel& model) : chooses_experts(model.choose_experts) {
  for (const auto& [name, tensor] : model.named) {
    names.push_back(name);
    values.push_back(copied(tensor));
    trainable.push_back(tensor.requires_grad());
  }
}

VerifyModel Initial::model(const VerifyProblem& problem, at::ScalarType dtype) const {
  VerifyModel made = with_values(problem.make_model(dtype), values);
  if (choices && made.choose_experts && dtype == problem.dtype) made.choose_experts(choices->replay());
  return made;
}

VerifyModel Initial::oracle(const VerifyProblem& problem) const {
  VerifyModel made = problem.make_model(at::kDouble);
  at::NoGradGuard no_grad;
  for (auto& [name, tensor] : made.named)
    if (!tensor.is_cpu()) tensor.set_data(tensor.to(at::kCPU));
  made = with_values(std::move(made), values);
  if (choices && made.choose_experts && other_values) made.choose_experts(choices->replay());
  return made;
}

Initial Initial::nudged(std::uint64_t draw) const {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(draw);
  Initial other = *this;
  other.other_values = true;
  for (at::Tensor& value : other.values) {
    if (!value.is_floating_point()) continue;
    const auto options = value.options().dtype(at::kDouble);
    const at::Tensor sign = at::randint(0, 2, value.sizes(), generator, options).mul_(2).sub_(1);
    const auto type = value.scalar_type();
    const double ulp = type == at::kBFloat16 ? 0x1p-7
                       : type == at::kHalf   ? 0x1p-10
                       : type == at::kFloat  ? 0x1p-23
                                             : 0x1p-52;
    value = (value.to(at::kDouble) * (sign * ulp + 1)).to(value.scalar_type());
  }
  return other;
}

// Moves nothing.
class NoUpdate : public Optimizer {
 public:
  void update(std::vector<Bucket>&, double) override {}
  void set_learning_rate(double) override {}
  double learning_rate() const override { return 0; }
  std::int64_t updates() const override { return 0; }
  OptimizerState state(const std::vector<Bucket>&) override { return {}; }
  void set_updates(std::int64_t) override {}
};

class RecordingOptimizer : public NoUpdate {
 public:
  RecordingOptimizer(const VerifyProblem& problem, Group group, std::unique_ptr<Optimizer> inner)
      : problem_(problem), group_(std::move(group)), inner_(std::move(inner)) {
    if (!problem.clip_groups.empty()) {
      if (!inner_) inner_ = std::make_unique<NoUpdate>();
      inner_ = std::make_unique<ClipsGroups>(std::move(inner_), problem.clip_groups, problem.step.max_norm,
                                             group_);
    }
    if (inner_ && problem.wrap_optimizer) inner_ = problem.wrap_optimizer(std::move(inner_));
  }

  void update(std::vector<Bucket>& buckets, double gradient_scale) override {
    scale_ = gradient_scale;
    if (problem_.clipping) {
      norm_ = problem_.clipping->norm(buckets, group_);
      const double limit = problem_.step.max_norm;
      scale_ = gradient_scale * (limit > 0 ? std::min(1.0, limit / (norm_ + 1e-6)) : 1);
      if (problem_.clipping->coefficients && inner_) {
        const auto own = problem_.clipping->coefficients(buckets, norm_, limit);
        at::NoGradGuard no_grad;
        for (std::size_t b = 0; b < buckets.size(); ++b) buckets[b].gradients.mul_(own.at(b));
        return inner_->update(buckets, gradient_scale);
      }
    }
    if (inner_) inner_->update(buckets, scale_);
  }

  double scale() const { return scale_; }
  double norm() const { return norm_; }

 private:
  const VerifyProblem& problem_;
  Group group_;
  std::unique_ptr<Optimizer> inner_;
  double scale_ = 1, norm_ = 0;
};

// Counts the layout's own bytes: from the first forward to the complete sum, and of publishing the update.
struct LayoutRun::Metered : DataParallel {
  std::unique_ptr<DataParallel> owned;
  DataParallel* inner;
  std::int64_t start = -1, bytes = 0;
  explicit Metered(std::unique_ptr<DataParallel> owned_) : owned(std::move(owned_)), inner(owned.get()) {}
  explicit Metered(DataParallel& live) : inner(&live) {}

  void begin() {
    if (start < 0) start = inner->bytes_sent();
  }
  void zero_gradients() override {
    start = -1;
    bytes = 0;
    inner->zero_gradients();
  }
  void begin_backward(bool last) override {
    begin();
    inner->begin_backward(last);
  }
  void finish_reduction() override {
    begin();
    inner->finish_reduction();
    bytes += inner->bytes_sent() - start;
  }
  // With the squares that it takes on its way, as a run's norm has them.
  void finish_reduction_with(const Reduced& reduced) override {
    begin();
    inner->finish_reduction_with(reduced);
    bytes += inner->bytes_sent() - start;
  }
  void publish_parameters() override {
    const auto before = inner->bytes_sent();
    inner->publish_parameters();
    bytes += inner->bytes_sent() - before;
  }
  bool needs_even_micro_batches() const override { return inner->needs_even_micro_batches(); }
  std::vector<Bucket>& buckets() override { return inner->buckets(); }
  std::int64_t bytes_sent() override { return inner->bytes_sent(); }
  const Mesh& mesh() const override { return inner->mesh(); }
  double exposed_seconds() const override { return inner->exposed_seconds(); }
  std::shared_ptr<const void> whole_parameters() override { return inner->whole_parameters(); }
  void take_over_writes(const std::set<std::string>& excluded) override { inner->take_over_writes(excluded); }
  void compare_writes() override { inner->compare_writes(); }
};

LayoutRun::LayoutRun(const VerifyProblem& problem, const LayoutUnderTest& layout, VerifyModel model,
                     Group group, std::unique_ptr<Optimizer> inner)
    : problem_(problem), group_(std::move(group)), model_(std::move(model)) {
  // On fewer ranks, in an experiment, each of them has the whole model.
  const bool together = problem.mesh && group_.size() == problem.mesh->all().size();
  if (model_.cut && together) model_.placed = std::make_shared<Layout>(model_.cut(*problem.mesh));
  if (!together) model_.through = {};
  layout_ = std::make_unique<Metered>(layout.make_from_model
                                          ? layout.make_from_model(model_, group_)
                                          : layout.make(trainable_parameters(model_.named), group_));
  LookAhead look_ahead;
  if (model_.look_ahead) look_ahead = model_.look_ahead(model_.loss_terms);
  make_step(model_.loss_terms, std::move(look_ahead), std::move(inner));
}

LayoutRun::LayoutRun(const VerifyProblem& problem, Group group)
    : problem_(problem), group_(std::move(group)) {
  if (problem.live_run->placed) model_.placed = std::make_shared<Layout>(*problem.live_run->placed);
  model_.named = problem.live_run->named;
  model_.through = problem.live_run->through;
  layout_ = std::make_unique<Metered>(*problem.live_run->layout);
  make_step(problem.live_run->forward, problem.live_run->look_ahead, nullptr);
}

void LayoutRun::make_step(const ForwardLossTerms& forward, LookAhead look_ahead,
                          std::unique_ptr<Optimizer> inner) {
  const DeclaredLoss& declared = problem_.loss;
  normalizer_ = problem_.make_normalizer
                    ? problem_.make_normalizer()
                    : make_normalizer(declared.mean, declared.denominator,
                                      {.replicas = declared.replicas ? group_.size() : 1});
  recorder_ = std::make_unique<RecordingOptimizer>(problem_, group_, std::move(inner));
  StepOptions options = problem_.step;
  if (problem_.clipping || !problem_.clip_groups.empty()) options.max_norm = 0;
  // Not metered: what it gathers comes before the first forward of the step itself.
  if (look_ahead) options.look_ahead = std::move(look_ahead);
  const auto metered = [this, forward](const Batch& batch) {
    layout_->begin();
    return forward(batch);
  };
  if (model_.through) options = model_.through(std::move(options));
  step_ = std::make_unique<Step>(metered, *layout_, *normalizer_, *recorder_, options);
}

LayoutRun::~LayoutRun() = default;

LayoutRun::RecordedStep LayoutRun::step(const MicroBatches& local) {
  const StepReport report = (*step_)(local);
  RecordedStep made;
  made.figures = {.loss = report.loss,
                  .targets = report.step_counts.targets,
                  .tokens = report.step_counts.tokens,
                  .norm = report.norm,
                  .clip_coefficient = report.updated ? recorder_->scale() : report.clip_coefficient};
  if (!problem_.clip_groups.empty()) made.figures.unclipped_norm = report.norm;
  if (problem_.clipping && report.updated) made.figures.norm = recorder_->norm();
  if (!problem_.clip_groups.empty() && report.updated) {  // of what is compared, which the clip has left
    double squares = 0;
    for (const Bucket& bucket : layout_->buckets())
      squares += squared_norm(bucket.gradients, owned_part(bucket));
    at::Tensor all = at::full({1}, squares, at::kDouble);
    group_.all_reduce(all);
    made.figures.norm = std::sqrt(all.item<double>()) * std::abs(report.gradient_scale);
  }
  for (const auto& term : report.terms) made.terms.emplace_back(term.name, term.value);
  made.bytes_moved = static_cast<double>(layout_->bytes);
  for (auto& [name, gradient] : whole_views(&DataParallel::View::gradient)) {
    made.names.push_back(name);
    made.gradients.push_back(std::move(gradient));
  }
  return made;
}

StepDump::Named LayoutRun::RecordedStep::named() const {
  StepDump::Named all;
  for (std::size_t i = 0; i < names.size(); ++i) all.emplace_back(names[i], gradients[i]);
  return all;
}

std::vector<at::Tensor> LayoutRun::parameters() {
  std::vector<at::Tensor> values;
  for (auto& [name, master] : whole_views(&DataParallel::View::master)) values.push_back(std::move(master));
  return values;
}

std::vector<std::pair<std::string, at::Tensor>> LayoutRun::whole_views(at::Tensor DataParallel::View::*of) {
  const auto views = layout_->views();
  std::vector<std::pair<std::string, at::Tensor>> all;
  const bool stages = model_.placed && model_.placed->mesh().grid().has(kStageAxis);
  if (!stages) {
    for (const auto& view : views) all.emplace_back(view.name, copied(whole(view.name, view.*of)));
    return all;
  }
  // A rank whose stages have nothing that is trained takes the type from the parameter.
  const auto none = [&](const at::Tensor& tensor) {
    return at::empty({0}, views.empty() ? tensor.options().dtype(gradient_type(tensor.scalar_type()))
                                        : (views.front().*of).options());
  };
  for (const auto& [name, tensor] : model_.named) {
    if (!tensor.requires_grad()) continue;
    const auto own = std::ranges::find_if(views, [&](const auto& one) { return one.name == name; });
    all.emplace_back(name, copied(whole(name, own == views.end() ? none(tensor) : (*own).*of)));
  }
  return all;
}

at::Tensor LayoutRun::whole(const std::string& name, const at::Tensor& held) const {
  return model_.placed ? model_.placed->whole(name, held) : held;
}

std::vector<std::string> LayoutRun::differing_buffers() {
  std::vector<at::Tensor> values;
  std::vector<std::string> names, differing;
  for (const auto& [name, buffer] : model_.buffers) {
    if (!buffer.defined()) continue;
    values.push_back(copied(buffer));
    names.push_back(name);
  }
  if (values.empty()) return differing;
  // Forward changes those of a rank's own stages alone: compared over ranks that have the same, told to all.
  Group alike = model_.placed ? ranks_of_same_parameters(model_.placed->mesh()) : group_;
  at::Tensor differs = at::zeros({static_cast<std::int64_t>(values.size())}, at::kLong);
  for (std::size_t i : differing_over_ranks(digest(values), alike)) differs[static_cast<std::int64_t>(i)] = 1;
  group_.all_reduce(differs, ReduceOp::kMax);
  for (std::size_t i = 0; i < values.size(); ++i)
    if (differs[static_cast<std::int64_t>(i)].item<std::int64_t>() != 0) differing.push_back(names[i]);
  return differing;
}

DataParallel& LayoutRun::layout() { return *layout_; }

void LayoutRun::describe(const RecordedStep& made, const std::vector<std::uint64_t>& initial,
                         StepDump& dump) {
  const auto ranks = static_cast<std::size_t>(group_.size());
  dump.ranks.assign(ranks, {});
  // How far each rank's gradient is from rank 0's. Where no bit differs, it is 0.
  const at::Tensor bits = digest(made.gradients);
  double spread = 0;
  const auto differing = differing_over_ranks(bits, group_);
  for (std::size_t i : differing) {
    at::Tensor first = made.gradients[i].clone();
    group_.broadcast(first, 0);
    const double norm = first.norm().item<double>(), off = (made.gradients[i] - first).norm().item<double>();
    const double share = off == 0 ? 0 : norm > 0 ? off / norm : HUGE_VAL;
    spread = std::isnan(share) ? HUGE_VAL : std::max(spread, share);
  }
  double squares = 0;
  for (const Bucket& bucket : layout_->buckets())
    squares += squared_norm(bucket.gradients, owned_part(bucket));

  std::vector<double> own = {spread, std::sqrt(squares), made.figures.norm, made.bytes_moved};
  const at::Tensor numbers = group_.all_gather(at::tensor(own, at::kDouble));  // [W, 4]
  std::vector<std::int64_t> start;
  for (auto value : initial) start.push_back(std::bit_cast<std::int64_t>(value));
  const at::Tensor starts = group_.all_gather(at::tensor(start, at::kLong));
  const at::Tensor digests = group_.all_gather(bits);
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto row = static_cast<std::int64_t>(r);
    const auto number = [&](int column) { return numbers[row][column].item<double>(); };
    dump.ranks[r] = {.initial = checksums(starts[row]),
                     .gradients = checksums(digests[row]),
                     .spread = number(0),
                     .owned_norm = number(1),
                     .norm = number(2),
                     .bytes_moved = number(3)};
  }

  dump.owners = owners(made.names);
  if (model_.placed)
    for (const PlacedParameter& each : model_.placed->parameters())
      for (const Cut& cut : each.placement.cuts)
        dump.cut.push_back({each.name, {cut.axis, model_.placed->mesh().grid().size({cut.axis})}});
  for (std::size_t i : differing) {
    if (!model_.placed) break;
    const Mesh& mesh = model_.placed->mesh();
    const PlacedParameter& parameter = model_.placed->parameter(made.names[i]);
    const AxisSet peers = without(parameter.copies, mesh.data());
    at::Tensor sum = made.gradients[i].clone();
    if (parameter.held && mesh.size(peers) > 1) mesh.along(peers).all_reduce(sum);
    if (!parameter.placement.stages.empty() && mesh.grid().has(kStageAxis))
      mesh.along({kStageAxis}).broadcast(sum, parameter.placement.stages.front());
    dump.peer_sums.push_back({made.names[i], mesh.grid().text(peers), sum});
  }
}

std::vector<std::pair<std::int64_t, std::int64_t>> LayoutRun::owners(const std::vector<std::string>& names) {
  std::map<std::string, at::Tensor> counted;  // on this rank; buckets of ranks may differ
  for (const Bucket& bucket : layout_->buckets()) {
    at::Tensor times = at::zeros({bucket.plan.numel}, at::kInt);
    times.slice(0, bucket.owned.begin, bucket.owned.end).fill_(1);
    if (!model_.placed) group_.all_reduce(times);
    for (const Slot& slot : bucket.plan.slots)
      counted[slot.name] = times.narrow(0, slot.offset, slot.numel).view(slot.shape);
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> result;
  for (const std::string& name : names) {
    at::Tensor times = counted.contains(name) ? counted.at(name) : at::empty({0}, at::kInt);
    if (model_.placed) {
      const PlacedParameter& parameter = model_.placed->parameter(name);
      if (parameter.held) {
        Group copies = model_.placed->mesh().along(parameter.copies);
        if (copies.size() > 1) copies.all_reduce(times);
      }
      times = model_.placed->whole(name, times);
    }
    const bool any = times.numel() > 0;
    result.emplace_back(any ? times.min().item<int>() : 1, any ? times.max().item<int>() : 1);
  }
  return result;
}

void Heartbeat::tick() { somebody_works(true); }

void Heartbeat::finish() {
  while (somebody_works(false)) {
  }
}

bool Heartbeat::somebody_works(bool this_rank) {
  const bool stops = stop_ && stop_();
  if (group_.size() == 1) {
    if (stops) throw VerifyStopped();
    return this_rank;
  }
  at::Tensor said = at::zeros({2}, at::kLong);
  said[0] = this_rank ? 1 : 0, said[1] = stops ? 1 : 0;
  group_.all_reduce(said, ReduceOp::kMax);
  if (said[1].item<std::int64_t>() != 0) throw VerifyStopped();
  return said[0].item<std::int64_t>() != 0;
}

}  // namespace isograd
