// The verdict as one HTML page that stands alone and explains itself. First its drawings: errors by parameter
// and layout, and how often each ratio occurs.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "base/markup.hpp"
#include "report/report.hpp"
#include "verify/diagnosis.hpp"
#include "verify/present.hpp"

namespace isograd {
namespace {

// From the unit round-off of fp64 to "nothing in common", in powers of ten.
constexpr double kLeast = -17, kMost = 0;

double logarithm(double error) {
  return error > 0 ? std::clamp(std::log10(error), kLeast, kMost) : kLeast;
}

// Blue where the bound holds, red where it does not: the darker, the larger. A colour-blind reader has the
// cross as well.
std::string colour(double error, bool passed) {
  if (!std::isfinite(error)) return "#1c1018";
  const double share = (logarithm(error) - kLeast) / (kMost - kLeast);
  return passed ? fmt::format("hsl(205 {:.0f}% {:.0f}%)", 45 + 25 * share, 92 - 42 * share)
                : fmt::format("hsl(8 {:.0f}% {:.0f}%)", 70.0, 72 - 32 * share);
}

std::string shortened(const std::string& name, std::size_t most) {
  if (name.size() <= most) return name;
  const std::size_t half = (most - 3) / 2;
  return name.substr(0, half) + "..." + name.substr(name.size() - half);
}

std::string text_at(double x, double y, const char* anchor, const std::string& text,
                    const std::string& more = {}) {
  return fmt::format("<text class=\"label\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>", x, y,
                     anchor, more, escape_html(text));
}

constexpr double kLegendWidth = 560;

std::string legend(double x, double y) {
  std::string svg = text_at(x, y + 10, "start", "error, power of ten:");
  double at = x + 132;
  for (int power = static_cast<int>(kLeast); power <= static_cast<int>(kMost); power += 2) {
    svg += fmt::format("<rect x=\"{0:.1f}\" y=\"{1:.1f}\" width=\"22\" height=\"12\" fill=\"{2}\"/>", at, y,
                       colour(std::pow(10.0, power), true));
    if ((power - static_cast<int>(kLeast)) % 4 == 0)
      svg += text_at(at + 11, y + 25, "middle", std::to_string(power));
    at += 23;
  }
  at += 26;
  for (const double power : {-8.0, -4.0, 0.0}) {
    svg += fmt::format("<rect x=\"{0:.1f}\" y=\"{1:.1f}\" width=\"22\" height=\"12\" fill=\"{2}\"/>", at, y,
                       colour(std::pow(10.0, power), false));
    svg += text_at(at + 11, y + 25, "middle", fmt::format("{:.0f}", power));
    at += 23;
  }
  return svg + text_at(at + 6, y + 10, "start", "outside the bound");
}

struct Drawing {
  std::string svg;
  double width = 0;  // pixels at which its text is legible
};

// Parameters x layouts by log10 of the error.
Drawing heat_map(const Verdict& verdict, bool exact) {
  constexpr std::size_t kMostRows = 300, kMostName = 46;
  constexpr double kRow = 16, kMostWidth = 1000;
  // By name: a layout that failed early may have none, or others.
  std::vector<std::string> names;
  std::map<std::string, double> worst;
  const auto of = [&](const ParameterVerdict& p) -> const Comparison& { return exact ? p.exact : p.rounded; };
  for (const auto& layout : verdict.layouts)
    for (const auto& parameter : layout.parameters) {
      const auto [place, fresh] = worst.try_emplace(parameter.name, 0);
      if (fresh) names.push_back(parameter.name);
      const double error = of(parameter).error;
      place->second = std::isnan(error) ? HUGE_VAL : std::max(place->second, error);
    }
  if (names.empty()) return {};
  const std::size_t all = names.size();
  if (all > kMostRows) {
    std::vector<std::string> order = names;
    std::stable_sort(order.begin(), order.end(),
                     [&](const auto& a, const auto& b) { return worst[a] > worst[b]; });
    order.resize(kMostRows);
    std::erase_if(
        names, [&](const auto& name) { return std::find(order.begin(), order.end(), name) == order.end(); });
  }
  std::map<std::string, double> top;
  for (std::size_t i = 0; i < names.size(); ++i) top[names[i]] = static_cast<double>(i) * kRow;

  std::size_t longest_name = 0;
  for (const auto& name : names) longest_name = std::max(longest_name, name.size());
  const double left = 16 + 6.6 * static_cast<double>(std::min(longest_name, kMostName));
  const auto columns = static_cast<double>(verdict.layouts.size());
  const double cell = std::min(150.0, (kMostWidth - left - 10) / columns);
  const double width = std::max(kLegendWidth, left + cell * columns + 10);
  const bool upright = cell < 110;
  std::size_t longest = 0;
  for (const auto& layout : verdict.layouts) longest = std::max(longest, layout.name.size());
  const double kLegend = all > names.size() ? 58 : 40;
  const double head = kLegend + (upright ? 14 + 6.4 * static_cast<double>(std::min(longest, kMostName)) : 26);
  const double height = head + static_cast<double>(names.size()) * kRow + 8;

  std::string svg = fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\">", width, height);
  for (const auto& name : names)
    svg += text_at(left - 8, head + top[name] + 12, "end", shortened(name, kMostName));
  for (std::size_t i = 0; i < verdict.layouts.size(); ++i) {
    const auto& layout = verdict.layouts[i];
    const double x = left + static_cast<double>(i) * cell;
    const std::string name = shortened(layout.name, kMostName);
    svg += upright ? text_at(0, 0, "start", name,
                             fmt::format(" transform=\"translate({:.1f} {:.1f}) rotate(-90)\"",
                                         x + cell / 2 + 4, head - 6))
                   : text_at(x + cell / 2, head - 8, "middle", name);
    for (const auto& parameter : layout.parameters) {
      if (!top.contains(parameter.name)) continue;
      const Comparison& comparison = of(parameter);
      const double y = head + top[parameter.name];
      svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
          "fill=\"{}\"><title>{}</title></rect>",
          x, y, std::max(1.0, cell - 1), kRow - 1, colour(comparison.error, comparison.passed),
          escape_html(fmt::format("{}, {}: error {} of {} allowed, ratio {:.9g}", parameter.name, layout.name,
                                  scientific(comparison.error), scientific(comparison.allowed),
                                  comparison.ratio)));
      if (!comparison.passed)
        svg += fmt::format(
            "<path d=\"M{:.1f} {:.1f}l7 7m0 -7l-7 7\" stroke=\"#fff\" stroke-width=\"1.4\" fill=\"none\"/>",
            x + cell / 2 - 3.5, y + kRow / 2 - 4);
    }
  }
  svg += legend(8, 2);
  if (all > names.size())
    svg += text_at(8, 48, "start", fmt::format("the {} worst of {} parameters", names.size(), all));
  return {svg + "</svg>", width};
}

