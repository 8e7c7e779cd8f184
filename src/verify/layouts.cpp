#include "verify/run.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <set>
#include <sstream>

#include "base/refuse.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/expert_parallel.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/other_names.hpp"
#include "train/rules.hpp"
#include "verify/present.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_layout(const std::string& text) {
  const std::string name = text.substr(0, text.find(':'));
  std::optional<std::string> near = our_value(name);
  if (!near || !contains(strategy_names(), *near)) near = nearest(name, strategy_names());
  refuse("--layout", text,
         fmt::format("{}, or {} or {}; behind a name :replicas=N and :share=on or :share=off",
                     fmt::join(strategy_names(), ", "), kAllMeshes, kAllLayouts),
         near && *near != name ? fmt::format("Did you mean {}?", *near) : "Choose one of them");
}

using One = MeshesTried::One;

std::vector<std::int64_t> divisors(std::int64_t number) {
  std::vector<std::int64_t> all;
  for (std::int64_t n = 1; n <= number; ++n)
    if (number % n == 0) all.push_back(n);
  return all;
}

std::string name_of(const std::vector<Axis>& axes) {
  std::vector<std::string> parts;
  for (const Axis& axis : axes) parts.push_back(fmt::format("{} {}", axis.name, axis.size));
  return parts.empty() ? "one rank" : fmt::format("{}", fmt::join(parts, " x "));
}

MeshChoice choice_of(RunConfig config, int ranks) {
  MeshChoice choice;
  const Grid grid = grid_of(config, ranks);
  for (const Axis& axis : grid.axes())
    if (axis.size > 1) choice.axes.push_back(axis);
  if (config.parallel.ep > 1) choice.axes.push_back({kExpertAxis, static_cast<int>(config.parallel.ep)});
  choice.name = name_of(choice.axes);
  choice.config = std::move(config);
  return choice;
}

std::vector<RunConfig> factorizations(const RunConfig& config, int ranks) {
  const bool sharded = stage_of(config.parallel.strategy) > 0;
  const bool experts = config.model.shape.experts.count > 0 || !config.model.load.empty();
  std::vector<RunConfig> all;
  for (const auto pp : divisors(ranks))
    for (const auto tp : divisors(ranks / pp))
      for (const auto ring : divisors(ranks / pp / tp))
        for (const auto ulysses : divisors(ranks / pp / tp / ring)) {
          const std::int64_t data_ranks = ranks / pp / tp / ring / ulysses;
          for (const auto replicas : divisors(sharded ? data_ranks : 1))
            for (const auto ep : divisors(experts ? ranks / pp / tp : 1)) {
              RunConfig other = config;
              auto& parallel = other.parallel;
              parallel.pp = pp, parallel.tp = tp, parallel.cp_ring = ring, parallel.cp_ulysses = ulysses;
              parallel.replicas = replicas, parallel.ep = ep;
              if (config.parallel.pp != pp && config.parallel.pp == 1) parallel.stages_per_rank = 1;
              if (pp == 1) parallel.stages_per_rank = 1, parallel.schedule = RunConfig{}.parallel.schedule;
              all.push_back(std::move(other));
            }
        }
  return all;
}

// Why it cannot be; empty: it can. Read again, so that rules between keys are asked too.
std::string refusal_of(const RunConfig& config, int ranks, const Heads& heads) {
  const auto ulysses = static_cast<int>(config.parallel.cp_ulysses);
  if (ulysses > 1 && !splits_heads(heads, ulysses))
    return fmt::format("parallel.cp_ulysses: {} ranks for {} heads and {} key heads", ulysses, heads.first,
                       heads.second);
  try {
    RunConfig read = parse_config(to_toml(config), "the proposed mesh");
    check(read, ranks);
    return {};
  } catch (const ConfigError& error) {
    return fmt::format("{}: {}", error.text().where, error.text().found);
  }
}

// The facts that running a mesh would show, as far as others may show them too.
std::vector<std::string> shown_by(const std::vector<Axis>& axes) {
  std::vector<std::string> shown;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    shown.push_back(name_of({axes[i]}));
    for (std::size_t j = 0; j < i; ++j) shown.push_back(axes[j].name + " and " + axes[i].name);
  }
  if (axes.size() == 1) shown.push_back(axes[0].name + " alone");
  return shown;
}

