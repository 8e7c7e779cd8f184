// API keys, each of a tenant. The server keeps SHA-256 of them; no key is ever logged or part of an error.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace isograd::serve {

class ApiKeys {
 public:
  // Lines "tenant sha256-hex"; empty lines and lines that begin with '#' are skipped. ConfigError names the
  // line.
  explicit ApiKeys(const std::filesystem::path& file);
  // Nothing: no key, or one that is not in the file. Takes the same time for every key.
  std::optional<std::string> tenant_of(std::string_view key) const;

 private:
  using Digest = std::array<std::uint8_t, 32>;
  static Digest digest_of(std::string_view key);
  std::vector<std::pair<std::string, Digest>> tenants_;
  friend struct NewKey;
};

// A random key of 256 bits, which therefore needs no salt or slow hash, and its line for the file. The tinker
// client demands "tml-" in front.
struct NewKey {
  explicit NewKey(const std::string& tenant);
  std::string key, line;
};

}  // namespace isograd::serve