// How often each ratio occurs.
std::string ratio_histogram(const Verdict& verdict) {
  constexpr double kWidth = 440, kHeight = 220, kLeft = 18, kRight = 18, kTop = 34, kBottom = 46;
  constexpr int kBars = 21;
  std::vector<double> good_ones, bad_ones;
  for (const auto& layout : verdict.layouts)
    for (const auto& parameter : layout.parameters) {
      const double ratio = shown(parameter, layout).ratio;
      if (std::isfinite(ratio)) (good(parameter, layout) ? good_ones : bad_ones).push_back(ratio);
    }
  if (good_ones.empty() && bad_ones.empty()) return {};
  double low = 1, high = 1;
  for (const auto* ones : {&good_ones, &bad_ones})
    for (const double ratio : *ones) {
      low = std::min(low, ratio);
      high = std::max(high, ratio);
    }
  // All but equal ratios: so that they do not fill one bar alone, the axis shows how far they are from 1.
  const bool near = high - low < 1e-3;
  const double margin = near ? 0 : 0.04 * (high - low);
  const double from = near ? kLeast : low - margin, to = near ? -3 : high + margin;
  const auto place = [&](double ratio) { return near ? logarithm(std::abs(ratio - 1)) : ratio; };
  std::vector<std::pair<int, int>> bars(kBars);  // within the bound, outside
  for (const auto* ones : {&good_ones, &bad_ones})
    for (const double ratio : *ones) {
      const double share = (place(ratio) - from) / (to - from);
      const int bar = std::clamp(static_cast<int>(share * kBars), 0, kBars - 1);
      ++(ones == &good_ones ? bars[static_cast<std::size_t>(bar)].first
                            : bars[static_cast<std::size_t>(bar)].second);
    }
  int most = 1;
  for (const auto& [inside, outside] : bars) most = std::max(most, inside + outside);

  const double wide = kWidth - kLeft - kRight, tall = kHeight - kTop - kBottom, base = kHeight - kBottom;
  const auto x_of = [&](double value) { return kLeft + wide * (value - from) / (to - from); };
  std::string svg = fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\">", kWidth, kHeight);
  std::vector<std::pair<int, double>> tops;  // bar, upper edge
  for (int i = 0; i < kBars; ++i) {
    const auto& [inside, outside] = bars[static_cast<std::size_t>(i)];
    double y = base;
    for (const auto& [number, fill] :
         {std::pair{inside, colour(1e-6, true)}, {outside, colour(1e-2, false)}}) {
      if (number == 0) continue;
      const double part = std::max(1.5, tall * number / most);
      y -= part;
      svg += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>",
                         kLeft + wide * i / kBars + 1, y, wide / kBars - 2, part, fill);
    }
    tops.emplace_back(i, y);
  }
  // The highest bars say their number first; one that would touch a number already there says none.
  std::stable_sort(tops.begin(), tops.end(),
                   [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<std::array<double, 3>> taken;  // left, right, base line
  for (const auto& [i, y] : tops) {
    const auto& [inside, outside] = bars[static_cast<std::size_t>(i)];
    if (inside + outside == 0) continue;
    const std::string number = std::to_string(inside + outside);
    const double x = kLeft + wide * (i + 0.5) / kBars, half = 4.4 * static_cast<double>(number.size()) + 2;
    const bool free = std::none_of(taken.begin(), taken.end(), [&](const auto& other) {
      return x - half < other[1] && x + half > other[0] && std::abs(y - 5 - other[2]) < 15;
    });
    // Nor may it lie over a higher bar next to its own.
    const bool covered = std::any_of(tops.begin(), tops.end(), [&](const auto& other) {
      const double left = kLeft + wide * other.first / kBars, right = left + wide / kBars;
      return other.first != i && other.second < y - 2 && x - half < right && x + half > left;
    });
    if (!free || covered) continue;
    taken.push_back({x - half, x + half, y - 5});
    svg += text_at(x, y - 5, "middle", number);
  }
  svg += fmt::format("<path class=\"axis\" d=\"M{0:.1f} {1:.1f}H{2:.1f}\"/>", kLeft, base, kWidth - kRight);
  if (near) {
    for (int power = static_cast<int>(kLeast) + 2; power <= -3; power += 3)
      svg += text_at(x_of(power), base + 18, "middle", fmt::format("1e{}", power));
    svg += text_at(kLeft, base + 18, "middle", "0");
    svg += text_at(kLeft + wide / 2, base + 38, "middle", "distance of the ratio from 1");
  } else {
    constexpr int kTicks = 4;
    for (int i = 0; i <= kTicks; ++i) {
      const double value = from + (to - from) * i / kTicks;
      svg += text_at(x_of(value), base + 18, "middle", fmt::format("{:.4g}", value));
    }
    svg += fmt::format("<path class=\"mark\" d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/>", x_of(1), kTop - 8, base);
    const char* anchor = x_of(1) < kWidth / 3 ? "start" : x_of(1) > kWidth * 2 / 3 ? "end" : "middle";
    svg += text_at(x_of(1), 12, anchor, "1: the same gradient");
    svg += text_at(kLeft + wide / 2, base + 38, "middle", "ratio to the gradient of one device");
  }
  return svg + "</svg>";
}

std::string recorded(double value) {
  return std::isnan(value) ? "not recorded" : fmt::format("{:.9g}", value);
}
std::string count(std::int64_t value) {
  return value == kNotRecorded ? "not recorded" : std::to_string(value);
}

bool any_claims(const Verdict& verdict, Grade LayoutVerdict::*grade) {
  for (const auto& layout : verdict.layouts)
    if ((layout.*grade).state != Grade::State::kNotClaimed) return true;
  return false;
}

// The answer to the title, for somebody who reads nothing else.
std::string answer(const Verdict& verdict, const Wording& wording) {
  if (verdict.layouts.empty() || verdict.layouts[0].parameters.empty())
    return "No answer: nothing could be compared.";
  std::int64_t all = 0, outside = 0, layouts = 0;
  for (const auto& layout : verdict.layouts) {
    layouts += !layout.passed;
    for (const auto& parameter : layout.parameters) {
      ++all;
      outside += !good(parameter, layout);
    }
  }
  if (verdict.passed)
    return fmt::format("Yes. All {} gradients compared are those of {}, as far as rounding allows.", all,
                       wording.right);
  std::string text =
      outside == 0 ? std::string("No: the gradients agree, but something else does not.")
                   : fmt::format("No. {} of {} gradients are not those of {}.", outside, all, wording.right);
  if (verdict.layouts.size() > 1 && layouts > 0)
    text += fmt::format(" {} of {} layouts are wrong.", layouts, verdict.layouts.size());
  return text;
}

// The meaning of a class of mistakes, in plain words.
std::string meaning_of(const std::string& id) {
  for (const auto& diagnosis : kDiagnoses)
    if (id == diagnosis.id) return diagnosis.meaning;
  return {};
}

void explain(Report& report, const Verdict& verdict, const Wording& wording) {
  report.prose(
      "What this page shows",
      {"A training step computes a gradient: for every number in the model, how it should change. Spread "
       "over several processes, the step must end with the gradient that one process would have computed on "
       "the whole batch. Often it does not: something is averaged twice, counted twice or left out, and "
       "training goes on, a little wrong, without an error message.",
       fmt::format(
           "Here one step was compared with {}, parameter by parameter. The ratio says by what the "
           "expected gradient would have to be multiplied to come closest to the one found: 1 is right, "
           "1/2 or 4 is a wrong scale. The error is the distance between the two in units of the "
           "expected gradient's length; what is allowed is what rounding can do. {}",
           wording.subject.empty() ? "the same step made by one process with 64-bit numbers"
                                   : wording.reference,
           verdict.passed ? "All of it lies within that."
                          : "What lies outside is marked, and named above as far as the numbers tell."),
       "In these words: a parameter is a named group of the model's numbers. A rank is one of the processes "
       "that work together; a layout is the way in which they divide the work. Targets are the tokens that "
       "the loss is about."});
}

void grades(Report& report, const Verdict& verdict) {
  ReportTable table;
  table.title = "What is claimed";
  table.columns = {"state", "layout", "claim", "outside", "bound"};
  for (const auto& layout : verdict.layouts) {
    for (const auto& [name, grade] : {std::pair{"E1 exact arithmetic", &layout.e1},
                                      {"E2 within rounding", &layout.e2},
                                      {"E3 same bits again", &layout.e3}}) {
      std::vector<std::string> said = {grade->bound};
      for (auto& line : resolution_of(*grade)) said.push_back(std::move(line));
      table.rows.push_back({state_name(grade->state), layout.name, name,
                            grade->state == Grade::State::kNotClaimed ? "-" : std::to_string(grade->failed),
                            fmt::format("{}", fmt::join(said, "; "))});
    }
    for (const auto& trajectory : layout.trajectories)
      table.rows.push_back(
          {trajectory.passed ? "pass" : "fail", layout.name, "after updates", "-", words(trajectory)});
    if (layout.bytes_moved > 0) table.rows.push_back({"-", layout.name, "traffic", "-", traffic(layout)});
  }
  table.passed = verdict.passed;
  report.table(std::move(table));
}

void steps(Report& report, const Verdict& verdict, const Wording& wording) {
  ReportTable table;
  table.title = "The step";
  table.columns = {"", "loss", "targets", "tokens", "gradient norm", "clip coefficient"};
  const auto row = [&](const std::string& name, const StepFigures& figures) {
    table.rows.push_back({name, recorded(figures.loss), count(figures.targets), count(figures.tokens),
                          recorded(figures.norm), recorded(figures.clip_coefficient)});
  };
  row(wording.reference, verdict.oracle);
  for (const auto& layout : verdict.layouts) {
    if (!wording.subject.empty()) {
      row(layout.name, layout.exact);
      continue;
    }
    row(layout.name + ", fp64", layout.exact);
    if (layout.e2.state != Grade::State::kNotClaimed)
      row(layout.name + ", " + verdict.precision, layout.rounded);
  }
  report.table(std::move(table));
}

}  // namespace

