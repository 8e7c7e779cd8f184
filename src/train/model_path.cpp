#include "train/model_path.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace fs = std::filesystem;

std::optional<std::string> hub_id(const std::string& text) {
  std::string_view id = text;
  bool address = false;
  for (const std::string_view begin : {"https://huggingface.co/", "https://hf.co/", "hf://"})
    if (id.starts_with(begin)) id.remove_prefix(begin.size()), address = true;
  while (!id.empty() && id.back() == '/') id.remove_suffix(1);
  const auto slash = id.find('/');
  const auto names = [](std::string_view part) {
    const auto may_be_in = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
    };
    return !part.empty() && part.front() != '.' && std::all_of(part.begin(), part.end(), may_be_in);
  };
  if (slash == std::string_view::npos || !names(id.substr(0, slash)) || !names(id.substr(slash + 1)))
    return std::nullopt;
  std::error_code error;
  if (!address && fs::exists(fs::path(id.substr(0, slash)), error))
    return std::nullopt;  // a path that is wrong
  return std::string(id);
}

void require_model_folder(const std::string& text, const std::string& where) {
  std::error_code error;
  if (fs::is_directory(text, error)) return;
  if (const auto id = hub_id(text)) {
    const std::string folder = "models/" + id->substr(id->find('/') + 1);
    refuse(
        where, fmt::format("\"{}\", no such folder", text),
        "a folder of a run, or with config.json and weights",
        fmt::format("Correct the path; if it is the name of a model on the Hugging Face Hub, fetch it with "
                    "`hf download {} --local-dir {}` and name {}",
                    *id, folder, folder));
  }
  refuse(where,
         fmt::format("\"{}\", {}", text, fs::exists(text, error) ? "which is no folder" : "no such folder"),
         "a Hugging Face directory (config.json and weights) or a checkpoint",
         fs::exists(text, error) ? "Name the folder that the file is in" : missing_path_action(text));
}

}  // namespace isograd
