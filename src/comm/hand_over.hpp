// Under mpirun nobody says where the store is: rank 0 tells the others through a file in the job's own
// folder.
#pragma once

#include <chrono>
#include <filesystem>

#include "comm/environment.hpp"

namespace isograd {

class HandedOverPort {
 public:
  // `count`: how many times this process has joined before, so that each join has a file of its own.
  HandedOverPort(const RankEnvironment& environment, int count, std::chrono::milliseconds timeout);
  ~HandedOverPort();  // rank 0 removes the file: all ranks have joined, or this one failed
  HandedOverPort(const HandedOverPort&) = delete;
  HandedOverPort& operator=(const HandedOverPort&) = delete;
  void give(int port);
  int take();  // PeerError when rank 0 has given none within the timeout

 private:
  std::filesystem::path path_;
  bool owner_;
  std::chrono::milliseconds timeout_;
};

}  // namespace isograd
