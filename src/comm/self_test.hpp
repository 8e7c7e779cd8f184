// A known-answer test of every collective that a group offers, for its start: a wrong result is found before
// it is trained on.
#pragma once

#include <c10/core/Device.h>

#include "isograd/group.hpp"

namespace isograd {

// Collective. A few KB; inputs tell rank, collective and index apart and are exact in float32. A wrong result
// on any rank is a PeerError on all, with the collective, the rank, what was found and what is right.
// Collectives that the backend does not have are left out. `device`: where its tensors lie.
void self_test(Group group, c10::Device device);

}  // namespace isograd
