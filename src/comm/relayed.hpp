// What a rank throws because another one has failed and said why: the other one reports it.
#pragma once

#include "isograd/error.hpp"

namespace isograd {

class RelayedError : public PeerError {
  using PeerError::PeerError;
};

}  // namespace isograd