// The first, then always one of those that show most of what none has shown yet.
std::set<std::size_t> covering(const std::vector<MeshChoice>& all) {
  std::set<std::size_t> chosen;
  std::set<std::string> seen;
  const auto news = [&](const MeshChoice& mesh) {
    return std::ranges::count_if(shown_by(mesh.axes), [&](const auto& one) { return !seen.contains(one); });
  };
  for (std::size_t next = 0; next < all.size();) {
    chosen.insert(next);
    for (const auto& one : shown_by(all[next].axes)) seen.insert(one);
    const auto most = std::ranges::max_element(all, {}, news);
    next = news(*most) == 0 ? all.size() : static_cast<std::size_t>(most - all.begin());
  }
  return chosen;
}

bool has_all(const One& mesh, const std::vector<std::string>& axes) {
  return std::ranges::all_of(axes, [&](const std::string& name) {
    return std::ranges::find(mesh.axes, name, &Axis::name) != mesh.axes.end();
  });
}

// Axes that failed wherever they came together, and of which each was needed: without it another mesh passed.
struct Suspect {
  std::vector<std::string> axes;
  std::vector<const One*> failed;
  std::vector<const One*> right_without;  // by axes: passed with all others of them, and not with this one
};

std::optional<Suspect> suspect(const std::vector<One>& tried, const std::vector<std::string>& axes) {
  Suspect one{.axes = axes, .failed = {}, .right_without = {}};
  for (const One& mesh : tried)
    if (has_all(mesh, axes)) {
      if (mesh.failed == 0) return std::nullopt;
      one.failed.push_back(&mesh);
    }
  if (one.failed.empty()) return std::nullopt;
  for (const std::string& axis : axes) {
    auto others = axes;
    std::erase(others, axis);
    const One* best = nullptr;  // with as few other axes as there are
    for (const One& mesh : tried)
      if (mesh.failed == 0 && has_all(mesh, others) && !has_all(mesh, {axis}) &&
          (!best || mesh.axes.size() < best->axes.size()))
        best = &mesh;
    if (!best) return std::nullopt;
    one.right_without.push_back(best);
  }
  return one;
}

std::string sentence(const Suspect& one) {
  std::vector<std::string> failed;
  for (const One* mesh : one.failed) failed.push_back(mesh->name);
  const std::string where = list_names(failed);
  if (one.axes.size() == 1)
    return fmt::format("wrong along {}: on every mesh with it ({}), right without ({})", one.axes[0], where,
                       one.right_without[0]->name);
  std::vector<std::string> right;
  for (std::size_t i = 0; i < one.axes.size(); ++i) {  // the last axis without, then the one before it
    const std::size_t without = one.axes.size() - 1 - i;
    auto others = one.axes;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(without));
    const One& mesh = *one.right_without[without];
    const bool alone = mesh.axes.size() == others.size();
    right.push_back(fmt::format("with {} {} ({})", fmt::join(others, " and "),
                                alone ? "alone" : "without " + one.axes[without], mesh.name));
  }
  return fmt::format("right {}, wrong together ({})", fmt::join(right, " and "), where);
}

std::vector<std::vector<std::string>> subsets(const std::vector<std::string>& names, std::size_t size) {
  if (size == 0) return {{}};
  std::vector<std::vector<std::string>> all;
  for (std::size_t i = 0; i + size <= names.size(); ++i)
    for (auto& rest : subsets({names.begin() + static_cast<std::ptrdiff_t>(i) + 1, names.end()}, size - 1)) {
      rest.insert(rest.begin(), names[i]);
      all.push_back(std::move(rest));
    }
  return all;
}

}  // namespace

std::string LayoutChoice::text() const {
  std::string text = strategy;
  if (replicas) text += fmt::format(":replicas={}", *replicas);
  if (share_parameters) text += *share_parameters ? ":share=on" : ":share=off";
  return text;
}

RunConfig LayoutChoice::in(RunConfig config) const {
  config.parallel.strategy = strategy;
  if (replicas) config.parallel.replicas = *replicas;
  if (stage_of(strategy) == 0) {  // what only shards have
    config.parallel.replicas = 1;
    config.parallel.cp_fsdp_mode = RunConfig{}.parallel.cp_fsdp_mode;
  }
  if (share_parameters) config.parallel.share_parameters = *share_parameters ? "on" : "off";
  return config;
}

