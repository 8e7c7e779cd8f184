#include "comm/store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::uint8_t>;

constexpr std::uint32_t kLongestMessage = 64 << 20;  // of a message
constexpr std::size_t kMostConnections = 1 << 16;

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ISOGRAD_INVARIANT(name.size() + 1 <= sizeof(address.sun_path), name);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero byte makes the name abstract
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// The user of the peer, as the kernel recorded it at connect.
uid_t user_of(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return static_cast<uid_t>(-1);
  return peer.uid;
}

Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

std::string length_of(const std::string& text) {
  const auto word = static_cast<std::uint32_t>(text.size());
  return {reinterpret_cast<const char*>(&word), sizeof(word)};
}

std::chrono::milliseconds left_until(Clock::time_point deadline) {
  return std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
}

}  // namespace

void Wire::put(const Fields& fields) {
  std::string body;
  for (const std::string& field : fields) body += length_of(field) + field;
  if (body.size() > kLongestMessage)
    throw std::length_error(fmt::format("a message of {} bytes", body.size()));
  bytes_ += length_of(body) + body;
}

bool Wire::take(Fields& fields) {
  constexpr std::size_t kWord = sizeof(std::uint32_t);
  const auto length_at = [&](std::size_t at) -> std::size_t {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes_.data() + at, kWord);
    return word;
  };
  if (bytes_.size() - at_ < kWord) return false;
  const std::size_t body = length_at(at_), end = at_ + kWord + body;
  if (body > kLongestMessage) throw std::length_error("a message that is too long");
  if (bytes_.size() < end) return false;
  fields.clear();
  for (std::size_t at = at_ + kWord; at < end; at += kWord + fields.back().size()) {
    if (end - at < kWord || end - at - kWord < length_at(at)) throw std::length_error("a message cut short");
    fields.push_back(bytes_.substr(at + kWord, length_at(at)));
  }
  drop(kWord + body);
  return true;
}

// Erases only once the rest is shorter than what is erased, so that the cost stays linear.
void Wire::drop(std::size_t taken) {
  at_ += taken;
  if (at_ < bytes_.size() - at_) return;
  bytes_.erase(0, at_);
  at_ = 0;
}

