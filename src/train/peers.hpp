// Ranks that hold the same batch (along axes that are no data axes) before a step.
#pragma once

#include "isograd/batch.hpp"
#include "isograd/mesh.hpp"

namespace isograd {

// Whether any of them was asked to stop. ConfigError on all of them where their micro-batches differ: each
// would compute its part of another loss. Collective over these ranks; nothing where there is one.
bool agree_with_peers(const MicroBatches& micro_batches, bool stop_requested, const Mesh& mesh);

}  // namespace isograd
