// Foreign text on a terminal: names in files, paths, values of configurations, messages of libraries and
// peers.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

namespace isograd {

// One line of printable UTF-8: line feeds, escape sequences and other control characters, bytes that are not
// UTF-8, and what turns the direction of text around are written out ("\n", "\u{1b}", "\xff"). After `most`
// characters it is cut, with "…".
std::string printable(std::string_view foreign, std::size_t most = std::string_view::npos);

// The only way to standard output and standard error, checked by tests/check_foreign.py. `text` may have
// lines and tabs; everything else that printable() writes out is written out here too. A foreign text within
// it must have gone through printable(), or it could pass for a line of ours.
void print(std::FILE* out, std::string_view text);

}  // namespace isograd
