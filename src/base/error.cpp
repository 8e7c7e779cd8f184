#include "isograd/error.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "base/print.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

// Foreign names (from files, paths, libraries and peers) may appear in every part. They must not look like a
// line of isograd, or fill the screen.
std::string join(const char* family, const ErrorText& text) {
  constexpr std::size_t kLongestPart = 4000;
  const auto shown = [](const std::string& part) { return printable(part, kLongestPart); };
  const char* end = text.action.ends_with('?') ? "" : ".";
  // A suggestion is read before what it was chosen from, which may be long.
  if (text.action.starts_with("Did you mean ")) {
    const auto mark = *end ? text.action.rfind("? ") : std::string::npos;
    const std::string rest = mark == std::string::npos ? "" : " " + shown(text.action.substr(mark + 2)) + end;
    return fmt::format("{}: {}: found {}. {} Expected {}.{}", family, shown(text.where), shown(text.found),
                       shown(text.action.substr(0, mark == std::string::npos ? mark : mark + 1)),
                       shown(text.expected), rest);
  }
  return fmt::format("{}: {}: found {}; expected {}. {}{}", family, shown(text.where), shown(text.found),
                     shown(text.expected), shown(text.action), end);
}

}  // namespace

Error::Error(const char* family, ErrorText text)
    : std::runtime_error(join(family, text)), text_(std::move(text)) {}

void refuse(std::string where, std::string found, std::string expected, std::string action) {
  throw ConfigError({std::move(where), std::move(found), std::move(expected), std::move(action)});
}

void throw_peer_error(std::string where, std::string found, std::string expected, std::string action) {
  throw PeerError({std::move(where), std::move(found), std::move(expected), std::move(action)});
}

void throw_broken_invariant(const char* condition, const std::string& found, const char* file, int line) {
  std::string path(file);
  if (auto at = path.rfind("src/"); at != std::string::npos) path = path.substr(at);
  throw BrokenInvariant({.where = path + ":" + std::to_string(line),
                         .found = found,
                         .expected = condition,
                         .action = "This is a defect of isograd: please report it with this message"});
}

ErrorText text_of(const fs::filesystem_error& error) {
  return {.where = error.path1().empty() ? "a file" : error.path1().string(),
          .found = error.code().message(),
          .expected = "a path that can be used",
          .action = "Check that it exists, that you may use it, and that it is not too long"};
}

int exit_status(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error)) return 2;
  if (dynamic_cast<const fs::filesystem_error*>(&error)) return 2;
  if (dynamic_cast<const PeerError*>(&error)) return 3;
  return 4;
}

}  // namespace isograd
