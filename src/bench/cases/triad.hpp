#pragma once

#include <cstdint>

namespace isograd {

// a = b + s · c: what memory gives to a core that does little else (McCalpin's STREAM). No overlap.
void triad(float* a, const float* b, const float* c, float s, std::int64_t count);

}  // namespace isograd
