#include "loss/local_mean.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_set>
#include <vector>

#include "loss/share.hpp"

namespace isograd {
namespace {

using torch::autograd::Node;
namespace generated = torch::autograd::generated;

constexpr int kMostLooks =
    64;  // micro-batches of a rank: a factor that holds the count has shown itself by then

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-5 * std::abs(b);  // constants may be fp32
}

std::int64_t elements_made(const torch::autograd::Edge& edge) {
  std::int64_t elements = 1;
  for (const auto& size : edge.function->input_metadata(edge.input_nr).shape_as_dim_vector())
    elements *= size.guard_int(__FILE__, __LINE__);
  return elements;
}

// A constant as one number: of one element, or the one value of all that are not 0.
std::optional<double> one_number(const torch::autograd::SavedVariable& saved) {
  at::Tensor value;
  try {
    value = saved.unpack();
  } catch (const c10::Error&) {  // changed since: backward says so
    return std::nullopt;
  }
  if (!value.defined() || value.is_complex() || value.numel() == 0) return std::nullopt;
  value = value.detach();
  if (value.numel() == 1) return value.to(at::kDouble).item<double>();
  const at::Tensor wide = value.to(at::kDouble), used = wide.masked_select(wide.ne(0));
  if (used.numel() == 0) return std::nullopt;
  const double smallest = used.min().item<double>(), largest = used.max().item<double>();
  return smallest == largest ? std::optional(largest) : std::nullopt;
}

// The factor by which a product or quotient multiplies its input i, where it is one constant number.
std::optional<double> factor_of(const Node& node, std::size_t i) {
  const auto constant = [&](std::size_t other) {
    return other >= node.num_outputs() || !node.next_edge(other).is_valid();
  };
  if (const auto* product = dynamic_cast<const generated::MulBackward0*>(&node))
    return constant(1 - i) ? one_number(i == 0 ? product->other_ : product->self_) : std::nullopt;
  if (const auto* product = dynamic_cast<const generated::MulBackward1*>(&node))
    return product->other.toDouble();
  if (const auto* quotient = dynamic_cast<const generated::DivBackward1*>(&node))
    return 1 / quotient->other.toDouble();
  if (const auto* quotient = dynamic_cast<const generated::DivBackward0*>(&node);
      quotient && i == 0 && constant(1))
    if (const auto divisor = one_number(quotient->other_)) return 1 / *divisor;
  return std::nullopt;
}

// The number of elements that a node's one number is the mean of; 0: it is no mean.
double mean_over(const Node& node) {
  if (const auto* mean = dynamic_cast<const generated::MeanBackward0*>(&node))
    return static_cast<double>(mean->self_sym_numel.guard_int(__FILE__, __LINE__));
  if (const auto* mean = dynamic_cast<const generated::MeanBackward1*>(&node))
    return static_cast<double>(mean->self_sym_numel.guard_int(__FILE__, __LINE__));
  const auto of_loss = [&](const auto* loss) {
    return loss && loss->reduction == at::Reduction::Mean
               ? static_cast<double>(elements_made(node.next_edge(0)))
               : 0.0;
  };
  const auto of_classes = [&](const auto* loss) {  // rows, or the weights of those that have a target
    if (!loss || loss->reduction != at::Reduction::Mean) return 0.0;
    return one_number(loss->total_weight_).value_or(0);
  };
  const double all[] = {of_classes(dynamic_cast<const generated::NllLossBackward0*>(&node)),
                        of_classes(dynamic_cast<const generated::NllLoss2DBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::MseLossBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::SmoothL1LossBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::HuberLossBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::BinaryCrossEntropyBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::BinaryCrossEntropyWithLogitsBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::SoftMarginLossBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::MultiMarginLossBackward0*>(&node)),
                        of_loss(dynamic_cast<const generated::MultilabelMarginLossBackward0*>(&node))};
  return *std::max_element(std::begin(all), std::end(all));
}

// Functions that a sum is looked through: each element of their input gets the number that their result got.
bool is_passed(const std::string& function) {
  return copying_functions().count(function) || function == "SelectBackward" || function == "Index" ||
         function == "Nansum" || function == "Mul" || function == "Div";
}

// Where a way down from a term ends: at a mean, or at what differs between elements.
struct End {
  double mean_over = 0;  // 0: no mean
  double factor = 1;     // what everything above multiplies it by
  bool divided = false;  // a single division makes the factor, and it stands outside of the sum
  std::vector<double> factors{};
};

std::vector<End> ends_of(const at::Tensor& term) {
  struct Place {
    Node* node;
    End so_far;
    bool outside;  // of the sum: all from the term to here are single numbers
  };
  std::vector<Place> places;
  std::vector<End> ends;
  std::unordered_set<Node*> seen;
  if (term.grad_fn()) places.push_back({term.grad_fn().get(), {}, true});
  for (std::size_t p = 0; p < places.size(); ++p) {
    const Place place = places[p];
    const Node& node = *place.node;
    if (place.outside)
      if (const double over = mean_over(node); over > 1) {
        ends.push_back(place.so_far);
        ends.back().mean_over = over;
        continue;
      }
    std::string function = node.name();
    function = function.substr(0, function.find("Backward"));
    bool passed = false;
    for (std::size_t i = 0; i < node.num_outputs() && is_passed(function); ++i) {
      const auto& edge = node.next_edge(i);
      if (!edge.is_valid()) continue;
      End next = place.so_far;
      if (function == "Mul" || function == "Div") {
        const auto factor = factor_of(node, i);
        if (!factor) continue;
        if (place.outside) next.divided = function == "Div" && next.factors.empty();
        next.factor *= *factor;
        next.factors.push_back(*factor);
      }
      passed = true;
      if (seen.insert(edge.function.get()).second)
        places.push_back({edge.function.get(), std::move(next), elements_made(edge) == 1});
    }
    if (!passed) ends.push_back(place.so_far);
  }
  return ends;
}

struct Count {
  const char* of;
  double value;
};

std::vector<Count> counts_of(const Batch& batch) {
  std::vector<Count> counts = {{"valid targets", static_cast<double>(batch.num_targets())},
                               {"tokens", static_cast<double>(batch.num_tokens())},
                               {"samples", static_cast<double>(batch.num_fragments())}};
  for (const at::Tensor& weights : {batch.given_weights, batch.weights})
    if (weights.defined() && weights.is_cpu())
      counts.push_back({"weights", weights.detach().to(at::kDouble).sum().item<double>()});
  return counts;
}

// Whether the batch itself says that a token's loss is multiplied by this: w_i, or w_i / T_b under the sample
// mean, which is one over a count in a micro-batch of one sample.
bool is_weight(const Batch& batch, double factor) {
  for (const at::Tensor& weights : {batch.weights, batch.given_weights, batch.sample_weights})
    if (weights.defined() && weights.is_cpu() && weights.numel() > 0 &&
        (weights.detach().to(at::kDouble) - factor).abs().min().item<double>() <= 1e-5 * std::abs(factor))
      return true;
  return false;
}

// The number of losses in the micro-batch of which each may be a mean by itself.
std::int64_t units_of(const Batch& batch, Mean mean) {
  if (mean == Mean::kTokens) return batch.num_tokens();
  if (mean != Mean::kSamples && mean != Mean::kFixed) return batch.num_targets();
  const std::set<std::int64_t> samples(batch.sample_ids.begin(), batch.sample_ids.end());
  return std::min(batch.num_targets(), static_cast<std::int64_t>(samples.size()));
}

}  // namespace

