#include "verify/replayed_choices.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "train/rank_zero.hpp"
#include "verify/compare.hpp"
#include "verify/layout_run.hpp"

namespace isograd {
namespace {

// A key for each token, whatever batch it lies in and however that is split.
std::vector<std::int64_t> keys_of(const Batch& batch) {
  std::vector<std::int64_t> keys;
  const at::Tensor tokens = batch.tokens.cpu().contiguous(), positions = batch.positions.cpu().contiguous(),
                   targets = batch.targets.defined() ? batch.targets.cpu().contiguous() : tokens;
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f)
    for (std::int64_t t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t) {
      const std::array<std::int64_t, 4> of{
          f < batch.sample_ids.size() ? batch.sample_ids[f] : 0, positions.const_data_ptr<std::int64_t>()[t],
          tokens.const_data_ptr<std::int64_t>()[t], targets.const_data_ptr<std::int64_t>()[t]};
      keys.push_back(static_cast<std::int64_t>(XXH3_64bits(of.data(), sizeof(of))));
    }
  return keys;
}

// The choices of one forward, by layer, and their scores.
struct Routed {
  std::map<std::int64_t, at::Tensor> chosen, scores;
};

DecoderLM::ChooseExperts recorder(const std::shared_ptr<Routed>& into, const std::shared_ptr<Routed>& given) {
  return [into, given](const Batch&, std::int64_t layer, const ExpertScores& scores,
                       const at::Tensor& likeliest) {
    into->scores[layer] = scores.values.to(at::kCPU, at::kDouble);
    const at::Tensor chosen = given ? given->chosen.at(layer).to(likeliest.device()) : likeliest;
    into->chosen[layer] = chosen.cpu();
    return chosen;
  };
}

// How far sums of two of a token's groups are apart the wrong way. Completes `used` by the best others.
double groups_apart(const std::vector<double>& of, std::vector<bool>& used, std::int64_t places) {
  double worst_taken = HUGE_VAL;
  std::vector<std::size_t> others;
  for (std::size_t group = 0; group < of.size(); ++group)
    if (used[group])
      worst_taken = std::fmin(worst_taken, of[group]), --places;
    else
      others.push_back(group);
  if (places < 0) return HUGE_VAL;
  std::stable_sort(others.begin(), others.end(), [&](std::size_t a, std::size_t b) { return of[a] > of[b]; });
  for (std::int64_t i = 0; i < places; ++i) used[others[static_cast<std::size_t>(i)]] = true;
  const auto first_left = static_cast<std::size_t>(places);
  return first_left < others.size() ? of[others[first_left]] - worst_taken : 0;
}

}  // namespace

double apart_from_best(const double* scores, std::int64_t experts, const ExpertScores& kind,
                       const std::vector<std::int64_t>& chosen) {
  std::vector<bool> used(static_cast<std::size_t>(kind.groups));
  const std::int64_t each = experts / kind.groups;
  for (const std::int64_t expert : chosen) used[static_cast<std::size_t>(expert / each)] = true;
  double apart = 0;
  if (kind.groups > 1) {
    std::vector<double> of(used.size());
    for (std::size_t group = 0; group < of.size(); ++group) {
      std::vector<double> own(scores + static_cast<std::int64_t>(group) * each,
                              scores + static_cast<std::int64_t>(group + 1) * each);
      std::partial_sort(own.begin(), own.begin() + 2, own.end(), std::greater<>());
      of[group] = own[0] + own[1];
    }
    apart = groups_apart(of, used, kind.groups_per_token) / 2;  // both scores of a sum may be off
  }
  double best_left = -HUGE_VAL, worst_taken = HUGE_VAL;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    if (std::isnan(scores[expert])) return std::numeric_limits<double>::quiet_NaN();
    if (std::binary_search(chosen.begin(), chosen.end(), expert))
      worst_taken = std::fmin(worst_taken, scores[expert]);
    else if (used[static_cast<std::size_t>(expert / each)])
      best_left = std::fmax(best_left, scores[expert]);
  }
  return std::fmax(0, std::fmax(apart, best_left - worst_taken));
}

