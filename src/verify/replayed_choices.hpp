// The experts that one process chooses for each token in fp64, replayed in runs of lower precision: rounding
// may turn a near tie, and then gradients differ by far more than rounding although neither run is wrong.
// Their own choices may differ only where scores are closer than rounding can tell.
#pragma once

#include <mutex>
#include <set>
#include <unordered_map>

#include "isograd/verify.hpp"

namespace isograd {

struct Initial;

// The smallest change of two scores [E] that makes `chosen` (ascending) the top-k; infinite: none does.
double apart_from_best(const double* scores, std::int64_t experts, const ExpertScores& kind,
                       const std::vector<std::int64_t>& chosen);

class ReplayedChoices : public std::enable_shared_from_this<ReplayedChoices> {
 public:
  // For DecoderLM::set_choice_of_experts(); keeps this alive. Tokens unknown to the oracle stay as chosen.
  DecoderLM::ChooseExperts replay();

  // Counts what was replayed since the last call, over the ranks of `data`. Collective.
  LayoutVerdict::Choices take(const Group& data);

 private:
  friend std::shared_ptr<ReplayedChoices> record_choices(const VerifyProblem&, const Initial&, Group&);
  at::Tensor choose(const Batch& batch, std::int64_t layer, const ExpertScores& scores,
                    const at::Tensor& likeliest);

  // Tokens by key: rows of chosen_. Several, where one document stands in the step more than once.
  std::unordered_multimap<std::int64_t, std::int64_t> rows_;
  std::vector<at::Tensor> chosen_;  // by layer; [N, k] int64, ascending in a row; undefined: no experts there
  std::vector<double> allowed_;     // by layer; how far scores may be apart where rounding decides
  std::mutex mutex_;
  std::set<std::pair<std::int64_t, std::int64_t>> seen_;  // layer, row: each is counted once
  LayoutVerdict::Choices counts_;
};

// Collective: the last rank makes both forwards of one process. Null in fp64 and without experts.
std::shared_ptr<ReplayedChoices> record_choices(const VerifyProblem& problem, const Initial& initial,
                                                Group& group);

}  // namespace isograd
