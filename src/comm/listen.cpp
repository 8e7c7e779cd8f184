#include "comm/listen.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {

Listener listen_on(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  std::string trouble;
  if (const int error = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
      error != 0) {
    trouble = ::gai_strerror(error);
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  for (const addrinfo* entry = list; entry; entry = entry->ai_next) {
    const int descriptor = ::socket(entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC, entry->ai_protocol);
    if (descriptor < 0) {
      trouble = std::strerror(errno);
      continue;
    }
    const int yes = 1;
    ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    if (::bind(descriptor, entry->ai_addr, entry->ai_addrlen) == 0 && ::listen(descriptor, 1024) == 0 &&
        ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&bound), &length) == 0) {
      const in_port_t chosen = bound.ss_family == AF_INET
                                   ? reinterpret_cast<sockaddr_in*>(&bound)->sin_port
                                   : reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port;
      return {descriptor, ntohs(chosen)};
    }
    trouble = std::strerror(errno);
    ::close(descriptor);
  }
  refuse(fmt::format("the store of the ranks at {}:{}", address, port), trouble,
         "an address of this host and a free port", "Choose another MASTER_ADDR or MASTER_PORT");
}

}  // namespace isograd
