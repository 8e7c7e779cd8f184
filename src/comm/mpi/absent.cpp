// MPI's functions in a build without MPI: they refuse.
#include "base/refuse.hpp"
#include "comm/mpi/mpi.hpp"

namespace isograd::mpi {
namespace {

[[noreturn]] void refuse_mpi() {
  refuse("the backend 'mpi'", "a build of isograd without MPI",
         "one that was configured where an MPI is installed",
         "Install one (Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin) and build "
         "again with -DISOGRAD_MPI=ON, or use --backend shm");
}

}  // namespace

bool built() { return false; }

void require() { refuse_mpi(); }

Rank start(std::chrono::milliseconds) { refuse_mpi(); }

c10::intrusive_ptr<c10d::Backend> make_world(const std::string&, std::chrono::milliseconds, std::int64_t) {
  refuse_mpi();
}

c10::intrusive_ptr<c10d::Backend> make_subgroup(const std::vector<int>&, const std::string&,
                                                const std::string&, std::chrono::milliseconds) {
  refuse_mpi();
}

std::vector<std::string> launcher(int) { refuse_mpi(); }

}  // namespace isograd::mpi
