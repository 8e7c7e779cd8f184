// Foreign text on a terminal or a page: names, paths, values of configurations, messages of libraries and
// peers.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

namespace isograd {

// One line of printable UTF-8. Line feeds, escape sequences and other control characters, invalid bytes, and
// characters that change the direction of text are escaped: "\n", "\u{1b}", "\xff". The text is truncated
// after `most` characters, with "…".
std::string printable(std::string_view foreign, std::size_t most = std::string_view::npos);

// The only way to standard output and standard error (tests/check_foreign.py checks that). `text` may have
// lines and tabs; other characters are escaped as in printable(). Foreign text within it must have gone
// through printable(), or it could look like a line of isograd.
void print(std::FILE* out, std::string_view text);

// For HTML and SVG, between tags and in quoted attributes. Invalid UTF-8, control characters except line
// feeds and tabs, and characters that change the direction of text become U+FFFD.
std::string escape_html(std::string_view text);

}  // namespace isograd
