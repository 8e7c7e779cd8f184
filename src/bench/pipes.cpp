#include "bench/pipes.hpp"

#include <nlohmann/json.hpp>

#include "isograd/error.hpp"

namespace isograd {
namespace {

std::FILE* open_pipe(const std::filesystem::path& path, const char* mode) {
  std::FILE* file = std::fopen(path.c_str(), mode);
  if (!file)
    throw ConfigError({.where = "a side of isograd bench",
                       .found = "cannot open " + path.string(),
                       .expected = "a pipe made by isograd bench",
                       .action = "Run `isograd bench step` or `isograd bench optim`, which start this"});
  return file;
}

}  // namespace

TurnPipes::TurnPipes(const std::filesystem::path& exchange, const std::string& name, int rank)
    : go_(open_pipe(exchange / (name + ".go." + std::to_string(rank)), "rb"), &std::fclose),
      done_(rank == 0 ? open_pipe(exchange / (name + ".done"), "w") : nullptr, &std::fclose) {}

bool TurnPipes::wait() {
  return (turn_ = std::fgetc(go_.get())) != EOF;
}

void TurnPipes::answer(const nlohmann::json& line) {
  if (!done_) return;
  std::fputs((line.dump() + "\n").c_str(), done_.get());
  std::fflush(done_.get());
}

}  // namespace isograd