void write_verify_page(const Verdict& verdict, const Wording& wording, const std::filesystem::path& file) {
  Report report("Is this the gradient of one device?",
                wording.subject.empty()
                    ? fmt::format("{} against {}, one whole step", wording.left, wording.reference)
                    : fmt::format("{} against {}", wording.left, wording.right));
  report.verdict(verdict.passed, answer(verdict, wording));
  report.fact("targets in the step", count(verdict.oracle.targets));
  report.fact("loss", recorded(verdict.oracle.loss));
  report.fact("gradient norm", recorded(verdict.oracle.norm));
  report.fact("precision of the run", verdict.precision);
  if (!verdict.loss.empty()) report.fact("loss is a", verdict.loss);
  if (verdict.seconds > 0) report.fact("took", fmt::format("{:.1f} s", verdict.seconds));
  std::vector<std::pair<std::string, std::vector<std::string>>> findings;
  for (const auto& finding : wording.findings) {
    std::vector<std::string> lines = finding.evidence;
    if (const std::string meaning = meaning_of(finding.id); !meaning.empty())
      lines.insert(lines.begin(), fmt::format("{}: {}", finding.id, meaning));
    findings.emplace_back(finding.sentence, std::move(lines));
  }
  for (const std::string& guilty : verdict.meshes.guilty)
    findings.insert(findings.begin(), {guilty, {"by which of the meshes below went wrong"}});
  if (!findings.empty()) report.list("What is wrong, and what speaks for it", std::move(findings));
  explain(report, verdict, wording);
  if (ReportTable meshes = meshes_table(verdict); !meshes.rows.empty()) report.table(std::move(meshes));
  if (!wording.notices.empty()) report.prose("Before comparing", wording.notices);

  const char* caption =
      "One row a parameter, one column a layout. The darker, the larger the error; red with a cross lies "
      "outside the bound, black is not a finite number.";
  const auto map = [&](const std::string& title, bool exact) {
    const Drawing drawing = heat_map(verdict, exact);
    report.figure(title, caption, drawing.svg, drawing.width);
  };
  if (any_claims(verdict, &LayoutVerdict::e1)) map("Errors in exact arithmetic (fp64)", true);
  if (any_claims(verdict, &LayoutVerdict::e2))
    map(fmt::format("Errors in {}, the precision of the run", verdict.precision), false);
  report.figure("Ratios", "How many parameters have which ratio; red ones lie outside a bound.",
                ratio_histogram(verdict));

  ReportTable parameters = to_table(verdict);
  parameters.title = "Parameters, worst first";
  parameters.summary.clear();
  constexpr std::size_t kMostRows = 500;
  if (parameters.rows.size() > kMostRows) {
    parameters.summary = fmt::format("The first {} of {} rows; the JSON verdict has them all.", kMostRows,
                                     parameters.rows.size());
    parameters.rows.resize(kMostRows);
  }
  report.table(std::move(parameters));
  grades(report, verdict);
  steps(report, verdict, wording);
  report.text("In one line", parity_line(verdict, wording));
  if (!wording.command.empty()) report.text("To see it again", wording.command);
  if (!wording.configuration.empty()) report.folded("Configuration", wording.configuration);
  report.write(file);
}

}  // namespace isograd
