// The output of a command as its command line chose it: how much, in which colours, and where.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

namespace isograd {

// How this process prints. The command line sets it once, before there are other threads.
struct Printing {
  bool quiet = false;           // no progress and no notices: results, warnings and errors alone
  bool verbose = false;         // a line for each step or part, in place of one that is redrawn
  std::string colour = "auto";  // always | never | auto: on a terminal, unless NO_COLOR is set (no-color.org)
};
Printing& printing();

// Whether `out` is a terminal that understands escape sequences: none does with TERM=dumb.
bool is_terminal(std::FILE* out);

// Whether verdicts there are coloured, as Printing::colour says.
bool in_colour(std::FILE* out);
// print() with the words PASS in green and FAIL in red, if so.
void print_verdict(std::FILE* out, std::string_view text);

// A word in place of the name of a file: standard output.
inline constexpr const char* kStandardOutput = "-";
void write_output(const std::string& file, std::string_view text);  // a file, atomically, or standard output

}  // namespace isograd