DecoderLM::ChooseExperts ReplayedChoices::replay() {
  return [self = shared_from_this()](const Batch& batch, std::int64_t layer, const ExpertScores& scores,
                                     const at::Tensor& likeliest) {
    return self->choose(batch, layer, scores, likeliest);
  };
}

LayoutVerdict::Choices ReplayedChoices::take(const Group& data) {
  LayoutVerdict::Choices taken;
  {
    const std::lock_guard lock(mutex_);
    seen_.clear();
    taken = std::exchange(counts_, {});
  }
  if (data.size() == 1) return taken;
  Group ranks = data;
  at::Tensor sums = at::tensor({taken.tokens, taken.flipped, taken.wrong}, at::kLong);
  ranks.all_reduce(sums);
  taken.tokens = sums[0].item<std::int64_t>(), taken.flipped = sums[1].item<std::int64_t>();
  taken.wrong = sums[2].item<std::int64_t>();
  constexpr double kNone = 1e9;  // layers
  const at::Tensor others = ranks.all_gather(
      at::tensor({taken.margin, taken.layer < 0 ? -kNone : -static_cast<double>(taken.layer)}, at::kDouble));
  const at::Tensor most = std::get<0>(others.max(0));
  taken.margin = most[0].item<double>();
  taken.layer = most[1].item<double>() == -kNone ? -1 : -static_cast<std::int64_t>(most[1].item<double>());
  return taken;
}

at::Tensor ReplayedChoices::choose(const Batch& batch, std::int64_t layer, const ExpertScores& scores,
                                   const at::Tensor& likeliest) {
  const auto index = static_cast<std::size_t>(layer);
  const auto keys = keys_of(batch);
  if (index >= chosen_.size() || !chosen_[index].defined() ||
      static_cast<std::int64_t>(keys.size()) != likeliest.size(0))
    return likeliest;
  const at::Tensor wide = scores.values.to(at::kCPU, at::kDouble).contiguous();
  at::Tensor result = likeliest.cpu().clone();
  const std::int64_t each = result.size(1), experts = wide.size(1);
  auto* own = result.mutable_data_ptr<std::int64_t>();
  const auto* recorded = chosen_[index].const_data_ptr<std::int64_t>();
  const double* score = wide.const_data_ptr<double>();
  const std::lock_guard lock(mutex_);
  for (std::size_t t = 0; t < keys.size(); ++t, own += each, score += experts) {
    const auto [first, last] = rows_.equal_range(keys[t]);
    if (first == last) continue;
    std::vector<std::int64_t> natural(own, own + each);
    std::ranges::sort(natural);
    // Not 0 where the run chose what its own scores like less: no rounding does that.
    const double astray = apart_from_best(score, experts, scores, natural);
    double least = HUGE_VAL;  // how far scores are apart that would have to agree for a recorded choice
    const std::int64_t* nearest = nullptr;
    std::int64_t nearest_row = first->second;
    for (auto row = first; row != last; ++row) {
      const std::int64_t* candidate = recorded + row->second * each;
      const bool alike = std::equal(natural.begin(), natural.end(), candidate);
      const double apart =
          alike ? 0
                : std::fmax(astray, apart_from_best(score, experts, scores, {candidate, candidate + each}));
      if (std::isnan(apart) || apart >= least) continue;
      least = apart, nearest = candidate, nearest_row = row->second;
      if (alike) break;
    }
    const bool same = nearest && std::equal(natural.begin(), natural.end(), nearest);
    if (seen_.emplace(layer, nearest_row).second) {
      ++counts_.tokens;
      counts_.flipped += same ? 0 : 1;
      const bool explained = same || least <= allowed_[index];
      if (!explained && (counts_.wrong++ == 0 || layer < counts_.layer)) counts_.layer = layer;
      if (!same && explained && allowed_[index] > 0)
        counts_.margin = std::fmax(counts_.margin, least / allowed_[index]);
    }
    // A wrong choice stays, so that what it does to the gradient is seen as well.
    if (same || !nearest || !(least <= allowed_[index])) continue;
    // The likeliest first, as routers give them.
    std::vector<std::int64_t> ordered(nearest, nearest + each);
    std::stable_sort(ordered.begin(), ordered.end(),
                     [&](std::int64_t a, std::int64_t b) { return score[a] > score[b]; });
    std::copy(ordered.begin(), ordered.end(), own);
  }
  return result.to(likeliest.device());
}

