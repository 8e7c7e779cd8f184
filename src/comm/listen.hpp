// A listening socket on one address. LibTorch's store would listen on every interface.
#pragma once

#include <string>

namespace isograd {

struct Listener {
  int descriptor = -1;  // the caller closes it or passes it on
  int port = 0;
};

// Listens on `address` (a name or number) only. port 0: any free one. ConfigError when it cannot.
Listener listen_on(const std::string& address, int port);

}  // namespace isograd
