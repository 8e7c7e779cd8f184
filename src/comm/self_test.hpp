// A known-answer test of every collective of a new group, so that a wrong result is found before training.
#pragma once

#include <c10/core/Device.h>

#include "isograd/group.hpp"

namespace isograd {

// Collective. It sends a few KB. Inputs distinguish rank, collective and index, and are exact in float32. A
// wrong result on any rank is a PeerError on all, with the collective, the rank, the result and the right
// one. Collectives that the backend lacks are skipped. `device`: the device of its tensors.
void self_test(Group group, c10::Device device);

}  // namespace isograd
