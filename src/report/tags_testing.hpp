// Whether a page's tags are closed, for tests of what writes pages.
#pragma once

#include <string>
#include <vector>

namespace isograd {

// The tags that are open at the end, outermost first; of a page whose tags are closed in order: none.
inline std::vector<std::string> open_tags(const std::string& html) {
  std::vector<std::string> open;
  for (auto at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const std::string tag = html.substr(at + 1, html.find('>', at) - at - 1);
    const bool closes = tag.starts_with('/');
    const auto first = static_cast<std::size_t>(closes), last = tag.find_first_of(" /", first);
    const std::string name = tag.substr(first, last == std::string::npos ? last : last - first);
    if (name.empty() || name[0] == '!' || name == "meta" || name == "wbr" || tag.ends_with('/')) continue;
    if (!closes) {
      open.push_back(name);
    } else if (!open.empty() && open.back() == name) {
      open.pop_back();
    } else {
      return {"</" + name + ">"};  // closes what is not open
    }
  }
  return open;
}

}  // namespace isograd
