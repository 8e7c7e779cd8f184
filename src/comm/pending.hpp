// The state of a Pending.
#pragma once

#include "isograd/group.hpp"

namespace isograd {

struct Pending::State {
  virtual ~State() = default;
  virtual bool progress() = 0;
  virtual void wait() = 0;
};

}  // namespace isograd
