// Command lines that people paste.
#pragma once

#include <string>
#include <vector>

namespace isograd {

// One command line of `words`, each quoted where a shell would read it otherwise than as it stands.
std::string shell_words(const std::vector<std::string>& words);

}  // namespace isograd
