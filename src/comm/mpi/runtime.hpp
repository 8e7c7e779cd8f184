// The process's MPI: initialised on first use, finalised at exit, locked where it needs a lock.
#pragma once

#include <mpi.h>

#include <chrono>
#include <mutex>
#include <string>

namespace isograd::mpi {

// The least time for start(): MPI connects all ranks then, however short the groups' timeouts are.
inline constexpr std::chrono::seconds kLeastStart{30};

// Serialises calls for an MPI without MPI_THREAD_MULTIPLE. Never held while waiting.
class CallScope {
 public:
  CallScope();

 private:
  std::unique_lock<std::mutex> lock_;
};

// PeerError with MPI's error text unless `code` is MPI_SUCCESS.
void check(int code, const std::string& where);

// A communicator of all ranks, for the agreements of groups outside their collectives.
MPI_Comm control();

// False before start() and after MPI is finalised: no MPI call is allowed then.
bool running();

// Marks an operation as incomplete for good. MPI_Finalize would wait for it, so the process ends without that
// call. mpirun then ends the other ranks and returns a non-zero status.
void abandon();

}  // namespace isograd::mpi