LayoutChoice parse_layout(const std::string& text) {
  LayoutChoice choice;
  std::istringstream parts(text);
  std::getline(parts, choice.strategy, ':');
  choice.strategy = strategy_of(choice.strategy);
  if (!contains(strategy_names(), choice.strategy) || text.ends_with(':')) refuse_layout(text);
  for (std::string part; std::getline(parts, part, ':');)
    if (part == "share=on" || part == "share=off") {
      choice.share_parameters = part == "share=on";
    } else {
      if (!part.starts_with("replicas=") || stage_of(choice.strategy) == 0) refuse_layout(text);
      std::int64_t replicas = 0;
      const char* last = part.data() + part.size();
      const auto [stop, problem] = std::from_chars(part.data() + 9, last, replicas);
      if (problem != std::errc() || stop != last || replicas < 1) refuse_layout(text);
      choice.replicas = replicas;
    }
  return choice;
}

std::vector<LayoutChoice> layout_matrix(const RunConfig& config, int ranks, bool host_memory) {
  std::vector<LayoutChoice> all;
  const bool by_replica = normalises_by_replica(config);
  for (const auto& strategy : strategy_names()) {
    // Refused by that strategy.
    if (strategy == "zero3" && (!config.train.fp32_gradients || cuts_backwards(config))) continue;
    const bool sharded = stage_of(strategy) > 0, may_share = may_share_parameters(strategy);
    const int data_ranks =
        grid_of(config, ranks).size(kSampleAxes);  // ranks that share samples belong to one replica
    for (std::int64_t replicas = 1; replicas <= (sharded ? data_ranks : 1); ++replicas) {
      if (data_ranks % replicas != 0) continue;
      for (const bool share : {false, true}) {
        LayoutChoice choice{.strategy = strategy};
        if (sharded) choice.replicas = replicas;
        // One copy needs somebody to share it with.
        const RunConfig chosen = choice.in(config);
        const Grid grid = grid_of(chosen, ranks);
        if (share && (!may_share || !host_memory || grid.size(sharded_axes(chosen)) == 1)) continue;
        if (may_share || config.parallel.share_parameters == "on") choice.share_parameters = share;
        if (by_replica && grid.size({"dp_replicate"}) != grid_of(config, ranks).size({"dp_replicate"}))
          continue;
        all.push_back(std::move(choice));
      }
    }
  }
  return all;
}

std::vector<LayoutChoice> chosen_layouts(const RunConfig& config, const std::vector<std::string>& names,
                                         const World& world) {
  std::vector<LayoutChoice> choices;
  const bool host_memory = world.group.has_host_memory() && device_kind(config) == "cpu";
  for (const auto& name : names) {
    if (name == kAllMeshes) continue;
    if (name != kAllLayouts) {
      const LayoutChoice& choice = choices.emplace_back(parse_layout(name));
      check(layout_numbers(choice.in(config), world.size), {}, LayoutRule::kHalves, LayoutRule::kHalves);
      continue;
    }
    const auto all = layout_matrix(config, world.size, host_memory);
    choices.insert(choices.end(), all.begin(), all.end());
  }
  if (names.empty()) choices.push_back({.strategy = config.parallel.strategy});
  return choices;
}

bool splits_heads(const Heads& heads, int ulysses) {
  const auto possible = possible_ulysses(heads.first, heads.second);
  return std::ranges::find(possible, ulysses) != possible.end();
}

ProposedMeshes propose_meshes(const RunConfig& config, int ranks, const Heads& heads, std::size_t most) {
  ProposedMeshes proposed;
  std::vector<MeshChoice> all;
  std::set<std::string> known;
  const auto offer = [&](const RunConfig& other) {
    if (std::string why = refusal_of(other, ranks, heads); !why.empty()) {
      if (!contains(proposed.refused, why)) proposed.refused.push_back(std::move(why));
      return;
    }
    if (normalises_by_replica(config) && other.parallel.replicas != config.parallel.replicas) return;
    MeshChoice choice = choice_of(other, ranks);
    if (known.insert(choice.name).second) all.push_back(std::move(choice));
  };
  offer(config);
  for (const RunConfig& other : factorizations(config, ranks)) offer(other);
  const bool few = all.size() <= most;
  const auto chosen = few ? std::set<std::size_t>() : covering(all);
  for (std::size_t i = 0; i < all.size(); ++i)
    if (few || chosen.contains(i))
      proposed.run.push_back(std::move(all[i]));
    else
      proposed.left.push_back(all[i].name);
  return proposed;
}

