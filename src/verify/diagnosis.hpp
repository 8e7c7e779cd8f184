// From what two dumps of one step say, and from what happens when it is made again in other circumstances,
// to a name for the mistake. What fits no known mistake is called unknown and given with its numbers; nothing
// is guessed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

// Every finding: its id, which JSON, dumps and docs/museum.md show, and what it means.
// clang-format off
#define ISOGRAD_FINDINGS(FINDING) \
  FINDING(averaged_over_axis, "gradients are averaged over ranks whose parts should be summed") \
  FINDING(averaged_over_holders, \
          "gradients are averaged over the ranks that have data, whose parts should be summed") \
  FINDING(counted_on_peers, \
          "targets are counted again on ranks that see the same ones: loss and gradient are too small") \
  FINDING(multiplied_by_axis, "gradients are summed over ranks where the loss expects an average") \
  FINDING(summed_over_micro_batches, "the means of micro-batches are summed, not divided by their number") \
  FINDING(unscaled_sum, "nothing divides the loss: it grows with the batch") \
  FINDING(gradient_scaled_by_count, \
          "the loss in the log is right, the gradient is multiplied by the count") \
  FINDING(loss_scaled, "the gradient is right, the loss in the log is multiplied") \
  FINDING(loss_differs, \
          "the gradient is right, the loss in the log is another one: one rank's own, a mean of rank means") \
  FINDING(count_not_reduced, "the loss is divided by the targets of one rank instead of all") \
  FINDING(mean_of_rank_means, "each rank's mean counts the same, however much it holds") \
  FINDING(mean_of_micro_batch_means, "each micro-batch's mean counts the same, however much it holds") \
  FINDING(mean_of_micro_batch_means_by_rank, "the same within each rank, then the ranks are averaged") \
  FINDING(accumulation_rescaled, "every micro-batch rescales what was accumulated before it") \
  FINDING(averaged_over_micro_batches, \
          "the gradient is divided by the number of micro-batches, though the count covers the whole step") \
  FINDING(reduced_while_accumulating, \
          "what was accumulated is summed over ranks again with every further micro-batch") \
  FINDING(clipped_before_reduction, \
          "each rank's or micro-batch's part is clipped by itself, then they are added up") \
  FINDING(not_finite_empty_micro_batch, "a micro-batch without a target divides zero by zero") \
  FINDING(not_finite, "the gradient, or what was recorded beside it, is not finite") \
  FINDING(replicas_differ, "ranks hold different gradients for the same parameter") \
  FINDING(buffers_differ, "forward changes a buffer by each rank's own rows") \
  FINDING(not_summed_over_axis, \
          "gradients are not summed over an axis: each rank along it keeps its own part") \
  FINDING(sum_order_depends_on_rank, \
          "each rank adds the parts up in another order: replicas differ in bits") \
  FINDING(not_repeatable, "the same step made twice gives different bits") \
  FINDING(norm_counts_replicas, "elements count in the norm once for each rank that has a copy") \
  FINDING(norm_of_own_shard, "each rank takes the norm of the part it keeps") \
  FINDING(norms_averaged, "norms of parts are averaged instead of their squares summed") \
  FINDING(norm_of_largest_part, \
          "the norm is that of the largest part instead of the root of their squares' sum") \
  FINDING(norm_misses_elements, "some elements count on no rank: the norm is too small, alike everywhere") \
  FINDING(clip_not_applied, "the gradient is applied as if it had not been clipped") \
  FINDING(groups_clipped_apart, "groups of parameters are clipped by coefficients of their own") \
  FINDING(documents_leak, "a document in a pack changes what another one computes") \
  FINDING(term_scaled, "one term of the loss is multiplied, the others are right") \
  FINDING(some_parameters_scaled, \
          "some parameters' gradients are multiplied, the others are right: a tied weight counted twice, " \
          "for example") \
  FINDING(cut_parameters_scaled, \
          "the gradients of what is cut along one axis are multiplied by a size of the run, or divided by " \
          "it: that of the axis, over which the sum is whole already, of all ranks, of accumulation") \
  FINDING(scaled_by_factor, \
          "all gradients are multiplied by one factor that comes from no count: a learning rate, a loss " \
          "scale") \
  FINDING(gradient_lost, "some or all parameters get no gradient where there should be one") \
  FINDING(micro_batches_lost, "only the last (or first) micro-batch of each rank is in the gradient") \
  FINDING(missing_rank_part, "a rank's part of some gradient is not in the sum") \
  FINDING(missing_data_part, "the part of some data is not in the sum, whichever rank has them") \
  FINDING(composition, "right with each of two features alone, wrong with both") \
  FINDING(sample_twice, "some samples count more than once") \
  FINDING(other_batch, "the runs did not see the same samples") \
  FINDING(other_targets, \
          "the same samples, but other tokens carry loss: padding or the first label counted, labels not " \
          "shifted") \
  FINDING(initial_parameters_differ, "parameters differ before the first step") \
  FINDING(noise_depends_on_layout, "random numbers depend on the rank, not on the sample") \
  FINDING(resume_changes_step, "a resumed run goes on otherwise than one that was never stopped") \
  FINDING(reduced_every_micro_batch, "gradients are reduced after every micro-batch instead of once") \
  FINDING(traffic_differs, "another number of bytes was moved than the strategy needs") \
  FINDING(elements_not_owned_once, "some element has no owner, or several, in norms and checkpoints") \
  FINDING(norm_differs, "the norm is wrong in a way that fits no known mistake") \
  FINDING(shares_differ, "the recorded shares of ranks and micro-batches do not add up to the gradient") \
  FINDING(clip_differs, "the clip coefficient does not follow from the norm") \
  FINDING(optimizer_differs, "the gradient is right, the parameters after some updates are not") \
  FINDING(not_in_optimizer, "no group of an optimizer holds a parameter that is trained") \
  FINDING(not_updated, "the optimizer stepped, and a parameter that has a gradient did not move") \
  FINDING(updates_differ, \
          "the gradient is right, but ranks update otherwise: one that does not step, another learning rate") \
  FINDING(frozen_otherwise, "the run trains other parameters than the model that it was made from") \
  FINDING(reduction_not_proven, \
          "all ranks have the same samples: without a reduction the numbers are the same") \
  FINDING(random_model, "the model gives other numbers when it runs again: nothing can be compared") \
  FINDING(no_gradient, "the gradient is zero everywhere: nothing can be compared") \
  FINDING(parameters_missing, "the runs do not have the same parameters") \
  FINDING(parameters_renamed, "parameters have other names") \
  FINDING(parameters_reshaped, "parameters have other shapes") \
  FINDING(living_layout_differs, \
          "a fresh layout has the right gradient, the one of the run under way does not (--verify-every)") \
  FINDING(other_experts, \
          "tokens went to experts that the oracle did not choose, and not because rounding turned a near " \
          "tie") \
  FINDING(rounding, \
          "right but for rounding that the run's precision does not explain: sums in a coarser type") \
  FINDING(unresolved, \
          "nothing is found to be wrong, but too large a mistake would not show: no pass, and it says what " \
          "would tell") \
  FINDING(undecided, \
          "several mistakes fit, and what is there does not tell them apart: it says what would") \
  FINDING(unknown, "fits no known mistake")
