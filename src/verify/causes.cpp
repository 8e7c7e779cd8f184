// Known mistakes of normalisation, as weights: what a micro-batch's part of the gradient is multiplied by,
// relative to the right weight, where N targets count in all, n_k on rank k, n_kj in its micro-batch j.
#include <algorithm>
#include <cmath>

#include "verify/diagnosis.hpp"

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
bool without_axes(const ComparedStep& one) { return one.found().axes.empty() && one.ranks() > 1; }

// A weight as a product of sizes of the step, each to a power.
struct Powers {
  int N = 0;        // what counts in the step
  int n_k = 0;      // on the micro-batch's rank
  int n_kj = 0;     // in the micro-batch
  int W = 0;        // ranks
  int holders = 0;  // ranks that have targets
  int P = 0;        // ranks along the cause's axis
  int G = 0;        // micro-batches of the rank that has most
  int G_k = 0;      // of the micro-batch's rank
  int M = 0;        // of all ranks
};

Cause::Weight product(const Powers& p, const std::string& axis = {}) {
  return [p, axis](const ComparedStep& c, const Cell& cell) {
    double weight = 1;
    if (p.N) weight *= std::pow(c.targets(), p.N);
    if (p.n_k) weight *= std::pow(c.targets_of(cell.rank), p.n_k);
    if (p.n_kj) weight *= std::pow(cell.targets, p.n_kj);
    if (p.W) weight *= std::pow(c.ranks(), p.W);
    if (p.holders) weight *= std::pow(c.holders(), p.holders);
    if (p.P) weight *= std::pow(c.size_of(axis), p.P);
    if (p.G) weight *= std::pow(c.most_micro_batches(), p.G);
    if (p.G_k) weight *= std::pow(c.micro_batches(cell.rank), p.G_k);
    if (p.M) weight *= std::pow(c.micro_batches(), p.M);
    return weight;
  };
}

using Loss = Cause::Loss;

class Causes {
 public:
  explicit Causes(const ComparedStep& one) : one_(one) {
    // Names the only axis of ranks, where it is not plain data parallelism.
    const auto axes = long_axes(one);
    if (axes.size() == 1 && kSampleAxes.count(axes[0]) == 0) along_ = " along " + axes[0];
  }

  // A sentence with the sizes of the step by name.
  std::string say(const char* sentence, const std::string& axis = {}) const {
    using fmt::arg;
    return fmt::format(fmt::runtime(sentence), arg("unit", one_.unit()), arg("counted", one_.counted()),
                       arg("N", figure(one_.targets())), arg("W", one_.ranks()),
                       arg("holders", one_.holders()),
                       arg("N_over_W", one_.targets() / std::max(one_.ranks(), 1)),
                       arg("P", axis.empty() ? "" : fmt::format("{:.0f}", one_.size_of(axis))),
                       arg("axis", axis.empty() ? "" : name_of(one_, axis)), arg("along", along_),
                       arg("G", one_.most_micro_batches()), arg("M", one_.micro_batches()),
                       arg("GW", one_.most_micro_batches() * one_.ranks()));
  }
  void add(const char* id, const Powers& powers, const char* sentence, Loss loss = Loss::kAny,
           const std::string& axis = {}) {
    add(id, product(powers, axis), say(sentence, axis), axis);
    causes.back().loss = loss;
  }
  void add(const char* id, Cause::Weight weight, const char* sentence, const std::string& axis = {}) {
    add(id, std::move(weight), say(sentence, axis), axis);
  }
  void add(const char* id, Cause::Weight weight, std::string text, const std::string& axis, int rank = -1) {
    causes.push_back(
        {.id = id, .weight = std::move(weight), .sentence = std::move(text), .axis = axis, .rank = rank});
  }

  std::vector<Cause> causes;

 private:
  const ComparedStep& one_;
  std::string along_;
};

