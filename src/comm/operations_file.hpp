// A file for the log of the last operations when one of them fails, instead of the terminal.
#pragma once

#include <filesystem>
#include <list>
#include <string>

namespace isograd {

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
