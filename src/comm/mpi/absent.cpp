// A build without MPI.
#include "comm/mpi/mpi.hpp"
#include "isograd/error.hpp"

namespace isograd::mpi {
namespace {

[[noreturn]] void refuse() {
  throw ConfigError({.where = "the backend 'mpi'",
                     .found = "a build of isograd without MPI",
                     .expected = "one that was configured where an MPI is installed",
                     .action =
                         "Install one (Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin) and build "
                         "again with -DISOGRAD_MPI=ON, or use --backend shm"});
}

}  // namespace

bool built() {
  return false;
}

void require() {
  refuse();
}

Rank start(std::chrono::milliseconds) {
  refuse();
}

c10::intrusive_ptr<c10d::Backend> make_world(const std::string&, std::chrono::milliseconds, std::int64_t) {
  refuse();
}

c10::intrusive_ptr<c10d::Backend> make_subgroup(const std::vector<int>&, const std::string&,
                                                const std::string&, std::chrono::milliseconds) {
  refuse();
}

std::vector<std::string> launcher(int) {
  refuse();
}

}  // namespace isograd::mpi