// Adds the causes that need accumulation, along `axes` among others.
void add_micro_batch_causes(const ComparedStep& one, const std::vector<std::string>& axes, Causes& causes) {
  // A mean of each micro-batch's own tokens, multiplied or divided as if it were something else.
  causes.add(finding_id::summed_over_micro_batches, {.N = 1, .n_kj = -1, .W = -1},
             "per-{unit} weights fit 1/n_kj: each rank's means of micro-batches are summed, not divided by "
             "accumulation ({G}), then the ranks averaged");
  if (one.ranks() > 1)
    causes.add(finding_id::summed_over_micro_batches, {.W = 1, .G = 1},
               "{GW}: accumulation ({G}) times the ranks ({W}), over both of which parts are summed where an "
               "average was expected");
  causes.add(finding_id::summed_over_micro_batches, {.N = 1, .n_kj = -1},
             "per-{unit} weights fit 1/n_kj: the means of all {M} micro-batches of all ranks are summed");
  if (one.micro_batches() != one.most_micro_batches() * one.ranks())
    causes.add(
        finding_id::mean_of_micro_batch_means, {.N = 1, .n_kj = -1, .W = -1, .G = -1},
        "per-{unit} weights fit 1/(n_kj G W): each micro-batch's mean, divided on every rank by the {G} "
        "micro-batches of the one that has most, averaged over ranks");
  causes.add(finding_id::count_not_reduced, {.N = 1, .n_kj = -1, .G_k = -1},
             "per-{unit} weights fit 1/(n_kj G_k): each rank has the mean of its micro-batches' means, "
             "gradients are summed over the ranks");
  // The count is reduced over the ranks, but for each micro-batch by itself.
  for (const bool summed : {false, true})
    causes.add(
        summed ? finding_id::summed_over_micro_batches : finding_id::mean_of_micro_batch_means,
        [summed](const ComparedStep& c, const Cell& cell) {
          double together = 0;
          for (const Cell& other : c.cells())
            if (other.micro_batch == cell.micro_batch) together += other.targets;
          return c.targets() / together / (summed ? 1 : c.most_micro_batches());
        },
        summed ? "the means of the {G} global micro-batches are summed"
               : "the targets are counted over the ranks for each micro-batch by itself: mean of the "
                 "means of the {G} global micro-batches");
  causes.add(finding_id::averaged_over_micro_batches, {.G = -1},
             "1/{G}: divided by accumulation ({G}), though the count covers the whole step");
  if (one.micro_batches() != one.most_micro_batches())
    causes.add(
        finding_id::averaged_over_micro_batches, {.M = -1},
        "1/{M}: divided by the number of micro-batches of all ranks ({M}), though the count covers the "
        "whole step");
  // Gradients are set to zero, or used, in mid-accumulation.
  for (const bool last : {true, false})
    for (const Powers& kept :
         {Powers{}, {.N = 1, .n_kj = -1, .W = -1, .G_k = -1}, {.N = 1, .n_kj = -1, .W = -1}})
      causes.add(
          finding_id::micro_batches_lost,
          [last, weight = product(kept)](const ComparedStep& c, const Cell& cell) {
            const bool stays = cell.micro_batch == (last ? c.micro_batches(cell.rank) - 1 : 0);
            return stays ? weight(c, cell) : 0.0;
          },
          last ? "only the last micro-batch of each rank is in it ({G} are accumulated)"
               : "only the first micro-batch of each rank is in it ({G} are accumulated)");
  // The accumulated gradient is summed over an axis again with each further micro-batch.
  const std::pair<int, const char*> ways[] = {
      {0, ""}, {-1, ", divided by it once"}, {1, ", multiplied by it once"}};
  for (const auto& axis : axes)
    for (const auto& [more, how] : ways)
      causes.add(
          finding_id::reduced_while_accumulating,
          [axis, more](const ComparedStep& c, const Cell& cell) {
            return std::pow(c.size_of(axis), c.micro_batches(cell.rank) - 1 - cell.micro_batch + more);
          },
          causes.say("weights of micro-batches are powers of {axis}", axis) + how +
              ": what was accumulated is summed over it again with every further micro-batch",
          axis);
}

// The count is reduced over the other axes, and not over one of them.
void add_partial_counts(const ComparedStep& one, Causes& causes) {
  const Grid grid = grid_of_counts(one);
  const auto axes = long_axes(one);
  if (grid.ranks() != one.ranks() || axes.size() < 2) return;
  for (const auto& axis : axes) {
    const AxisSet along = present(grid, one.axis_set(axis)), others = without(grid.names(), along);
    if (grid.size(along) < one.size_of(axis) || grid.size(others) == 1) continue;
    for (const bool averaged : {false, true})
      causes.add(
          averaged ? finding_id::mean_of_rank_means : finding_id::count_not_reduced,
          [grid, others, axis, averaged](const ComparedStep& c, const Cell& cell) {
            double counted = 0;
            for (const int rank : grid.ranks_along(others, cell.rank)) counted += c.targets_of(rank);
            return c.targets() / counted / (averaged ? c.size_of(axis) : 1);
          },
          averaged ? "per-{unit} weights fit a mean of means over {axis}"
                   : "per-{unit} weights fit a count that is not reduced over {axis}: each of its ranks "
                     "divides by the count of its own place, gradients are summed",
          axis);
  }
}

