// Known mistakes of normalisation where ranks accumulate: as causes.cpp has the others.
#include <cmath>

#include "verify/compared_step.hpp"

namespace isograd {
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
                 "per-{} weights fit 1/n_kj: each rank's means of micro-batches "
                 "are summed, not divided by accumulation ({}), then the ranks "
                 "averaged",
                 c.unit(), c.most_micro_batches());
           }});
  causes.push_back(
      {.id = "summed_over_micro_batches", .weight = of_cell, .sentence = [](const ComparedStep& c) {
         return fmt::format(
             "per-{} weights fit 1/n_kj: the means of all {} micro-batches "
             "of all ranks are summed",
             c.unit(), c.micro_batches());
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
                   "{} "
                   "micro-batches of the one that has most, averaged over ranks",
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
                              "1/{0}: divided by accumulation ({0}), though the count covers "
                              "the whole step",
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
