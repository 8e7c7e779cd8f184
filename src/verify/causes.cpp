// Known mistakes of normalisation, as weights: what a micro-batch's part of the gradient is multiplied by,
// relative to the right weight, where N targets count in all, n_k on rank k, n_kj in its micro-batch j.
#include <cmath>
#include <map>

#include "verify/case.hpp"

namespace isograd {
namespace {

// Sizes along which something may be multiplied or divided, with their names.
std::map<int, std::string> axis_sizes(const Case& one) {
  std::map<int, std::string> sizes;
  int all = 1, long_axes = 0;
  const auto add = [&](int size, const std::string& name) {
    std::string& names = sizes[size];
    names += (names.empty() ? "" : " or ") + fmt::format("{} ({})", name, size);
  };
  for (const auto& [name, size] : one.found().axes) {
    all *= size;
    if (size == 1) continue;
    ++long_axes;
    add(size, name);
  }
  if (one.found().axes.empty() && one.ranks() > 1) add(one.ranks(), "the ranks");
  if (long_axes > 1) add(all, "all ranks");
  return sizes;
}

}  // namespace

std::string factors_of(const Case& one, double value) {
  std::string text;
  const auto add = [&](double size, const std::string& name) {
    if (size > 1 && std::abs(value - size) <= 1e-6 * size) text += (text.empty() ? "" : " or ") + name;
  };
  for (const auto& [size, names] : axis_sizes(one)) add(size, names);
  add(one.rounds(), fmt::format("accumulation ({})", one.rounds()));
  add(one.targets(), fmt::format("the targets of the step ({:.0f})", one.targets()));
  return text;
}

std::vector<Cause> causes_of(const Case& one) {
  using Cell = Case::Cell;
  std::vector<Cause> causes;
  for (const auto& [size, names] : axis_sizes(one)) {
    // Unless a reducer averages over every axis of a size, sizes stay what they are in all experiments.
    const double k = size;
    causes.push_back(
        {.id = "averaged_over_axis",
         .weight = [k](const Case&, const Cell&) { return 1 / k; },
         .sentence = [size = size, names = names](
                         const Case&) { return fmt::format("1/{}: averaged over {}", size, names); }});
    causes.push_back({.id = "multiplied_by_axis",
                      .weight = [k](const Case&, const Cell&) { return k; },
                      .sentence =
                          [size = size, names = names](const Case&) {
                            return fmt::format("{}: a sum over {} stands where an average was expected", size,
                                               names);
                          }});
  }
  if (one.cells().empty()) return causes;

  causes.push_back({.id = "summed_over_micro_batches",
                    .weight = [](const Case& c, const Cell&) { return c.rounds(); },
                    .sentence =
                        [](const Case& c) {
                          return fmt::format("{}: micro-batches are summed, not divided by accumulation ({})",
                                             c.rounds(), c.rounds());
                        }});
  const auto all_targets = [](const Case& c, const Cell&) { return c.targets(); };
  causes.push_back({.id = "unscaled_sum",
                    .weight = all_targets,
                    .sentence =
                        [](const Case& c) {
                          return fmt::format("{:.0f}: the targets of the step, by which nothing divides",
                                             c.targets());
                        },
                    .loss = Cause::Loss::kScaled});
  causes.push_back({.id = "gradient_scaled_by_count",
                    .weight = all_targets,
                    .sentence =
                        [](const Case& c) {
                          return fmt::format(
                              "{:.0f}: the targets of the step; the loss that is logged is right",
                              c.targets());
                        },
                    .loss = Cause::Loss::kRight});
  causes.push_back(
      {.id = "count_not_reduced",
       .weight = [](const Case& c, const Cell& cell) { return c.targets() / c.targets_of(cell.rank); },
       .sentence =
           [](const Case&) {
             return "per-token weights fit 1/n_k: each rank divides by its own count, gradients are "
                    "summed";
           }});
  causes.push_back(
      {.id = "count_not_reduced",
       .weight = [](const Case& c, const Cell&) { return c.targets() / c.targets_of(c.cells()[0].rank); },
       .sentence =
           [](const Case& c) {
             return fmt::format("N/n_{}: all ranks divide by the count of rank {} alone", c.cells()[0].rank,
                                c.cells()[0].rank);
           }});
  causes.push_back(
      {.id = "mean_of_rank_means",
       .weight = [](const Case& c,
                    const Cell& cell) { return c.targets() / (c.targets_of(cell.rank) * c.ranks()); },
       .sentence =
           [](const Case& c) {
             return fmt::format("per-token weights fit 1/n_k: mean of per-rank means over {} ranks",
                                c.ranks());
           }});
  // With one micro-batch on every rank these are means of rank means, unless an experiment can tell.
  if (one.rounds() > 1 || one.can_run()) {
    causes.push_back(
        {.id = "mean_of_micro_batch_means",
         .weight = [](const Case& c,
                      const Cell& cell) { return c.targets() / (cell.targets * c.micro_batches()); },
         .sentence =
             [](const Case& c) {
               return fmt::format(
                   "per-token weights fit 1/n_kj: mean of the means of all {} "
                   "micro-batches",
                   c.micro_batches());
             }});
    causes.push_back(
        {.id = "mean_of_micro_batch_means_by_rank",
         .weight =
             [](const Case& c, const Cell& cell) {
               return c.targets() / (cell.targets * c.micro_batches(cell.rank) * c.ranks());
             },
         .sentence =
             [](const Case&) {
               return "per-token weights fit 1/(n_kj G_k): each rank's mean of micro-batch means, "
                      "averaged over ranks";
             }});
  }
  causes.push_back(
      {.id = "accumulation_rescaled",
       .weight =
           [](const Case& c, const Cell& cell) {
             const int own = c.micro_batches(cell.rank);
             return std::pow(own, cell.micro_batch - own + 1);
           },
       .sentence =
           [](const Case&) {
             return "weights of micro-batches fall by the accumulation from each to the one before "
                    "it: every backward rescales what was accumulated";
           }});
  for (int rank = 0; rank < one.ranks(); ++rank)
    if (one.targets_of(rank) > 0 && one.ranks() > 1)
      causes.push_back(
          {.id = "missing_rank_part",
           .weight = [rank](const Case&, const Cell& cell) { return cell.rank == rank ? 0 : 1; },
           .sentence = [rank](const Case&) { return fmt::format("without the part of rank {}", rank); }});
  // Without accumulation these are the same as their counterparts over ranks.
  if (one.rounds() == 1)
    std::erase_if(causes, [](const Cause& cause) {
      return cause.id == "summed_over_micro_batches" || cause.id == "mean_of_micro_batch_means" ||
             cause.id == "mean_of_micro_batch_means_by_rank" || cause.id == "accumulation_rescaled";
    });
  return causes;
}

}  // namespace isograd