MeshesTried try_meshes(const RunConfig& config, int ranks, const Heads& heads, Verdict& verdict,
                       const std::function<Verdict(const MeshChoice&)>& verify_mesh) {
  ProposedMeshes proposed = propose_meshes(config, ranks, heads);
  MeshesTried meshes;
  meshes.left = std::move(proposed.left), meshes.refused = std::move(proposed.refused);
  std::vector<std::string> ended;  // in an error, without a verdict on any layout
  for (const MeshChoice& mesh : proposed.run) {
    Verdict own;
    try {
      own = verify_mesh(mesh);
    } catch (const ConfigError& error) {  // on every rank
      meshes.refused.push_back(fmt::format("{}: {}", error.text().where, error.text().found));
      continue;
    }
    One one{.name = mesh.name, .axes = mesh.axes, .layouts = 0, .failed = 0};
    one.layouts = std::max<std::int64_t>(1, static_cast<std::int64_t>(own.layouts.size()));
    for (const LayoutVerdict& layout : own.layouts) one.failed += !layout.passed;
    if (!own.passed) one.failed = std::max<std::int64_t>(1, one.failed);
    if (!own.findings.empty())
      one.finding = fmt::format("{}: {}", own.findings[0].id, own.findings[0].sentence);
    else if (!own.passed && !own.diagnosis.empty())
      one.finding = own.diagnosis[0];
    meshes.tried.push_back(std::move(one));
    for (Finding& finding : own.findings) finding.sentence = mesh.name + ": " + finding.sentence;
    for (std::string& statement : own.diagnosis) statement = mesh.name + ": " + statement;
    if (own.layouts.empty())
      std::ranges::move(own.diagnosis, std::back_inserter(ended));
    else
      join(verdict, std::move(own));
  }
  if (!ended.empty()) {
    verdict.passed = false;
    verdict.ranks = ranks;
    std::ranges::move(ended, std::back_inserter(verdict.diagnosis));
  }
  meshes.admissible = static_cast<std::int64_t>(meshes.tried.size() + meshes.left.size());
  meshes.guilty = guilty_axes(meshes.tried);
  return meshes;
}

std::vector<std::string> guilty_axes(const std::vector<One>& tried) {
  std::vector<const One*> failed;
  std::vector<std::string> names;  // of axes, in the order of meshes
  for (const One& mesh : tried) {
    if (mesh.failed > 0) failed.push_back(&mesh);
    for (const Axis& axis : mesh.axes)
      if (!contains(names, axis.name)) names.push_back(axis.name);
  }
  if (failed.empty()) return {};
  if (failed.size() == tried.size() && tried.size() > 1)
    return {
        fmt::format("wrong on each of the {} meshes that were run: no axis tells them apart", tried.size())};
  std::vector<std::string> sentences;
  std::set<const One*> explained;
  constexpr std::size_t kMostTogether = 3;
  for (std::size_t size = 1; size <= kMostTogether && explained.size() < failed.size(); ++size) {
    std::set<const One*> now;
    for (const auto& axes : subsets(names, size)) {
      const auto one = suspect(tried, axes);
      if (!one || std::ranges::all_of(one->failed, [&](auto* mesh) { return explained.contains(mesh); }))
        continue;
      sentences.push_back(sentence(*one));
      now.insert(one->failed.begin(), one->failed.end());
    }
    explained.insert(now.begin(), now.end());
  }
  std::vector<std::string> open;
  for (const One* mesh : failed)
    if (!explained.contains(mesh)) open.push_back(mesh->name);
  if (!open.empty())
    sentences.push_back(fmt::format("wrong on {}, though no axes of it are wrong wherever they come together",
                                    list_names(open)));
  return sentences;
}

void join(Verdict& verdict, Verdict more) {
  if (verdict.layouts.empty() && verdict.seconds == 0) {
    verdict = std::move(more);
    return;
  }
  verdict.passed = verdict.passed && more.passed;
  verdict.batch_agrees = verdict.batch_agrees && more.batch_agrees;
  verdict.parameters_agree = verdict.parameters_agree && more.parameters_agree;
  verdict.documents_apart = verdict.documents_apart && more.documents_apart;
  verdict.seconds += more.seconds;
  std::ranges::move(more.layouts, std::back_inserter(verdict.layouts));
  std::ranges::move(more.findings, std::back_inserter(verdict.findings));
  std::ranges::move(more.diagnosis, std::back_inserter(verdict.diagnosis));
}

}  // namespace isograd
