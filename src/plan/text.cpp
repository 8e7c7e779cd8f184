// A plan in words, in lines of at most 100 columns.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <sstream>

#include "base/print.hpp"
#include "plan/problem.hpp"
#include "plan/trial.hpp"
#include "report/report.hpp"
#include "train/presenter.hpp"

namespace isograd::planner {

std::string bytes_text(double bytes) {
  return std::abs(bytes) < 0x1p30 ? fmt::format("{:.4g} MiB", bytes / 0x1p20)
                                  : fmt::format("{:.4g} GiB", bytes / 0x1p30);
}
std::string seconds_text(double seconds) {
  if (seconds < 0.9995) return fmt::format("{:.3g} ms", 1e3 * seconds);
  return seconds < 999.5 ? fmt::format("{:.3g} s", seconds) : fmt::format("{:.0f} s", seconds);
}

std::string unit_of(double number, const std::string& unit) {
  if (human_count(number) != "1") return unit;
  const std::string one =
      std::regex_replace(unit, std::regex("(ch)es\\b|s\\b"), "$1", std::regex_constants::format_first_only);
  return std::regex_replace(one, std::regex("that share\\b"), "that shares");
}

namespace {

constexpr std::size_t kTextColumns = 100;

// `text` behind `head`, whose width later lines are indented by.
std::string wrapped(const std::string& head, const std::string& text) {
  const std::size_t indent = characters(head);
  std::string result = head, word;
  std::size_t at = indent;
  std::istringstream words(printable(text));
  while (words >> word) {
    if (at > indent && at + 1 + characters(word) > kTextColumns) {
      result += '\n' + std::string(indent, ' ');
      at = indent;
    }
    if (at > indent) result += ' ', ++at;
    result += word, at += characters(word);
  }
  return result + '\n';
}

template <class Text>
std::string estimate_text(const Estimate& estimate, const Text& text) {
  if (estimate.low == estimate.high) return text(estimate.value);
  return fmt::format("{} ({} to {})", text(estimate.value), text(estimate.low), text(estimate.high));
}

std::string mark_of(const Planned& planned) {
  return planned.proved ? "proved by the tests" : "composes, not proved by the tests";
}

std::string layout_text(const std::string& head, const Planned& planned, double memory) {
  const std::string figures = fmt::format(
      "{} a step; {} tokens/s, MFU {:.1f} %; {} of {} a rank; {}",
      estimate_text(planned.seconds, seconds_text), human_count(planned.tokens_per_second.value),
      100 * planned.mfu, estimate_text(planned.bytes, bytes_text), bytes_text(memory), mark_of(planned));
  return wrapped(head, to_text(planned.candidate)) + wrapped(std::string(characters(head), ' '), figures);
}

template <class Text>
std::string parts_text(const std::string& title, const std::vector<Planned::Part>& parts, const Text& text) {
  std::string result = parts.empty() ? "" : "\n" + title + "\n";
  for (const Planned::Part& part : parts)
    result += wrapped(fmt::format("  {:<22} {:>10}  {:<10}  ", printable(part.name, 22),
                                  text(part.number.value), name_of(part.number.origin)),
                      part.formula);
  return result;
}

std::string model_text(const Plan& plan) {
  const ModelShape& model = plan.model;
  std::string text = fmt::format("{} parameters, {} layers of width {}", human_count(model.parameters()),
                                 model.layers, model.hidden);
  if (model.experts.count > 0)
    text += fmt::format(", {} experts, {} active parameters", model.experts.count,
                        human_count(model.active_parameters()));
  return wrapped("model    ", printable(model.name.empty() ? model.family : model.name, 60) + ": " + text);
}

std::string cluster_text(const Cluster& cluster) {
  std::vector<std::string> links;
  for (const Link& link : cluster.links)
    links.push_back(fmt::format("{} over {}: {:.4g} GB/s, {:.3g} us ({})",
                                link.name.empty() ? "link" : link.name, link.ranks, link.bandwidth / 1e9,
                                link.latency * 1e6, name_of(link.origin)));
  return wrapped("cluster  ", fmt::format("{}: {} devices in hosts of {}, {} each; {}",
                                          printable(cluster.name, 60), cluster.devices, cluster.per_host,
                                          bytes_text(cluster.device.memory), fmt::join(links, "; ")));
}

std::string work_text(const Work& work) {
  return wrapped(
      "batch    ",
      fmt::format("{:.0f} tokens, {} sequences of {}; {}{}; {}", work.tokens, work.samples(), work.sequence,
                  name_of(work.precision),
                  work.precision == Precision::kBFloat16 && work.fp32_gradients ? " with fp32 gradients" : "",
                  work.documents.empty() ? "one document a sequence"
                                         : fmt::format("packed from {} documents", work.documents.size())));
}

std::string law_text(const Law& law) {
  std::string text = fmt::format("{}: {} {}, here {}", law.name, estimate_text(law.at, human_count),
                                 unit_of(law.at.value, law.unit), human_count(law.now));
  if (!law.statement.empty()) text += "; " + law.statement;
  if (!law.moved_by.empty()) text += "; moved by " + law.moved_by;
  return wrapped(law.reached ? "* " : "  ", text);
}

std::string scaling_text(const std::vector<ScalingPoint>& points) {
  TextRows rows = {{"devices", "step", "tokens/s", "of linear", "first limit"}};
  for (const ScalingPoint& point : points)
    rows.push_back({std::to_string(point.devices), seconds_text(point.best.seconds.value),
                    human_count(point.best.tokens_per_second.value),
                    fmt::format("{:.1f} %", 100 * point.efficiency), point.law});
  return "\nScaling\n" + text_table(rows, {.indent = 2});
}

}  // namespace

std::string to_text(const Candidate& candidate) {
  std::vector<std::string> axes;
  const auto axis = [&](const char* name, std::int64_t size) {
    if (size > 1) axes.push_back(fmt::format("{} {}", name, size));
  };
  const bool sharded = candidate.strategy != Strategy::kBucketed;
  if (sharded && candidate.replicas > 1) axis("replicas", candidate.replicas);
  axis("dp", sharded ? candidate.shards : candidate.data_ranks());
  axis("cp ring", candidate.cp_ring), axis("cp ulysses", candidate.cp_ulysses);
  axis("tp", candidate.tp);
  if (candidate.pp > 1) {
    std::string stages = fmt::format("pp {}", candidate.pp);
    if (candidate.stages_per_rank > 1) stages += fmt::format(" of {} stages", candidate.stages_per_rank);
    axes.push_back(fmt::format("{} {}", stages, name_of(candidate.schedule)));
  }
  if (axes.empty()) axes.emplace_back("1 rank");
  std::string text = fmt::format("{}, {}", name_of(candidate.strategy), fmt::join(axes, " x "));
  const auto also = [&](bool has, const std::string& what) { text += has ? ", " + what : ""; };
  also(candidate.ep > 1, fmt::format("ep {}", candidate.ep));
  also(!candidate.sequence_parallel && candidate.tp > 1, "no sequence parallelism");
  also(true, fmt::format("micro-batch {} x {}", candidate.micro_batch, candidate.micro_batches));
  also(candidate.checkpoint, "checkpointed");
  also(!candidate.reshard, "blocks kept whole");
  also(candidate.reduce_once, "reduced once");
  also(candidate.share_parameters, "shared parameters");
  return text;
}

std::string to_text(const Plan& plan) {
  const double memory = plan.cluster.device.memory;
  std::string text = model_text(plan) + work_text(plan.work) + cluster_text(plan.cluster);
  text += wrapped("layouts  ", fmt::format("{} examined, {} fit", plan.candidates, plan.fitting));
  for (const std::string& warning : plan.warnings) text += wrapped("warning  ", warning);
  if (plan.top.empty()) {
    text += "\n" + wrapped("No layout fits: ", plan.missing);
    if (plan.nearest) text += "\nThe nearest\n" + layout_text("  ", *plan.nearest, memory);
  } else {
    text += "\nThe fastest, measure these (--try)\n";
  }
  for (std::size_t i = 0; i < plan.top.size(); ++i)
    text += layout_text(fmt::format("{:>2}  ", i + 1), plan.top[i], memory);
  if (const Planned* best = best_of(plan)) {
    text += parts_text("Memory of the fullest rank", best->memory_parts, bytes_text);
    text += parts_text("Time of a step", best->step_parts, seconds_text);
  }
  const auto section = [&](const char* title, const auto& entries, const auto& entry) {
    if (!entries.empty()) text += fmt::format("\n{}\n", title);
    for (const auto& one : entries) text += entry(one);
  };
  section("Why none of its neighbours", plan.neighbours,
          [](const Neighbour& one) { return wrapped("  ", one.change + ": " + one.reason); });
  section("The recipe", plan.recipe, [](const RecipeStep& step) {
    return wrapped("  ",
                   fmt::format("{}: {}{}{}{}", step.name, step.result, step.formula.empty() ? "" : " = ",
                               step.formula, step.origin.empty() ? "" : " (" + step.origin + ")"));
  });
  section("More devices than the batch has sequences for", plan.ways_out, [&](const WayOut& way) {
    return wrapped("  ", fmt::format("{}: {:.0f} tokens a batch", way.name, way.tokens)) +
           layout_text("    ", way.planned, memory);
  });
  section("Limits (* reached by this plan)", plan.laws, law_text);
  section("Not dominated in tokens/s, free memory and devices", plan.front, [](const Planned& one) {
    return wrapped(
        fmt::format("  {:>8} tokens/s {:>10} free {:>7} devices  ", human_count(one.tokens_per_second.value),
                    bytes_text(one.head_room), one.candidate.ranks),
        to_text(one.candidate));
  });
  if (!plan.scaling.empty()) text += scaling_text(plan.scaling);
  return text;
}

std::string to_text(const Trials& trials) {
  std::string text = "\nTried on this machine\n";
  const auto both = [](const Estimate& predicted, double measured, const auto& shown) {
    return fmt::format("{} predicted, {} measured ({:+.1f} %)", estimate_text(predicted, shown),
                       shown(measured), 100 * (predicted.value / measured - 1));
  };
  for (std::size_t i = 0; i < trials.layouts.size(); ++i) {
    const Tried& tried = trials.layouts[i];
    text += wrapped(fmt::format("{:>2}  ", i + 1), to_text(tried.planned.candidate));
    text +=
        wrapped("    ", tried.run ? both(tried.planned.seconds, tried.run->seconds_of_step, seconds_text) +
                                        "; " + both(tried.planned.bytes, tried.run->peak_bytes, bytes_text)
                                  : "not run: " + tried.why_not);
  }
  const LargestMicroBatch& largest = trials.largest;
  if (largest.layout.empty()) return text;
  std::vector<std::string> sizes;
  for (const auto& [size, fits] : largest.tried)
    sizes.push_back(fmt::format("{}{}", size, fits ? "" : " too large"));
  return text +
         wrapped("    ",
                 fmt::format("largest micro-batch of {}: {}{} measured, {} predicted; tried {}{}{}",
                             largest.layout, largest.ended_early.empty() ? "" : "at least ", largest.measured,
                             largest.predicted, fmt::join(sizes, ", "),
                             largest.ended_early.empty() ? "" : "; ended early: ", largest.ended_early));
}

}  // namespace isograd::planner