void LocalMeans::look(const LossTerms& terms, const Batch& batch, const Normalizer& step) {
  // Divisors are read from the device, which a step otherwise waits for once.
  constexpr int kMostLooksAtDevices = 4;
  const bool on_cpu = std::ranges::all_of(terms, [](const LossTerm& term) { return term.sum.is_cpu(); });
  if (looks_ >= (on_cpu ? kMostLooks : kMostLooksAtDevices) || batch.num_targets() < 2) return;
  ++looks_;
  const std::vector<Count> counts = counts_of(batch);
  for (const LossTerm& term : terms) {
    const Mean mean = term.mean == Mean::kStep ? step.mean() : term.mean;
    const std::int64_t units = units_of(batch, mean);
    if (mean == Mean::kNone || mean == Mean::kMicroBatches || term.replicated || term.weight == 0 ||
        units < 2)
      continue;
    Term& known = terms_[term.name];
    known.mean = mean;
    ++known.looks;

    struct Sight {
      std::string key, said;
      double size, factor;  // of a mean
      bool certain;
    };
    std::vector<Sight> sights;
    std::vector<double> of_means, of_others;  // factors, of sums those of their means over the targets
    std::size_t suspicious = 0;
    for (const End& end : ends_of(term.sum)) {
      const auto is_count = [&](double factor) {
        return near(factor, end.mean_over) ||
               std::any_of(counts.begin(), counts.end(),
                           [&](const Count& count) { return count.value >= 2 && near(factor, count.value); });
      };
      if (end.mean_over > 1) {
        if (std::any_of(end.factors.begin(), end.factors.end(), is_count))
          continue;  // a mean times its count
        ++suspicious;
        const double factor = std::abs(end.factor);
        of_means.push_back(factor);
        sights.push_back({fmt::format("mean x {:.6g}", factor),
                          fmt::format("a mean over {:g} elements{}", end.mean_over,
                                      near(factor, 1) ? "" : fmt::format(", times {:g}", end.factor)),
                          end.mean_over, factor, near(factor, 1)});
        continue;
      }
      if (is_weight(batch, std::abs(end.factor))) continue;
      of_others.push_back(std::abs(end.factor) * counts.front().value);
      bool divided = false;
      for (const Count& count : counts)
        if (count.value >= 2 && near(std::abs(end.factor) * count.value, 1)) {
          divided = true;
          sights.push_back(
              {count.of, fmt::format("a sum divided by {:g}, the number of {}", count.value, count.of),
               count.value, 0, end.divided && count.value >= 3 && count.of != std::string("samples")});
        }
      suspicious += divided ? 1 : 0;
    }
    if (suspicious >= static_cast<std::size_t>(units)) continue;  // a mean of each, added up
    // Label smoothing makes the mean of a mean and another one: a, and (1 - a) / classes.
    for (const double a : of_means)
      for (const double b : of_others)
        if (const double classes = (1 - a) / b; classes > 1.5 && near(std::round(classes), classes))
          for (Sight& sight : sights) sight.certain = sight.certain || near(sight.factor, a);
    std::set<std::string> counted;
    for (const Sight& sight : sights) {
      Evidence& evidence = known.evidence[sight.key];
      if (evidence.looks == 0) evidence.size = sight.size, evidence.said = sight.said;
      evidence.varied = evidence.varied || !near(sight.size, evidence.size);
      evidence.certain = evidence.certain || sight.certain;
      if (counted.insert(sight.key).second) ++evidence.looks;
    }
  }
}

std::optional<ErrorText> LocalMeans::found() const {
  for (const auto& [name, term] : terms_)
    for (const auto& [key, evidence] : term.evidence)
      if (evidence.looks == term.looks && (evidence.certain || evidence.varied))
        return ErrorText{
            .where = fmt::format("loss term '{}'", name),
            .found = evidence.said + " of one micro-batch",
            .expected = fmt::format(
                "the sum over the micro-batch: the step divides it, once, by what all ranks have counted ({})",
                name_of(term.mean)),
            .action =
                "Return the sum (cross_entropy_sum, or at::Reduction::Sum). For a loss that is normalised already take NoDenominator, or Mean::kNone for the term; a factor that is no count belongs into LossTerm::weight"};
  return std::nullopt;
}

}  // namespace isograd
