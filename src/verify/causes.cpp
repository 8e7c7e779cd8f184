// Known mistakes of normalisation, as weights: what a micro-batch's part of the gradient is multiplied by,
// relative to the right weight, where N targets count in all, n_k on rank k, n_kj in its micro-batch j.
#include <algorithm>
#include <cmath>

#include "verify/compared_step.hpp"

namespace isograd {
namespace {

using Cell = ComparedStep::Cell;

// The ranks that cells name: those along the axes of data where others see the same.
Grid grid_of_counts(const ComparedStep& one) {
  if (one.grid().ranks() == one.ranks()) return one.grid();
  std::vector<Axis> axes = one.grid().axes();
  std::erase_if(axes, [](const Axis& axis) { return kDataAxes.count(axis.name) == 0; });
  return Grid(axes);
}
std::string figure(double value) {
  return value == std::round(value) ? fmt::format("{:.0f}", value) : fmt::format("{:.6g}", value);
}
bool without_axes(const ComparedStep& one) {
  return one.found().axes.empty() && one.ranks() > 1;
}

}  // namespace

std::vector<std::string> long_axes(const ComparedStep& one) {
  std::vector<std::string> names;
  std::size_t context = 0;
  for (const auto& [name, size] : one.grid().axes()) {
    if (size == 1) continue;
    names.push_back(name);
    context += kContextAxes.count(name);
  }
  const bool several = names.size() > 1;
  if (context > 1) names.push_back(kContextRanks);
  if (several && one.size_of(kAllRanks) != (context > 1 ? one.size_of(kContextRanks) : 0))
    names.push_back(kAllRanks);
  return names;
}

std::string name_of(const ComparedStep& one, const std::string& axis) {
  return fmt::format("{} ({:.0f})", without_axes(one) ? "the ranks" : axis, one.size_of(axis));
}

std::string factors_of(const ComparedStep& one, double value) {
  std::string text;
  const auto add = [&](double size, const std::string& name) {
    if (size > 1 && std::abs(value - size) <= 1e-6 * size) text += (text.empty() ? "" : " or ") + name;
  };
  for (const auto& axis : long_axes(one)) add(one.size_of(axis), name_of(one, axis));
  if (without_axes(one)) add(one.ranks(), name_of(one, kAllRanks));
  add(one.most_micro_batches(), fmt::format("accumulation ({})", one.most_micro_batches()));
  add(one.targets(), fmt::format("the {} of the step ({})", one.counted(), figure(one.targets())));
  return text;
}

std::vector<Cause> unsummed_causes(const ComparedStep& one) {
  std::vector<Cause> causes;
  const Grid grid = grid_of_counts(one);
  if (one.cells().empty() || grid.ranks() != one.ranks()) return causes;
  for (const auto& axis : long_axes(one)) {
    const AxisSet along = present(grid, one.axis_set(axis));
    if (grid.size(along) < one.size_of(axis)) continue;
    // Ascending.
    const auto first = grid.ranks_along(without(grid.names(), along), 0);
    causes.push_back(
        {.id = "not_summed_over_axis",
         .weight =
             [first](const ComparedStep&, const Cell& cell) {
               return std::binary_search(first.begin(), first.end(), cell.rank) ? 1 : 0;
             },
         .sentence = [axis](const ComparedStep& c) { return "not summed over " + name_of(c, axis); },
         .axis = axis});
  }
  return causes;
}

namespace {

void add_axis_causes(const std::vector<std::string>& axes, std::vector<Cause>& causes) {
  for (const auto& axis : axes) {
    const auto divided = [axis](const ComparedStep& c, const Cell&) { return 1 / c.size_of(axis); };
    const auto says = [axis](const std::string& before, const std::string& what) {
      return [=](const ComparedStep& c) {
        return fmt::format("{}{:.0f}: {}{}", before, c.size_of(axis), what, name_of(c, axis));
      };
    };
    causes.push_back({.id = "averaged_over_axis",
                      .weight = divided,
                      .sentence = says("1/", "averaged over "),
                      .loss = Cause::Loss::kNotScaled,
                      .axis = axis});
    causes.push_back({.id = "counted_on_peers",
                      .weight = divided,
                      .sentence = says("1/", "so is the loss; targets are counted on every rank of "),
                      .loss = Cause::Loss::kScaled,
                      .axis = axis});
    causes.push_back({.id = "multiplied_by_axis",
                      .weight = [axis](const ComparedStep& c, const Cell&) { return c.size_of(axis); },
                      .sentence =
                          [axis](const ComparedStep& c) {
                            return fmt::format("{:.0f}: a sum over {} stands where an average was expected",
                                               c.size_of(axis), name_of(c, axis));
                          },
                      .axis = axis});
  }
}

// Of the only axis of ranks, where it is not plain data parallelism.
std::string along_only_axis(const ComparedStep& one) {
  const auto axes = long_axes(one);
  return axes.size() == 1 && kSampleAxes.count(axes[0]) == 0 ? " along " + axes[0] : "";
}

// The count is reduced over the other axes, and not over one of them.
void add_partial_counts(const ComparedStep& one, std::vector<Cause>& causes) {
  const Grid grid = grid_of_counts(one);
  const auto axes = long_axes(one);
  if (one.cells().empty() || grid.ranks() != one.ranks() || axes.size() < 2) return;
  for (const auto& axis : axes) {
    const AxisSet along = present(grid, one.axis_set(axis)), others = without(grid.names(), along);
    if (grid.size(along) < one.size_of(axis) || grid.size(others) == 1) continue;
    const auto relative = [grid, others](const ComparedStep& c, const Cell& cell) {
      double counted = 0;
      for (const int rank : grid.ranks_along(others, cell.rank)) counted += c.targets_of(rank);
      return c.targets() / counted;
    };
    causes.push_back({.id = "count_not_reduced",
                      .weight = relative,
                      .sentence =
                          [axis](const ComparedStep& c) {
                            return fmt::format(
                                "per-{} weights fit a count that is not reduced over {}: each of its ranks "
                                "divides by the count of its own place, gradients are summed",
                                c.unit(), name_of(c, axis));
                          },
                      .axis = axis});
    causes.push_back(
        {.id = "mean_of_rank_means",
         .weight = [relative, axis](const ComparedStep& c,
                                    const Cell& cell) { return relative(c, cell) / c.size_of(axis); },
         .sentence =
             [axis](const ComparedStep& c) {
               return fmt::format("per-{} weights fit a mean of means over {}", c.unit(), name_of(c, axis));
             },
         .axis = axis});
  }
}

void add_count_causes(const ComparedStep& one, std::vector<Cause>& causes) {
  const auto all_targets = [](const ComparedStep& c, const Cell&) { return c.targets(); };
  causes.push_back({.id = "unscaled_sum",
                    .weight = all_targets,
                    .sentence =
                        [](const ComparedStep& c) {
                          return fmt::format("{}: the {} of the step, by which nothing divides",
                                             figure(c.targets()), c.counted());
                        },
                    .loss = Cause::Loss::kScaled});
  causes.push_back({.id = "gradient_scaled_by_count",
                    .weight = all_targets,
                    .sentence =
                        [](const ComparedStep& c) {
                          return fmt::format("{}: the {} of the step; the loss that is logged is right",
                                             figure(c.targets()), c.counted());
                        },
                    .loss = Cause::Loss::kRight});
  causes.push_back(
      {.id = "count_not_reduced",
       .weight = [](const ComparedStep& c,
                    const Cell& cell) { return c.targets() / c.targets_of(cell.rank); },
       .sentence =
           [](const ComparedStep& c) {
             return fmt::format(
                 "per-{} weights fit 1/n_k: each rank{} divides by its own count, gradients are summed",
                 c.unit(), along_only_axis(c));
           }});
  causes.push_back({.id = "count_not_reduced",
                    .weight = [](const ComparedStep& c,
                                 const Cell&) { return c.targets() / c.targets_of(c.cells()[0].rank); },
                    .sentence =
                        [](const ComparedStep& c) {
                          return fmt::format("N/n_{}: all ranks divide by the count of rank {} alone",
                                             c.cells()[0].rank, c.cells()[0].rank);
                        }});
  causes.push_back(
      {.id = "mean_of_rank_means",
       .weight = [](const ComparedStep& c,
                    const Cell& cell) { return c.targets() / (c.targets_of(cell.rank) * c.ranks()); },
       .sentence =
           [](const ComparedStep& c) {
             return fmt::format("per-{} weights fit 1/n_k: mean of per-rank means over {} ranks{}", c.unit(),
                                c.ranks(), along_only_axis(c));
           }});
  add_partial_counts(one, causes);
  // With one micro-batch on every rank these are means of rank means, unless an experiment can tell.
  if (one.most_micro_batches() > 1 || one.can_run()) {
    causes.push_back(
        {.id = "mean_of_micro_batch_means",
         .weight = [](const ComparedStep& c,
                      const Cell& cell) { return c.targets() / (cell.targets * c.micro_batches()); },
         .sentence =
             [](const ComparedStep& c) {
               return fmt::format("per-{} weights fit 1/n_kj: mean of the means of all {} micro-batches",
                                  c.unit(), c.micro_batches());
             }});
    causes.push_back({.id = "mean_of_micro_batch_means_by_rank",
                      .weight =
                          [](const ComparedStep& c, const Cell& cell) {
                            return c.targets() / (cell.targets * c.micro_batches(cell.rank) * c.ranks());
                          },
                      .sentence =
                          [](const ComparedStep& c) {
                            return fmt::format(
                                "per-{} weights fit 1/(n_kj G_k): each rank's mean of micro-batch means, "
                                "averaged over ranks",
                                c.unit());
                          }});
  }
  causes.push_back(
      {.id = "accumulation_rescaled",
       .weight =
           [](const ComparedStep& c, const Cell& cell) {
             const int own = c.micro_batches(cell.rank);
             return std::pow(own, cell.micro_batch - own + 1);
           },
       .sentence =
           [](const ComparedStep&) {
             return "weights of micro-batches fall by the accumulation from each to the one before "
                    "it: every backward rescales what was accumulated";
           }});
  if (one.ranks() > 1)
    causes.push_back({.id = "unscaled_sum",
                      .weight = [](const ComparedStep& c, const Cell&) { return c.targets() / c.ranks(); },
                      .sentence =
                          [](const ComparedStep& c) {
                            return fmt::format(
                                "{:.6g}: the {} of the step, by which nothing divides, over the "
                                "ranks ({}), over which the sum is averaged",
                                c.targets() / c.ranks(), c.counted(), c.ranks());
                          }});
}

void add_rank_causes(const ComparedStep& one, std::vector<Cause>& causes) {
  // Ranks that all hold the same gradient have reduced it.
  const auto& views = one.found().ranks;
  const bool reduced = views.size() > 1 && std::all_of(views.begin(), views.end(),
                                                       [](const auto& view) { return view.spread == 0; });
  for (int rank = 0; rank < one.ranks(); ++rank) {
    if (one.targets_of(rank) == 0 || one.ranks() == 1) continue;
    // Alone what one rank has, as it is before a reduction: multiplied by the ranks for a reducer that
    // averages, or by its own mean.
    const auto alone = [rank](double times) {
      return [=](const ComparedStep&, const Cell& cell) { return cell.rank == rank ? times : 0.0; };
    };
    const auto ranks = static_cast<double>(one.ranks());
    std::vector<std::pair<double, std::string>> multiples = {
        {ranks, fmt::format("times {}, as for a reducer that averages", one.ranks())},
        {one.targets() / one.targets_of(rank), "as a mean over its own " + one.counted()}};
    if (one.ranks() > 2) multiples.insert(multiples.begin(), {1, "as it is before the sum"});
    // Without sample ids every rank may as well have had this one's data.
    const bool ids = !one.found().samples.empty() && !one.expected().samples.empty();
    if (reduced) multiples.clear();
    for (const auto& [times, how] : multiples) {
      if (!ids && times != 1)
        causes.push_back(
            {.id = "other_batch", .weight = alone(times), .sentence = [rank](const ComparedStep&) {
               return fmt::format("every rank had the data of rank {}", rank);
             }});
      causes.push_back({.id = "not_summed_over_axis",
                        .weight = alone(times),
                        .sentence = [rank, how](const ComparedStep&) {
                          return fmt::format("the part of rank {} alone, {}: not reduced over the ranks",
                                             rank, how);
                        }});
    }
    causes.push_back(
        {.id = "missing_rank_part",
         .weight = [rank](const ComparedStep&, const Cell& cell) { return cell.rank == rank ? 0 : 1; },
         .sentence = [rank](const ComparedStep&) { return fmt::format("without the part of rank {}", rank); },
         .rank = rank});
    if (one.can_run())
      causes.push_back({.id = "missing_data_part",
                        .weight = [rank](const ComparedStep& c,
                                         const Cell& cell) { return c.home_of(cell.rank) == rank ? 0 : 1; },
                        .sentence =
                            [rank](const ComparedStep&) {
                              return fmt::format("without the data that rank {} has, whichever rank has them",
                                                 rank);
                            },
                        .rank = rank});
  }
}

}  // namespace

std::vector<Cause> causes_of(const ComparedStep& one) {
  std::vector<Cause> causes;
  auto axes = long_axes(one);
  if (without_axes(one)) axes = {kAllRanks};
  add_axis_causes(axes, causes);
  for (const auto& [name, value] : one.found().scales)
    causes.push_back(
        {.id = "scaled_by_factor",
         .weight = [value](const ComparedStep&, const Cell&) { return value; },
         .sentence = [name, value](const ComparedStep&) { return fmt::format("{:.6g}: {}", value, name); }});
  if (one.cells().empty()) return causes;
  // As long as every rank has data these are averages over all; emptying a rank tells.
  if (one.holders() > 1 && (one.can_run() || one.holders() < one.ranks()))
    causes.push_back({.id = "averaged_over_holders",
                      .weight = [](const ComparedStep& c, const Cell&) { return 1.0 / c.holders(); },
                      .sentence =
                          [](const ComparedStep& c) {
                            return fmt::format("1/{}: averaged over the ranks that have data ({} of {})",
                                               c.holders(), c.holders(), c.ranks());
                          },
                      // Where some rank has none, the loss that is logged may be averaged likewise.
                      .loss = one.holders() < one.ranks() ? Cause::Loss::kAny : Cause::Loss::kNotScaled});

  causes.push_back({.id = "summed_over_micro_batches",
                    .weight = [](const ComparedStep& c, const Cell&) { return c.most_micro_batches(); },
                    .sentence =
                        [](const ComparedStep& c) {
                          return fmt::format("{}: micro-batches are summed, not divided by accumulation ({})",
                                             c.most_micro_batches(), c.most_micro_batches());
                        }});
  if (one.most_micro_batches() > 1) add_micro_batch_causes(one, axes, causes);
  add_count_causes(one, causes);
  add_rank_causes(one, causes);
  // Where one rank, with its peers, has all the data no count can stay on a rank.
  if (grid_of_counts(one).ranks() == 1 && one.grid().ranks() > 1)
    std::erase_if(causes, [](const Cause& cause) {
      return cause.id == "count_not_reduced" || cause.id == "mean_of_rank_means" ||
             cause.id == "mean_of_micro_batch_means_by_rank";
    });
  // Without accumulation these are the same as their counterparts over ranks.
  if (one.most_micro_batches() == 1)
    std::erase_if(causes, [](const Cause& cause) {
      return cause.id == "summed_over_micro_batches" || cause.id == "mean_of_micro_batch_means" ||
             cause.id == "mean_of_micro_batch_means_by_rank" || cause.id == "accumulation_rescaled";
    });
  return causes;
}

// Known mistakes of normalisation where ranks accumulate: as causes.cpp has the others.

namespace {
using Cell = ComparedStep::Cell;
}

void add_micro_batch_causes(const ComparedStep& one, const std::vector<std::string>& axes,
                            std::vector<Cause>& causes) {
  // A mean of each micro-batch's own tokens, multiplied or divided as if it were something else.
  const auto of_cell = [](const ComparedStep& c, const Cell& cell) { return c.targets() / cell.targets; };
  const auto micro_batches_of = [](const ComparedStep& c, const Cell& cell) {
    return static_cast<double>(c.micro_batches(cell.rank));
  };
  causes.push_back(
      {.id = "summed_over_micro_batches",
       .weight = [=](const ComparedStep& c, const Cell& cell) { return of_cell(c, cell) / c.ranks(); },
       .sentence =
           [](const ComparedStep& c) {
             return fmt::format(
                 "per-{} weights fit 1/n_kj: each rank's means of micro-batches are summed, not divided by "
                 "accumulation ({}), then the ranks averaged",
                 c.unit(), c.most_micro_batches());
           }});
  causes.push_back(
      {.id = "summed_over_micro_batches", .weight = of_cell, .sentence = [](const ComparedStep& c) {
         return fmt::format(
             "per-{} weights fit 1/n_kj: the means of all {} micro-batches of all ranks are summed", c.unit(),
             c.micro_batches());
       }});
  if (one.micro_batches() != one.most_micro_batches() * one.ranks())
    causes.push_back(
        {.id = "mean_of_micro_batch_means",
         .weight = [=](const ComparedStep& c,
                       const Cell& cell) { return of_cell(c, cell) / c.ranks() / c.most_micro_batches(); },
         .sentence =
             [](const ComparedStep& c) {
               return fmt::format(
                   "per-{} weights fit 1/(n_kj G W): each micro-batch's mean, divided on every rank by the "
                   "{} micro-batches of the one that has most, averaged over ranks",
                   c.unit(), c.most_micro_batches());
             }});
  causes.push_back({.id = "count_not_reduced",
                    .weight = [=](const ComparedStep& c,
                                  const Cell& cell) { return of_cell(c, cell) / micro_batches_of(c, cell); },
                    .sentence =
                        [](const ComparedStep& c) {
                          return fmt::format(
                              "per-{} weights fit 1/(n_kj G_k): each rank has the mean of its "
                              "micro-batches' means, gradients are summed over the ranks",
                              c.unit());
                        }});
  // The count is reduced over the ranks, but for each micro-batch by itself.
  const auto of_global_micro_batch = [](const ComparedStep& c, const Cell& cell) {
    double together = 0;
    for (const Cell& other : c.cells())
      if (other.micro_batch == cell.micro_batch) together += other.targets;
    return c.targets() / together;
  };
  causes.push_back(
      {.id = "mean_of_micro_batch_means",
       .weight = [=](const ComparedStep& c,
                     const Cell& cell) { return of_global_micro_batch(c, cell) / c.most_micro_batches(); },
       .sentence =
           [](const ComparedStep& c) {
             return fmt::format(
                 "the targets are counted over the ranks for each micro-batch by "
                 "itself: mean of the means of the {} global micro-batches",
                 c.most_micro_batches());
           }});
  causes.push_back({.id = "summed_over_micro_batches",
                    .weight = of_global_micro_batch,
                    .sentence = [](const ComparedStep& c) {
                      return fmt::format("the means of the {} global micro-batches are summed",
                                         c.most_micro_batches());
                    }});
  causes.push_back({.id = "averaged_over_micro_batches",
                    .weight = [](const ComparedStep& c, const Cell&) { return 1.0 / c.most_micro_batches(); },
                    .sentence =
                        [](const ComparedStep& c) {
                          return fmt::format(
                              "1/{0}: divided by accumulation ({0}), though the count covers the whole step",
                              c.most_micro_batches());
                        }});
  if (one.micro_batches() != one.most_micro_batches())
    causes.push_back({.id = "averaged_over_micro_batches",
                      .weight = [](const ComparedStep& c, const Cell&) { return 1.0 / c.micro_batches(); },
                      .sentence =
                          [](const ComparedStep& c) {
                            return fmt::format(
                                "1/{0}: divided by the number of micro-batches of all ranks "
                                "({0}), though the count covers the whole step",
                                c.micro_batches());
                          }});
  // Gradients are set to zero, or used, in mid-accumulation.
  for (const bool last : {true, false})
    for (int kind = 0; kind < 3; ++kind)
      causes.push_back({.id = "micro_batches_lost",
                        .weight =
                            [=](const ComparedStep& c, const Cell& cell) {
                              const int own = c.micro_batches(cell.rank);
                              if (cell.micro_batch != (last ? own - 1 : 0)) return 0.0;
                              return kind == 0 ? 1.0 : of_cell(c, cell) / c.ranks() / (kind == 1 ? own : 1);
                            },
                        .sentence =
                            [=](const ComparedStep& c) {
                              return fmt::format(
                                  "only the {} micro-batch of each rank is in it ({} are accumulated)",
                                  last ? "last" : "first", c.most_micro_batches());
                            }});
  // What has been accumulated is summed over an axis again with each further micro-batch.
  for (const auto& axis : axes)
    for (const bool averaged : {false, true})
      causes.push_back({.id = "reduced_while_accumulating",
                        .weight =
                            [=](const ComparedStep& c, const Cell& cell) {
                              const double power = std::pow(
                                  c.size_of(axis), c.micro_batches(cell.rank) - 1 - cell.micro_batch);
                              return averaged ? power / c.size_of(axis) : power;
                            },
                        .sentence =
                            [=](const ComparedStep& c) {
                              return fmt::format(
                                  "weights of micro-batches are powers of {}{}: what was accumulated is "
                                  "summed over it again with every further micro-batch",
                                  name_of(c, axis), averaged ? ", divided by it once" : "");
                            },
                        .axis = axis});
}

}  // namespace isograd
