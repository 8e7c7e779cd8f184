// A loss over the rows of all ranks: B24.
#include <ATen/ATen.h>

#include "isograd/ranking.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

constexpr double kTemperature = 1;

// The first logit is the score; even targets are the positives.
at::Tensor labels_of(const at::Tensor& targets) {
  return at::where(targets.eq(kIgnoreIndex), targets, targets.remainder(2).eq(0).to(at::kLong));
}

// 1 - AP straight from the definition, all pairs at once.
at::Tensor plain_smooth_ap(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor rows = targets.ne(kIgnoreIndex).nonzero().squeeze(1);
  const at::Tensor s = logits.select(1, 0).index_select(0, rows);
  const at::Tensor positive = labels_of(targets.index_select(0, rows)).eq(1);
  const at::Tensor anchors = s.index_select(0, positive.nonzero().squeeze(1));
  const at::Tensor above = at::sigmoid((s.unsqueeze(0) - anchors.unsqueeze(1)) / kTemperature);
  const at::Tensor all = above.sum(1) + 0.5;  // itself: 0.5 where 1 is meant
  const at::Tensor own = (above * positive.to(s.scalar_type())).sum(1) + 0.5;
  return 1 - (own / all).sum() / anchors.numel();
}

}  // namespace

// Average precision over the rows of all ranks, one micro-batch of them.
void rank_all_rows(VerifyProblem& problem, World& world) {
  problem.local = {problem.local.empty() ? empty_batch() : toy::concatenate({problem.local})};
  problem.make_model = [make = problem.make_model, group = world.group](at::ScalarType dtype) {
    VerifyModel made = make(dtype);
    const auto loss =
        std::make_shared<SmoothAPLoss>(RankingOptions{.queue_size = 0, .temperature = kTemperature}, group);
    made.loss_terms = [logits = made.logits, loss](const Batch& batch) {
      const at::Tensor value = loss->forward(logits(batch).narrow(1, 0, 1), labels_of(batch.targets));
      return LossTerms{{.name = "smooth_ap", .sum = value, .mean = Mean::kMicroBatches, .replicated = true}};
    };
    return made;
  };
  problem.layouts[0].traffic = nullptr;  // the loss sends in the same group
  problem.loss.name = "smooth_ap";
  problem.loss.global = plain_smooth_ap;
}

void add_global(std::vector<Exhibit>& list) {
  list.push_back({.id = "B24", .plant = [](VerifyProblem& problem, World& world) {
                    rank_all_rows(problem, world);
                    with_layout<planted::Averages>(problem);
                  }});
}

}  // namespace isograd::museum
