#include "serve/http/keys.hpp"

#include <fmt/ranges.h>
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>

#include <charconv>

#include "base/files.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"

namespace isograd::serve {
namespace {

bool is_tenant(std::string_view name) {
  return !name.empty() && name.size() <= 64 &&
         name.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") ==
             name.npos;
}

}  // namespace

ApiKeys::Digest ApiKeys::digest_of(std::string_view key) {
  Digest digest{};
  const int code = gnutls_hash_fast(GNUTLS_DIG_SHA256, key.data(), key.size(), digest.data());
  ISOGRAD_INVARIANT(code == 0, gnutls_strerror(code));
  return digest;
}

ApiKeys::ApiKeys(const fs::path& file) {
  const std::string text = read_file(file, 16 << 20);
  int number = 0;
  // The line is not shown: it may hold a key that somebody put there.
  const auto refuse_line = [&](const char* found) {
    refuse(fmt::format("{}:{}", file.string(), number), found,
           "\"tenant sha256-hex\": a name of A-Z, a-z, 0-9, '.', '_', '-' and 64 hexadecimal digits",
           "Make a line with `isograd serve key TENANT`");
  };
  for (std::string_view rest = text; !rest.empty();) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1)), ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line[0] == '#') continue;
    const std::size_t space = line.find(' ');
    const std::string_view tenant = line.substr(0, space),
                           digits = space == line.npos ? "" : line.substr(space + 1);
    if (!is_tenant(tenant)) refuse_line("no name of a tenant at its beginning");
    if (digits.size() != 64) refuse_line("no SHA-256 after the tenant's name");
    Digest digest{};
    for (std::size_t i = 0; i < digest.size(); ++i) {
      const char* begin = digits.data() + 2 * i;
      if (std::from_chars(begin, begin + 2, digest[i], 16).ptr != begin + 2)
        refuse_line("no SHA-256 after the tenant's name");
    }
    for (const auto& [other, known] : tenants_)
      if (known == digest) refuse_line("a key that an earlier line has");
    tenants_.emplace_back(tenant, digest);
  }
  if (tenants_.empty())
    refuse(file.string(), "no key", "a line for each key", "Make one with `isograd serve key TENANT`");
}

std::optional<std::string> ApiKeys::tenant_of(std::string_view key) const {
  if (key.empty()) return std::nullopt;
  const Digest digest = digest_of(key);
  std::optional<std::string> tenant;
  for (const auto& [name, known] : tenants_)
    if (gnutls_memcmp(known.data(), digest.data(), digest.size()) == 0) tenant = name;
  return tenant;
}

NewKey::NewKey(const std::string& tenant) {
  if (!is_tenant(tenant))
    refuse("tenant", "\"" + printable(tenant, 100) + "\"", "1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'",
           "Choose another name");
  ApiKeys::Digest bytes{};
  const int code = gnutls_rnd(GNUTLS_RND_KEY, bytes.data(), bytes.size());
  ISOGRAD_INVARIANT(code == 0, gnutls_strerror(code));
  key = fmt::format("tml-{:02x}", fmt::join(bytes, ""));
  line = fmt::format("{} {:02x}", tenant, fmt::join(ApiKeys::digest_of(key), ""));
}

}  // namespace isograd::serve