void add_count_causes(const ComparedStep& one, Causes& causes) {
  causes.add(finding_id::unscaled_sum, {.N = 1}, "{N}: the {counted} of the step, by which nothing divides",
             Loss::kScaled);
  causes.add(finding_id::gradient_scaled_by_count, {.N = 1},
             "{N}: the {counted} of the step; the loss that is logged is right", Loss::kRight);
  causes.add(finding_id::count_not_reduced, {.N = 1, .n_k = -1},
             "per-{unit} weights fit 1/n_k: each rank{along} divides by its own count, gradients are summed");
  const int first = one.cells()[0].rank;
  causes.add(
      finding_id::count_not_reduced,
      [](const ComparedStep& c, const Cell&) { return c.targets() / c.targets_of(c.cells()[0].rank); },
      fmt::format("N/n_{}: all ranks divide by the count of rank {} alone", first, first), "");
  causes.add(finding_id::mean_of_rank_means, {.N = 1, .n_k = -1, .W = -1},
             "per-{unit} weights fit 1/n_k: mean of per-rank means over {W} ranks{along}");
  add_partial_counts(one, causes);
  // With one micro-batch on every rank these are means of rank means, unless an experiment can tell.
  if (one.most_micro_batches() > 1 || one.can_run()) {
    causes.add(finding_id::mean_of_micro_batch_means, {.N = 1, .n_kj = -1, .M = -1},
               "per-{unit} weights fit 1/n_kj: mean of the means of all {M} micro-batches");
    causes.add(
        finding_id::mean_of_micro_batch_means_by_rank, {.N = 1, .n_kj = -1, .W = -1, .G_k = -1},
        "per-{unit} weights fit 1/(n_kj G_k): each rank's mean of micro-batch means, averaged over ranks");
  }
  causes.add(
      finding_id::accumulation_rescaled,
      [](const ComparedStep& c, const Cell& cell) {
        const int own = c.micro_batches(cell.rank);
        return std::pow(own, cell.micro_batch - own + 1);
      },
      "weights of micro-batches fall by the accumulation from each to the one before it: every backward "
      "rescales what was accumulated");
  if (one.ranks() > 1)
    causes.add(
        finding_id::unscaled_sum, {.N = 1, .W = -1},
        "{N_over_W:.6g}: the {counted} of the step, by which nothing divides, over the ranks ({W}), over "
        "which the sum is averaged");
}

void add_rank_causes(const ComparedStep& one, Causes& causes) {
  // Ranks that all hold the same gradient have reduced it.
  const auto& views = one.found().ranks;
  const bool reduced =
      views.size() > 1 && std::ranges::all_of(views, [](const auto& view) { return view.spread == 0; });
  for (int rank = 0; rank < one.ranks(); ++rank) {
    if (one.targets_of(rank) == 0 || one.ranks() == 1) continue;
    // One rank's part alone: as it is, times the ranks for a reducer that averages, or by its own mean.
    const auto alone = [rank](double times) {
      return [=](const ComparedStep&, const Cell& cell) { return cell.rank == rank ? times : 0.0; };
    };
    std::vector<std::pair<double, std::string>> multiples = {
        {one.ranks(), causes.say("times {W}, as for a reducer that averages")},
        {one.targets() / one.targets_of(rank), causes.say("as a mean over its own {counted}")}};
    if (one.ranks() > 2) multiples.insert(multiples.begin(), {1, "as it is before the sum"});
    // Without sample ids every rank may as well have had this one's data.
    const bool ids = !one.found().samples.empty() && !one.expected().samples.empty();
    if (reduced) multiples.clear();
    for (const auto& [times, how] : multiples) {
      if (!ids && times != 1)
        causes.add(finding_id::other_batch, alone(times),
                   fmt::format("every rank had the data of rank {}", rank), "");
      causes.add(finding_id::not_summed_over_axis, alone(times),
                 fmt::format("the part of rank {} alone, {}: not reduced over the ranks", rank, how), "");
    }
    causes.add(
        finding_id::missing_rank_part,
        [rank](const ComparedStep&, const Cell& cell) { return cell.rank == rank ? 0 : 1; },
        fmt::format("without the part of rank {}", rank), "", rank);
    if (one.can_run())
      causes.add(
          finding_id::missing_data_part,
          [rank](const ComparedStep& c, const Cell& cell) { return c.home_of(cell.rank) == rank ? 0 : 1; },
          fmt::format("without the data that rank {} has, whichever rank has them", rank), "", rank);
  }
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
  Causes causes(one);
  const Grid grid = grid_of_counts(one);
  if (one.cells().empty() || grid.ranks() != one.ranks()) return {};
  // Weights of what each rank has before a reduction that sums, or that averages.
  const std::pair<Powers, bool> ways[] = {
      {{}, false}, {{.P = 1}, true}, {{.N = 1, .n_k = -1}, true}, {{.N = 1, .n_kj = -1, .G_k = -1}, true}};
  for (const auto& axis : long_axes(one)) {
    const AxisSet along = present(grid, one.axis_set(axis));
    if (grid.size(along) < one.size_of(axis)) continue;
    const auto first = grid.ranks_along(without(grid.names(), along), 0);  // ascending
    // The micro-batches of which rank 0 has its own place's part alone: the last ones of them, or the first.
    const int most = one.most_micro_batches();
    for (const auto& [powers, averaged] : ways)
      for (int reduced = 0; reduced < most; ++reduced)
        for (const bool last : {true, false}) {
          const auto kept = [=](int j) { return last ? j >= reduced : j < most - reduced; };
          if (reduced == 0 && !last) continue;  // all of them: the same
          const std::string which = last ? fmt::format("from micro-batch {} on", reduced)
                                         : fmt::format("up to micro-batch {}", most - reduced - 1);
          causes.add(
              reduced == 0 ? finding_id::not_summed_over_axis : finding_id::micro_batches_not_reduced,
              [=, before = product(powers, axis)](const ComparedStep& c, const Cell& cell) {
                const double weight = before(c, cell);
                if (!kept(cell.micro_batch)) return weight / (averaged ? c.size_of(axis) : 1);
                return std::binary_search(first.begin(), first.end(), cell.rank) ? weight : 0;
              },
              causes.say("not summed over {axis}", axis) +
                  (reduced == 0 ? "" : " " + which + ": no backward outside no_sync() came after these"),
              axis);
        }
  }
  return std::move(causes.causes);
}

