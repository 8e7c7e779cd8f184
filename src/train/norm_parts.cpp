#include "train/norm_parts.hpp"

#include <algorithm>
#include <cctype>
#include <map>

namespace isograd {
namespace {

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char letter) { return std::isdigit(letter) != 0; });
}

std::string layer_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (is_number(name.substr(begin, end - begin))) return name.substr(0, end);
    begin = end + 1;
  }
  const std::size_t last = name.rfind('.');
  return last == std::string::npos ? name : name.substr(0, last);
}

std::string part_of(const std::string& by, const std::string& name) {
  if (by == "layers") return layer_of(name);
  if (by == "groups") return name.find(".experts.") == std::string::npos ? "dense" : "experts";
  return name;
}

}  // namespace

NormParts norm_parts_of(const RunConfig& config,
                        const std::vector<std::pair<std::string, at::Tensor>>& named) {
  const std::string& by = config.train.part_norms;
  NormParts parts;
  if (by == "off") return parts;
  std::map<std::string, int> places, of_parameter;
  for (const auto& [name, tensor] : named) {
    if (!tensor.requires_grad()) continue;
    const std::string part = part_of(by, name);
    const auto [place, fresh] = places.emplace(part, static_cast<int>(parts.names.size()));
    if (fresh) parts.names.push_back(part);
    of_parameter[name] = place->second;
  }
  parts.of = [of_parameter = std::move(of_parameter)](const std::string& name) {
    const auto found = of_parameter.find(name);
    return found == of_parameter.end() ? -1 : found->second;
  };
  return parts;
}

}  // namespace isograd
