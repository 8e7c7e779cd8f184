#include "isograd/error.hpp"

namespace isograd {
namespace {

std::string join(const char* family, const ErrorText& text) {
  return std::string(family) + ": " + text.where + ": found " + text.found + "; expected " + text.expected +
         ". " + text.action + ".";
}

}  // namespace

Error::Error(const char* family, ErrorText text)
    : std::runtime_error(join(family, text)), text_(std::move(text)) {}

void throw_broken_invariant(const char* condition, const std::string& found, const char* file, int line) {
  std::string path(file);
  if (auto at = path.rfind("src/"); at != std::string::npos) path = path.substr(at);
  throw BrokenInvariant({.where = path + ":" + std::to_string(line),
                         .found = found,
                         .expected = condition,
                         .action = "This is a defect of isograd: please report it with this message"});
}

int exit_status(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error)) return 2;
  if (dynamic_cast<const PeerError*>(&error)) return 3;
  return 4;
}

}  // namespace isograd
