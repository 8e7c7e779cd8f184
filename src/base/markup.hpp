// Text within pages and pictures.
#pragma once

#include <string>
#include <string_view>

namespace isograd {

// For HTML and SVG, between tags and in quoted attributes. Bytes that are not UTF-8, control characters but
// for line feeds and tabs, and what turns the direction of text around become U+FFFD.
std::string escape_html(std::string_view text);

}  // namespace isograd
