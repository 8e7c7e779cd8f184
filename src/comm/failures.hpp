// A rank's share in a failure: the error of one that ends because another failed and reported the cause, and
// a file for the log of its last operations.
#pragma once

#include <filesystem>
#include <list>
#include <string>
#include <utility>

#include "isograd/error.hpp"

namespace isograd {

// Whether an operation of this thread has ended because another rank failed or left its group. Any error that
// the thread throws afterwards is a consequence of that rank's error.
inline thread_local bool ended_by_another_rank = false;

// `of_operation`: the failure was an operation (a rank was lost, hung or disagreed), not a file or a model.
// Only then does it matter where this rank waited.
class RelayedError : public PeerError {
 public:
  explicit RelayedError(ErrorText text, bool of_operation = false)
      : PeerError(std::move(text)), of_operation_(of_operation) {
    ended_by_another_rank = true;
  }
  bool of_operation() const { return of_operation_; }

 private:
  bool of_operation_;
};

// While one lives, a rank that detects a failed operation appends the log of its last operations to `file`,
// and prints the file's name on standard error. The newest object of the process counts.
class OperationsFile {
 public:
  explicit OperationsFile(std::filesystem::path file);
  ~OperationsFile();
  OperationsFile(const OperationsFile&) = delete;
  OperationsFile& operator=(const OperationsFile&) = delete;

  // Returns the file's name. Empty: there is no file, or it could not be written and nothing was kept.
  static std::string keep(const std::string& text);

 private:
  std::list<std::filesystem::path>::iterator place_;
};

}  // namespace isograd
