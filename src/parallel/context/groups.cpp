#include "isograd/context_parallel.hpp"

namespace isograd {

ContextGroups context_groups(const Mesh& mesh) {
  const auto group = [&](const AxisSet& axes) { return mesh.along(axes, "attention"); };
  return {.context = group(kContextAxes), .ring = group({"cp_ring"}), .ulysses = group({"cp_ulysses"})};
}

}  // namespace isograd
