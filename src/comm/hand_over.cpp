#include "comm/hand_over.hpp"

#include <fmt/format.h>

#include <fstream>
#include <thread>

#include "isograd/error.hpp"

namespace isograd {

namespace fs = std::filesystem;

HandedOverPort::HandedOverPort(const RankEnvironment& environment, int count,
                               std::chrono::milliseconds timeout)
    : path_(fs::path(environment.session_folder) / fmt::format("isograd-store-{}", count)),
      owner_(environment.rank == 0),
      timeout_(timeout) {}

HandedOverPort::~HandedOverPort() {
  std::error_code ignored;  // mpirun removes the folder with all that is in it
  if (owner_) fs::remove(path_, ignored);
}

void HandedOverPort::give(int port) {
  const fs::path part = path_.string() + ".part";
  std::ofstream file(part);
  file << port;
  file.close();
  std::error_code error;
  if (file) fs::rename(part, path_, error);
  if (file && !error) return;
  throw ConfigError(
      {.where = fmt::format("telling the other ranks where the store is through {}", path_.string()),
       .found = error ? error.message() : "a file that cannot be written",
       .expected = "the folder of mpirun's job on this host",
       .action = "Set MASTER_ADDR and MASTER_PORT (mpirun -x), or use --backend mpi"});
}

int HandedOverPort::take() {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  int port = 0;
  while (!(std::ifstream(path_) >> port)) {
    if (std::chrono::steady_clock::now() >= deadline) {
      throw PeerError({.where = fmt::format("joining through {}", path_.string()),
                       .found = fmt::format("nothing from rank 0 within {} ms", timeout_.count()),
                       .expected = "where its store is",
                       .action = "See whether rank 0 still runs and is on this host"});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return port;
}

}  // namespace isograd