std::vector<Cause> causes_of(const ComparedStep& one) {
  Causes causes(one);
  auto axes = long_axes(one);
  if (without_axes(one)) axes = {kAllRanks};
  for (const auto& axis : axes) {
    causes.add(finding_id::averaged_over_axis, {.P = -1}, "1/{P}: averaged over {axis}", Loss::kNotScaled,
               axis);
    // Ranks that see other samples count other targets.
    const AxisSet along = one.axis_set(axis);
    const bool peers = along.empty() || std::ranges::any_of(along, [](const std::string& name) {
                         return kSampleAxes.count(name) == 0;
                       });
    if (peers || !std::isnan(one.found().figures.loss))
      causes.add(finding_id::counted_on_peers, {.P = -1},
                 "1/{P}: so is the loss; targets are counted on every rank of {axis}", Loss::kScaled, axis);
    causes.add(finding_id::multiplied_by_axis, {.P = 1},
               "{P}: a sum over {axis} stands where an average was expected", Loss::kAny, axis);
  }
  for (const auto& [name, value] : one.found().scales)
    causes.add(
        finding_id::scaled_by_factor, [value](const ComparedStep&, const Cell&) { return value; },
        fmt::format("{:.6g}: {}", value, name), "");
  if (one.cells().empty()) return std::move(causes.causes);
  // Where every rank has data these are averages over all; where some has none, the loss may be averaged too.
  const bool idle = one.holders() < one.ranks();
  if (one.holders() > 1 && (one.can_run() || idle))
    causes.add(finding_id::averaged_over_holders, {.holders = -1},
               "1/{holders}: averaged over the ranks that have data ({holders} of {W})",
               idle ? Loss::kAny : Loss::kNotScaled);
  causes.add(finding_id::summed_over_micro_batches, {.G = 1},
             "{G}: micro-batches are summed, not divided by accumulation ({G})");
  if (one.most_micro_batches() > 1) add_micro_batch_causes(one, axes, causes);
  add_count_causes(one, causes);
  add_rank_causes(one, causes);
  const auto leave_out = [&](std::initializer_list<std::string> ids) {
    std::erase_if(causes.causes, [&](const Cause& cause) { return std::ranges::count(ids, cause.id) > 0; });
  };
  // Where one rank, with its peers, has all the data no count can stay on a rank.
  if (grid_of_counts(one).ranks() == 1 && one.grid().ranks() > 1)
    leave_out({finding_id::count_not_reduced, finding_id::mean_of_rank_means,
               finding_id::mean_of_micro_batch_means_by_rank});
  // Without accumulation these are the same as their counterparts over ranks.
  if (one.most_micro_batches() == 1)
    leave_out({finding_id::summed_over_micro_batches, finding_id::mean_of_micro_batch_means,
               finding_id::mean_of_micro_batch_means_by_rank, finding_id::accumulation_rescaled});
  return std::move(causes.causes);
}

}  // namespace isograd
