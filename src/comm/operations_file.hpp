// Where the log of the last operations goes when one of them fails: to a file instead of the terminal.
#pragma once

#include <filesystem>
#include <list>
#include <string>

namespace isograd {

// While one lives, in this process: what a rank that finds an operation to have failed would print of the
// operations before it goes to the end of `file`, and a line on standard error names that. The newest one
// counts.
class OperationsFile {
 public:
  explicit OperationsFile(std::filesystem::path file);
  ~OperationsFile();
  OperationsFile(const OperationsFile&) = delete;
  OperationsFile& operator=(const OperationsFile&) = delete;

  // The file's name; empty where there is none, or where it could not be written: nothing is kept then.
  static std::string keep(const std::string& text);

 private:
  std::list<std::filesystem::path>::iterator place_;
};

}  // namespace isograd
