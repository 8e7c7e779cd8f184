// Command lines for users to paste.
#pragma once

#include <string>
#include <vector>

namespace isograd {

// One command line of `words`, each quoted if a shell would change it.
std::string shell_words(const std::vector<std::string>& words);

}  // namespace isograd
