// Findings in the graph of a loss term: a mean over its micro-batch, where the step wants a sum, and 16-bit
// gradients.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/loss.hpp"

namespace isograd {

inline constexpr auto kOnce = [](const auto& /*earlier*/, const auto& /*now*/) { return false; };

// Calls visit(node, state, next) for the nodes behind a tensor, nearest first; next(edge, state) goes on to
// another. A node is visited once, and again where again(its state, the new one).
template <class State, class Visit, class Again = decltype(kOnce)>
void walk(const at::Tensor& from, const State& first, const Visit& visit, const Again& again = kOnce) {
  std::vector<std::pair<torch::autograd::Node*, State>> places;
  std::unordered_map<torch::autograd::Node*, State> seen;
  const auto next = [&](const torch::autograd::Edge& edge, const State& state) {
    if (!edge.is_valid()) return;
    const auto [place, is_new] = seen.try_emplace(edge.function.get(), state);
    if (!is_new && !again(place->second, state)) return;
    place->second = state;
    places.emplace_back(edge.function.get(), state);
  };
  next({from.grad_fn(), 0}, first);
  for (std::size_t p = 0; p < places.size(); ++p) {
    const auto [node, state] = places[p];  // a copy: more places are added
    visit(*node, state, next);
  }
}

// Looks at the graphs of a rank's loss terms, micro-batch by micro-batch, for a mean that LibTorch takes and
// for a division by a number of this micro-batch: its targets, tokens, samples or weights. It computes
// nothing and changes nothing. A mean as it is and a sum divided by the targets are known in the first
// micro-batch; with another factor (0.5 * mse_loss) two micro-batches of different sizes are needed, since
// the factor may hold the count (0.1 * n * mean). Functions of other libraries' own are not looked into.
class LocalMeans {
 public:
  // `step`: what the step divides by. The batch is a prepared one, on the CPU.
  void look(const LossTerms& terms, const Batch& batch, const Normalizer& step);
  // The finding that all micro-batches so far agree on; nothing while that is not certain.
  std::optional<ErrorText> found() const;

 private:
  struct Evidence {
    double size = 0;      // of the first micro-batch
    bool varied = false;  // another one had another size
    bool certain = false;
    int looks = 0;
    std::string said{};
  };
  struct Term {
    int looks = 0;
    std::map<std::string, Evidence> evidence{};
    Mean mean = Mean::kTargets;
  };
  std::map<std::string, Term> terms_;
  int looks_ = 0;
};

// Which part of the gradient of a sum, or mean, is in 16 bits while it is still one number for all elements:
// there the division is rounded, the same way for every token.
enum class In16Bits {
  kNothing,
  kCopies,     // tensors that get the sum's own gradient, its negative or 0
  kMultiples,  // tensors that get it multiplied or added up: masks, weights, means
  kSum,        // the sum itself, or a scalar that it is made of
};
In16Bits in_16_bits(const at::Tensor& sum);
void check_16_bits(const std::string& where, const LossTerm& term, bool deferred);

// LibTorch's functions, by their nodes' names without "Backward".
const std::set<std::string>& functions_of_own_slope();  // whose slope differs between elements
const std::set<std::string>& copying_functions();
// Where factors stand among the inputs: a factor's slope is the product of the others.
const std::map<std::string, std::vector<std::size_t>>& products();

}  // namespace isograd
