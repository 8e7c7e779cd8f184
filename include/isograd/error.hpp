// The three families of errors (docs/errors.md): what was found, what was expected, what to do.
#pragma once

// Every public header includes this one first, so that an older standard is one message.
#if !defined(__cplusplus) || __cplusplus < 202002L
#error isograd needs C++20: link isograd::isograd, which asks CMake for it, or compile with -std=c++20
#include <C++20>  // does not exist, which ends the compilation here
#endif

#include <stdexcept>
#include <string>

namespace isograd {

// The three parts every message has. `where` names the operation, file and line, or key.
struct ErrorText {
  std::string where;
  std::string found;
  std::string expected;
  std::string action;  // what the reader should do; a full imperative clause
};

class Error : public std::runtime_error {
 public:
  Error(const char* family, ErrorText text);
  const ErrorText& text() const { return text_; }

 private:
  ErrorText text_;
};

// The input is wrong: a configuration key, a file, a flag, a full disk. Fix the input. Exit status 2.
class ConfigError : public Error {
 public:
  explicit ConfigError(ErrorText text) : Error("ConfigError", std::move(text)) {}
};

// A rank was lost, hung or disagreed. The group is unusable: recreate it. Exit status 3.
class PeerError : public Error {
 public:
  explicit PeerError(ErrorText text) : Error("PeerError", std::move(text)) {}
};

// A rule that isograd itself must keep was broken. Report a bug. Exit status 4.
class BrokenInvariant : public Error {
 public:
  explicit BrokenInvariant(ErrorText text) : Error("BrokenInvariant", std::move(text)) {}
};

// Throws BrokenInvariant with the place in the source unless `condition` holds. Always on.
#define ISOGRAD_INVARIANT(condition, found)                                                       \
  do {                                                                                            \
    if (!(condition)) ::isograd::throw_broken_invariant(#condition, (found), __FILE__, __LINE__); \
  } while (false)

[[noreturn]] void throw_broken_invariant(const char* condition, const std::string& found, const char* file,
                                         int line);

// 2, 3 or 4 for the three families, 4 for anything else (an exception nobody foresaw is our bug).
int exit_status(const std::exception& error);

}  // namespace isograd