// clang-format on

namespace finding_id {
#define ISOGRAD_ID(id, meaning) inline constexpr const char* id = #id;
ISOGRAD_FINDINGS(ISOGRAD_ID)
#undef ISOGRAD_ID
}  // namespace finding_id

AxisSet present(const Grid& grid, AxisSet along);  // those of `along` that the grid has

// The same step in other circumstances. All defaults: exactly the same again.
struct Experiment {
  // Targets that carry loss: as given; equally many in every micro-batch that has any; another, uneven number
  // in each.
  enum class Counts { kAsGiven, kEqual, kUneven } counts = Counts::kAsGiven;
  bool split_micro_batches = false;  // those of several fragments in two: accumulation
  bool one_micro_batch = false;      // each rank's data in one: no accumulation
  bool without_silent = false;       // micro-batches without a target left out
  int empty_rank = -1;               // this rank has no data, nor those that share its samples
  int only_rank = -1;                // the others have none
  int only_micro_batch = -1;         // and this rank has this one alone
  int swapped[2] = {-1, -1};         // these ranks have each other's data
  int only_axis = -1;                // index into StepDump::axes: all ranks along it, the others have size 1
  std::int64_t muted_document = -1;  // sample id: its targets carry no loss
  bool perturbed = false;            // and its tokens are others
  int ranks = 0;                     // 0: as many as there are
  bool without_noise = false;        // no dropout
  bool without_resume = false;       // the run went on instead of being resumed
  bool reference_only = false;       // only RunPair::expected is needed

  std::string text() const;  // "accumulation off", ...
  bool operator==(const Experiment&) const = default;
};

// The run under test, and the same step made by one process or by a trainer that is known to be right.
struct RunPair {
  StepDump found, expected;
  // The gradient of one process in the precision of `found`, for what rounding alone does; empty: not known.
  StepDump::Named alone{};
  // Both say how their targets lie on ranks and micro-batches, and it is not alike: the parts of `expected`
  // are not those of the ranks of `found`.
  bool assigned_otherwise = false;
  // By `alone`, the largest ‖g − g64‖ of further runs of that process (StepDump::rounding); empty: of none.
  std::vector<double> alone_rounding{};
  // A part that was asked for alone has the weight that it has in the whole step.
  bool of_whole = false;
};

// Makes the step again; nothing: this cannot be run.
using RunAgain = std::function<std::optional<RunPair>(const Experiment&)>;

// Empty: the pair shows the same step. The first finding names the cause; others follow where several things
// are wrong. ids are those of kDiagnoses.
// `ambiguous` receives the mistakes that this precision does not tell from the right gradient.
std::vector<Finding> diagnose(const RunPair& pair, const RunAgain& again = {},
                              std::vector<std::string>* ambiguous = nullptr);
// As above, for a pair that is compared already.
class ComparedStep;
std::vector<Finding> diagnose(ComparedStep& one, const RunAgain& again = {},
                              std::vector<std::string>* ambiguous = nullptr);

struct Diagnosis {
  const char* id;
  const char* meaning;
};
extern const std::vector<Diagnosis> kDiagnoses;

// "2", "1/3", "0.70710678": integers and their inverses up to 4096 by name, others as numbers.
std::string ratio_text(double ratio);

}  // namespace isograd
