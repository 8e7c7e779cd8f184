#pragma once

#include <string>

namespace isograd {

// A line of /proc/self/status in bytes, e.g. VmRSS. ConfigError on behalf of `benchmark` where there is none.
double status_bytes(const std::string& benchmark, const std::string& name);

}  // namespace isograd
