// The process's one MPI: started late, finalised at exit, called under a lock where it needs one.
#pragma once

#include <mpi.h>

#include <chrono>
#include <mutex>
#include <string>

namespace isograd::mpi {

// MPI connects the ranks when they join, however short the waits of their groups may be later.
inline constexpr std::chrono::seconds kLeastStart{30};

// Holds what an MPI without MPI_THREAD_MULTIPLE needs: one call at a time. Never held while waiting.
class CallScope {
 public:
  CallScope();

 private:
  std::unique_lock<std::mutex> lock_;
};

// PeerError with MPI's own words unless `code` is MPI_SUCCESS.
void check(int code, const std::string& where);

// All ranks of the job, for what the groups agree on beside their collectives.
MPI_Comm control();

// False before start() and once MPI is finalised: nothing of it may be called.
bool running();

// Something did not complete: MPI_Finalize would wait for it, so the process will end without. mpirun then
// ends the other ranks and returns a status that is not 0.
void abandon();

}  // namespace isograd::mpi