std::shared_ptr<ReplayedChoices> record_choices(const VerifyProblem& problem, const Initial& initial,
                                                Group& group) {
  if (problem.dtype == at::kDouble || !initial.chooses_experts) return nullptr;
  const VerifyModel rounded = initial.model(problem, problem.dtype);
  auto choices = std::make_shared<ReplayedChoices>();
  const int last = group.size() - 1;
  std::vector<std::int64_t> keys;
  std::map<std::int64_t, std::vector<at::Tensor>> chosen;  // by layer
  std::map<std::int64_t, double> off;                      // the largest error of a score
  Heartbeat heartbeat(group, problem.stop);
  if (group.rank() == last) {
    const at::NoGradGuard no_grad;
    const VerifyModel exact = initial.oracle(problem);
    const MicroBatches whole = problem.alone ? problem.alone() : problem.whole();
    for (const Batch& batch : whole) {
      const auto right = std::make_shared<Routed>(), other = std::make_shared<Routed>();
      exact.choose_experts(recorder(right, nullptr));
      exact.logits(batch);
      heartbeat.tick();
      rounded.choose_experts(recorder(other, right));
      rounded.logits(batch);
      heartbeat.tick();
      const auto own = keys_of(batch);
      keys.insert(keys.end(), own.begin(), own.end());
      for (const auto& [layer, experts] : right->chosen) {
        chosen[layer].push_back(std::get<0>(experts.sort(1)));
        if (experts.size(0) == 0) continue;
        const double error = (right->scores.at(layer) - other->scores.at(layer)).abs().max().item<double>();
        off[layer] = std::fmax(off[layer], error);
      }
    }
  }
  heartbeat.finish();

  // Its keys, the largest error of each layer (-1: no experts), and the experts of the others.
  std::string bytes;
  if (group.rank() == last && !keys.empty()) {
    at::Tensor errors = at::full({chosen.empty() ? 0 : chosen.rbegin()->first + 1}, -1.0, at::kDouble);
    c10::List<at::Tensor> experts;
    for (const auto& [layer, parts] : chosen) experts.push_back(at::cat(parts).contiguous());
    for (const auto& [layer, error] : off) errors[layer] = error;
    const auto pickled = torch::jit::pickle_save(c10::ivalue::Tuple::create({keys, errors, experts}));
    bytes.assign(pickled.begin(), pickled.end());
  }
  bytes = broadcast_text(group, bytes, last);
  if (bytes.empty()) return choices;
  const c10::IValue all = torch::jit::pickle_load({bytes.begin(), bytes.end()});
  const auto& parts = all.toTupleRef().elements();
  std::int64_t row = 0;
  for (const std::int64_t key : parts[0].toIntVector()) choices->rows_.emplace(key, row++);
  const auto experts = parts[2].toTensorVector();
  std::size_t next = 0;
  const at::Tensor errors = parts[1].toTensor();
  for (std::int64_t layer = 0; layer < errors.numel(); ++layer) {
    const double error = errors[layer].item<double>();
    // Both scores of a pair may be off, each by what a run may be off where one process is off by `error`.
    choices->allowed_.push_back(2 * kRoundingFactor * error);
    choices->chosen_.push_back(error < 0 ? at::Tensor() : experts[next++]);
  }
  return choices;
}

}  // namespace isograd