bool Wire::send(int socket) {
  if (empty()) return true;
  const ssize_t n = ::send(socket, bytes_.data() + at_, bytes_.size() - at_, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  drop(static_cast<std::size_t>(n));
  return true;
}

bool Wire::receive(int socket) {
  char bytes[65536];
  errno = 0;
  const ssize_t n = ::recv(socket, bytes, sizeof(bytes), MSG_DONTWAIT);
  if (n <= 0) return errno == EAGAIN || errno == EINTR;
  bytes_.append(bytes, static_cast<std::size_t>(n));
  return true;
}

struct LocalStoreServer::Connection {
  explicit Connection(int accepted) : socket(accepted) {}
  ~Connection() { ::close(socket); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  const int socket;
  Wire in, out;
};

LocalStoreServer::LocalStoreServer(const std::string& name, uid_t owner) : owner_(owner) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  listening_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listening_ < 0 || ::bind(listening_, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listening_, 1024) != 0 || ::pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) {
    const int problem = errno;
    if (listening_ >= 0) ::close(listening_);
    refuse(fmt::format("the store of the ranks, {}", name), std::strerror(problem),
           "a name that no other run on this host uses, and free file descriptors",
           "End the run that uses it, choose another MASTER_PORT, or raise the limit on open files "
           "(ulimit -n)");
  }
  // Block signals here: other threads handle them.
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { serve(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

LocalStoreServer::~LocalStoreServer() {
  (void)!::write(wake_[1], "", 1);
  thread_.join();
  connections_.clear();
  for (const int descriptor : {listening_, wake_[0], wake_[1]}) ::close(descriptor);
}

void LocalStoreServer::serve() {
  const auto goes_on = [this](Connection& connection) {
    try {
      if (!connection.in.receive(connection.socket)) return false;
      for (Wire::Fields request; connection.in.take(request);) connection.out.put(reply_to(request));
      return connection.out.send(connection.socket);
    } catch (const std::exception&) {  // this is no request
      return false;
    }
  };
  for (;;) {
    std::vector<pollfd> waited{{wake_[0], POLLIN, 0}, {listening_, POLLIN, 0}};
    for (const auto& connection : connections_)
      waited.push_back(
          {connection->socket, static_cast<short>(connection->out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    ::poll(waited.data(), waited.size(), -1);
    if (waited[0].revents != 0) return;
    for (std::size_t i = connections_.size(); i-- > 0;)
      if (waited[i + 2].revents != 0 && !goes_on(*connections_[i]))
        connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(i));
    if (waited[1].revents == 0) continue;
    const int socket = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) {  // for example out of descriptors: wait before the next try
      if (errno != EAGAIN && errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    } else if (user_of(socket) != owner_ || connections_.size() >= kMostConnections) {
      ::close(socket);
    } else {
      connections_.push_back(std::make_unique<Connection>(socket));
    }
  }
}

// A request is a verb and its arguments. An empty reply is possible.
Wire::Fields LocalStoreServer::reply_to(const Wire::Fields& request) {
  const std::string& verb = request.at(0);
  const auto argument = [&](std::size_t i) { return request.at(i); };
  const auto value = [&](std::size_t i) { return bytes_of(request.at(i)); };
  if (verb == "set") {
    values_->set(argument(1), value(2));
    return {};
  }
  if (verb == "get")
    return values_->check({argument(1)}) ? Wire::Fields{text_of(values_->get(argument(1)))} : Wire::Fields{};
  if (verb == "add") return {std::to_string(values_->add(argument(1), std::stoll(argument(2))))};
  if (verb == "compare") return {text_of(values_->compareSet(argument(1), value(2), value(3)))};
  if (verb == "delete") return {std::to_string(values_->deleteKey(argument(1)))};
  if (verb == "count") return {std::to_string(values_->getNumKeys())};
  if (verb == "check") return {std::to_string(values_->check({request.begin() + 1, request.end()}))};
  throw std::invalid_argument(verb);
}

LocalStore::LocalStore(std::string name, std::chrono::milliseconds timeout,
                       std::shared_ptr<LocalStoreServer> server, uid_t owner)
    : Store(timeout), name_(std::move(name)), server_(std::move(server)), owner_(owner) {
  const auto deadline = Clock::now() + timeout;
  const auto refuse = [&](const std::string& found) {
    throw_peer_error("joining through the store " + name_, found,
                     "the launcher's store, or rank 0's, of this user",
                     "See whether the launcher or rank 0 still runs");
  };
  socklen_t length = 0;
  const sockaddr_un address = address_of(name_, length);
  for (;;) {
    socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socket_ < 0) refuse(fmt::format("no socket: {}", std::strerror(errno)));
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), length) == 0) break;
    const int problem = errno;
    ::close(std::exchange(socket_, -1));
    if (Clock::now() >= deadline)
      refuse(fmt::format("nobody there within {} ms: {}", timeout.count(), std::strerror(problem)));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (const uid_t user = user_of(socket_); user != owner_) {
    ::close(std::exchange(socket_, -1));
    refuse(fmt::format("a store of user {}", user));
  }
}

LocalStore::~LocalStore() {
  if (socket_ >= 0) ::close(socket_);
}

c10::intrusive_ptr<c10d::Store> LocalStore::clone() {
  return c10::make_intrusive<LocalStore>(name_, timeout_, server_, owner_);
}

// The server answers every request at once, so a wait means that it is lost or stopped.
Wire::Fields LocalStore::ask(const Wire::Fields& request) {
  const std::lock_guard lock(mutex_);
  const auto deadline = Clock::now() + timeout_;
  const auto lost = [&](const std::string& found) {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
    throw_peer_error(fmt::format("asking the store {} to {}", name_, request[0]), found, "an answer",
                     "See whether the launcher or rank 0 still runs, then start all ranks again");
  };
  if (socket_ < 0) lost("a connection that has ended");
  try {
    Wire in, out;
    out.put(request);
    for (Wire::Fields reply;;) {
      if (in.take(reply)) return reply;
      const bool sends = !out.empty();
      pollfd waited{socket_, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
      const auto left = left_until(deadline).count();
      if (left <= 0) lost(fmt::format("none within {} ms", timeout_.count()));
      if (::poll(&waited, 1, static_cast<int>(std::min<std::int64_t>(left, 1 << 30))) <= 0) continue;
      if (!(sends ? out.send(socket_) : in.receive(socket_)))
        lost(errno == 0 ? "a connection that has ended" : std::strerror(errno));
    }
  } catch (const std::length_error& error) {
    lost(error.what());
  }
  return {};
}

void LocalStore::set(const std::string& key, const Bytes& value) { ask({"set", key, text_of(value)}); }

Bytes LocalStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  return bytes_of(ask({"compare", key, text_of(expected), text_of(desired)}).at(0));
}

Bytes LocalStore::get(const std::string& key) {
  const auto deadline = Clock::now() + timeout_;
  for (;;) {
    if (const auto found = ask({"get", key}); !found.empty()) return bytes_of(found[0]);
    wait({key}, left_until(deadline));
  }
}

std::int64_t LocalStore::add(const std::string& key, std::int64_t value) {
  return std::stoll(ask({"add", key, std::to_string(value)}).at(0));
}

bool LocalStore::deleteKey(const std::string& key) { return ask({"delete", key}).at(0) == "1"; }

bool LocalStore::check(const std::vector<std::string>& keys) {
  Wire::Fields request{"check"};
  request.insert(request.end(), keys.begin(), keys.end());
  return ask(request).at(0) == "1";
}

std::int64_t LocalStore::getNumKeys() { return std::stoll(ask({"count"}).at(0)); }

void LocalStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void LocalStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto deadline = Clock::now() + timeout;
  auto nap = std::chrono::microseconds(200);
  while (!check(keys)) {
    if (Clock::now() >= deadline)
      throw_peer_error("waiting at the store " + name_,
                       fmt::format("no {} within {} ms", keys.empty() ? "key" : keys[0], timeout.count()),
                       "every rank to write its part",
                       "Look at the output of the other ranks for what kept them");
    std::this_thread::sleep_for(nap);
    nap = std::min<std::chrono::microseconds>(nap * 2, std::chrono::milliseconds(20));
  }
}

std::string new_store_name() {
  std::uint8_t bytes[16];
  if (::getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes)))
    refuse("starting ranks", fmt::format("no random numbers: {}", std::strerror(errno)),
           "getrandom() of the kernel", "Start on a kernel that has it");
  std::string name = "isograd-";
  for (const std::uint8_t byte : bytes) name += fmt::format("{:02x}", byte);
  return name;
}

bool first_of_launch(const std::string& what) {
  const char* name = std::getenv(kLaunchedVariable);
  if (!name || !*name) return true;
  try {
    LocalStore store(name, std::chrono::seconds(1));
    return store.add("claimed/" + what, 1) == 1;
  } catch (const std::exception&) {  // the launcher has ended, so nobody else can report
    return true;
  }
}

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
