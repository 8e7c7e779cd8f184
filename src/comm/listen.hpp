// A listening socket of our own: LibTorch's store would listen on every interface.
#pragma once

#include <string>

namespace isograd {

struct Listener {
  int descriptor = -1;  // the caller's to close or to give away
  int port = 0;
};

// Listens on `address` (a name or number) and nowhere else. port 0: any free one. ConfigError when it cannot.
Listener listen_on(const std::string& address, int port);

}  // namespace isograd
