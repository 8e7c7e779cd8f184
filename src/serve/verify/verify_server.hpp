// isograd verify --server: does a training server compute what one process computes in fp64? It is asked as
// the tinker SDK asks it, and by nothing else.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace isograd::serve {

struct ServerVerdict {
  std::vector<std::string> compared;  // what was, and how far apart it was
  std::vector<std::string> wrong;     // each mistake of the server
  std::vector<std::string> unjudged;  // what it refused, and mistakes that would not have shown
  bool passed() const { return wrong.empty() && unjudged.empty() && !compared.empty(); }
};

struct JudgedModel {
  std::int64_t rank;  // 0: whole weights
  std::string normalise;
};
std::vector<JudgedModel> judged_models(bool adapters_alone = false);

// `key`: of the server, or empty. `base`: the directory of its first base; empty: it is downloaded, as a
// whole model's weights. ConfigError: there is no server at `url`.
ServerVerdict verify_server(const std::string& url, const std::string& key,
                            const std::filesystem::path& base = {},
                            const std::vector<JudgedModel>& models = judged_models());
std::string to_text(const ServerVerdict& verdict);

}  // namespace isograd::serve
