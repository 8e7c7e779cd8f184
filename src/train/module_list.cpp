#include "train/module_list.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/refuse.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace {

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  std::string part;
  while (std::getline(stream, part, at)) parts.push_back(part);
  return parts;
}

std::string line_in_words(const std::string& line) {
  const auto words = split(line, '\t');
  return fmt::format("'{}', {} {}{}", words.at(1), words.at(2), words.at(3),
                     words.at(4) == "1" ? "" : ", frozen");
}

// "no parameter" where one rank has fewer than the other.
[[noreturn]] void refuse_module(const std::string& module, int rank, int other,
                                const std::vector<std::string>& own, const std::vector<std::string>& others) {
  std::size_t place = 0;
  while (place < own.size() && place < others.size() && own[place] == others[place]) ++place;
  const auto said = [&](const std::vector<std::string>& lines) {
    return place < lines.size() ? line_in_words(lines[place]) : std::string("no such parameter");
  };
  refuse(fmt::format("module '{}' of a pipeline", module),
         fmt::format("{} on rank {}, {} on rank {}", said(own), rank, said(others), other),
         "the same parameters on all ranks of its stage",
         "Make it from what all ranks know alike, and freeze the same parameters everywhere");
}

}  // namespace

std::vector<std::string> texts_of_all(Group& group, const std::function<std::string()>& say) {
  std::string own;
  on_every_rank(group, [&] { own = say(); });
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) texts.push_back(broadcast_text(group, own, rank));
  return texts;
}

std::vector<at::Tensor> given_tensors(const std::vector<PipelineModule>& list) {
  std::vector<at::Tensor> all;
  for (const PipelineModule& module : list)
    for (const at::Tensor& tensor : module.given)
      if (std::ranges::none_of(all, [&](const at::Tensor& known) { return known.is_same(tensor); }))
        all.push_back(tensor);
  return all;
}

std::string text_of_list(const std::vector<PipelineModule>& list, const std::vector<at::Tensor>& given) {
  std::string text;
  for (const PipelineModule& module : list) {
    text += fmt::format("'{}' of cost {}", module.name, module.cost);
    for (const at::Tensor& tensor : module.given)
      text += fmt::format(", given tensor {}", std::ranges::find_if(given, [&](const at::Tensor& known) {
                                                 return known.is_same(tensor);
                                               }) - given.begin());
    text += '\n';
  }
  return text;
}

void check_same_lists(const std::vector<std::string>& texts) {
  const auto first = split(texts.front(), '\n');
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const auto other = split(texts[rank], '\n');
    if (other == first) continue;
    std::size_t place = 0;
    while (place < first.size() && place < other.size() && first[place] == other[place]) ++place;
    const auto said = [&](const auto& lines) {
      return place < lines.size() ? lines[place] : std::string("nothing more");
    };
    refuse(fmt::format("module {} of a pipeline's list", place),
           fmt::format("{} on rank 0, {} on rank {}", said(first), said(other), rank),
           "the same list on every rank", "Make the list from what all ranks know alike");
  }
}

std::string text_of_module(std::size_t module, const KeyedTensors& parameters,
                           const std::vector<at::Tensor>& given) {
  std::string text;
  for (const auto& [name, tensor] : parameters) {
    const auto found =
        std::ranges::find_if(given, [&, of = tensor](const at::Tensor& known) { return known.is_same(of); });
    text += fmt::format("{}\t{}\t{}\t[{}]\t{}\t{}\n", module, name, c10::toString(tensor.scalar_type()),
                        fmt::join(tensor.sizes(), ", "), tensor.requires_grad() ? 1 : 0,
                        found == given.end() ? -1 : found - given.begin());
  }
  return text;
}

std::vector<ListedParameter> listed_parameters(const std::vector<std::string>& texts,
                                               const std::vector<int>& pp,
                                               const std::vector<std::string>& names) {
  std::vector<std::vector<std::string>> lines;  // by rank
  for (const std::string& text : texts) lines.push_back(split(text, '\n'));
  std::vector<ListedParameter> all;
  for (std::size_t module = 0; module < names.size(); ++module) {
    // Of the first rank that has this module; a module without parameters has no line anywhere.
    std::map<int, std::pair<std::size_t, std::vector<std::string>>> said;  // by place along pp
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      std::vector<std::string> own;
      for (const std::string& line : lines[rank])
        if (line.starts_with(fmt::format("{}\t", module))) own.push_back(line);
      const auto [first, is_new] = said.emplace(pp[rank], std::pair(rank, own));
      if (!is_new && first->second.second != own)
        refuse_module(names[module], static_cast<int>(first->second.first), static_cast<int>(rank),
                      first->second.second, own);
    }
    for (const auto& [place, rank_and_lines] : said)
      for (const std::string& line : rank_and_lines.second) {
        const auto words = split(line, '\t');
        ListedParameter one{.name = words.at(1),
                            .module = module,
                            .on = {place},
                            .shape = {},
                            .given = std::stoi(words.at(5))};
        for (const std::string& size : split(words.at(3).substr(1, words.at(3).size() - 2), ','))
          one.shape.push_back(std::stoll(size));
        const auto tied = std::ranges::find_if(
            all, [&](const ListedParameter& known) { return one.given >= 0 && known.given == one.given; });
        if (tied == all.end()) {
          all.push_back(std::move(one));
        } else if (!std::ranges::binary_search(tied->on, place)) {
          tied->on.insert(std::ranges::upper_bound(tied->on, place), place);
        }
      }
  }
  return all;
}

Layout::Named placements_of(const std::vector<ListedParameter>& parameters, const Grid& grid) {
  const bool stages = grid.has(kStageAxis) && grid.size({kStageAxis}) > 1;
  Layout::Named named;
  for (const ListedParameter& one : parameters) {
    Placement placement = placed(grid, one.shape, {}, stages ? one.on : std::vector<int>{});
    // Ends of a tied parameter on several ranks: each has a part of its gradient.
    if (stages && one.on.size() > 1) placement.summed.insert(kStageAxis);
    named.emplace_back(one.name, std::move(placement));
  }
  return named;
}

}  // namespace isograd
