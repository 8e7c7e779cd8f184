// Escapes text for pages and pictures.
#pragma once

#include <string>
#include <string_view>

namespace isograd {

// For HTML and SVG, between tags and in quoted attributes. Invalid UTF-8, control characters except line
// feeds and tabs, and characters that change the direction of text become U+FFFD.
std::string escape_html(std::string_view text);

}  // namespace isograd
