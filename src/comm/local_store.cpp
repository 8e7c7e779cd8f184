#include "comm/local_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

// A message is its length and its fields. Each field is a length and its bytes.
constexpr std::uint32_t kLongest = 64 << 20;
constexpr std::size_t kMostConnections = 1 << 16;

void put_length(std::string& to, std::size_t length) {
  const auto word = static_cast<std::uint32_t>(length);
  to.append(reinterpret_cast<const char*>(&word), sizeof(word));
}

std::string encode(const std::vector<std::string>& fields) {
  std::string body, message;
  for (const std::string& field : fields) {
    put_length(body, field.size());
    body += field;
  }
  put_length(message, body.size());
  return message + body;
}

// One message taken from the front of `bytes`. Empty: it is incomplete. Bad: its lengths contradict.
struct Decoded {
  bool whole = false, bad = false;
  std::vector<std::string> fields{};
};

Decoded decode(std::string& bytes) {
  const auto length_at = [&](std::size_t at) {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    return word;
  };
  constexpr std::size_t kWord = sizeof(std::uint32_t);
  Decoded decoded;
  if (bytes.size() < kWord) return decoded;
  const std::uint32_t body = length_at(0);
  decoded.bad = body > kLongest;
  if (decoded.bad || bytes.size() < kWord + body) return decoded;
  for (std::size_t at = kWord, end = kWord + body; at < end;) {
    decoded.bad = end - at < kWord || end - at - kWord < length_at(at);
    if (decoded.bad) return decoded;
    decoded.fields.push_back(bytes.substr(at + kWord, length_at(at)));
    at += kWord + length_at(at);
  }
  bytes.erase(0, kWord + body);
  decoded.whole = true;
  return decoded;
}

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

std::vector<std::uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string text_of(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::int64_t number_of(const std::string& text) {
  return text.empty() ? 0 : std::strtoll(text.c_str(), nullptr, 10);
}

}  // namespace

struct LocalStoreServer::Connection {
  explicit Connection(int accepted) : socket(accepted) {}
  ~Connection() { ::close(socket); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  const int socket;
  std::string in, out;
};

LocalStoreServer::LocalStoreServer(const std::string& name, uid_t owner) : owner_(owner) {
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  listening_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listening_ < 0 || ::bind(listening_, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listening_, 1024) != 0 || ::pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) {
    const int problem = errno;
    if (listening_ >= 0) ::close(listening_);
    isograd::refuse(fmt::format("the store of the ranks, {}", name), std::strerror(problem),
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

void LocalStoreServer::set(const std::string& key, std::string value) {
  const std::lock_guard lock(mutex_);
  values_[key] = std::move(value);
}

void LocalStoreServer::serve() {
  for (;;) {
    std::vector<pollfd> waited{{wake_[0], POLLIN, 0}, {listening_, POLLIN, 0}};
    for (const auto& connection : connections_)
      waited.push_back(
          {connection->socket, static_cast<short>(connection->out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    ::poll(waited.data(), waited.size(), -1);
    if (waited[0].revents != 0) return;
    for (std::size_t i = connections_.size(); i-- > 0;) {
      if (waited[i + 2].revents == 0) continue;
      Connection& connection = *connections_[i];
      if (!take_in(connection) || !answer(connection))
        connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(i));
    }
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

bool LocalStoreServer::take_in(Connection& connection) {
  char bytes[16384];
  for (;;) {
    const ssize_t n = ::recv(connection.socket, bytes, sizeof(bytes), 0);
    if (n == 0) return false;
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    connection.in.append(bytes, static_cast<std::size_t>(n));
    for (;;) {
      const Decoded request = decode(connection.in);
      if (request.bad) return false;
      if (!request.whole) break;
      connection.out += encode(reply_to(request.fields));
    }
  }
}

bool LocalStoreServer::answer(Connection& connection) {
  while (!connection.out.empty()) {
    const ssize_t n = ::send(connection.socket, connection.out.data(), connection.out.size(), MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    connection.out.erase(0, static_cast<std::size_t>(n));
  }
  return true;
}

// A request is a verb and its arguments. An empty reply is possible.
LocalStoreServer::Fields LocalStoreServer::reply_to(const Fields& request) {
  const std::lock_guard lock(mutex_);
  const std::size_t n = request.size();
  const std::string verb = n > 0 ? request[0] : "";
  if (verb == "set" && n == 3) {
    values_[request[1]] = request[2];
    return {};
  }
  if (verb == "get" && n == 2) {
    const auto found = values_.find(request[1]);
    return found == values_.end() ? Fields{} : Fields{found->second};
  }
  if (verb == "add" && n == 3) {
    std::string& value = values_[request[1]];
    return {value = std::to_string(number_of(value) + number_of(request[2]))};
  }
  if (verb == "compare" &&
      n == 4) {  // as c10d's: sets the value when the key is absent and the expected value is empty
    const auto found = values_.find(request[1]);
    if (found == values_.end() && !request[2].empty()) return {request[2]};
    if (found == values_.end() || found->second == request[2]) return {values_[request[1]] = request[3]};
    return {found->second};
  }
  if (verb == "delete" && n == 2) return {std::to_string(values_.erase(request[1]))};
  if (verb == "count" && n == 1) return {std::to_string(values_.size())};
  if (verb == "check")
    return {std::all_of(request.begin() + 1, request.end(),
                        [&](const std::string& key) { return values_.contains(key); })
                ? "1"
                : "0"};
  return {};
}

LocalStore::LocalStore(std::string name, std::chrono::milliseconds timeout,
                       std::shared_ptr<LocalStoreServer> server, uid_t owner)
    : Store(timeout), name_(std::move(name)), server_(std::move(server)), owner_(owner) {
  const auto deadline = Clock::now() + timeout;
  const auto refuse = [&](const std::string& found) {
    throw PeerError({.where = "joining through the store " + name_,
                     .found = found,
                     .expected = "the launcher's store, or rank 0's, of this user",
                     .action = "See whether the launcher or rank 0 still runs"});
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
std::vector<std::string> LocalStore::ask(const std::vector<std::string>& request) {
  const std::lock_guard lock(mutex_);
  const auto deadline = Clock::now() + timeout_;
  const auto lost = [&](const std::string& found) {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
    throw PeerError({.where = fmt::format("asking the store {} to {}", name_, request[0]),
                     .found = found,
                     .expected = "an answer",
                     .action = "See whether the launcher or rank 0 still runs, then start all ranks again"});
  };
  if (socket_ < 0) lost("a connection that has ended");
  const auto wait_for = [&](short events) {
    pollfd waited{socket_, events, 0};
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) lost(fmt::format("none within {} ms", timeout_.count()));
      const int ready = ::poll(&waited, 1, static_cast<int>(std::min<std::int64_t>(left, 1 << 30)));
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) lost(std::strerror(errno));
    }
  };
  const std::string message = encode(request);
  if (message.size() > kLongest) lost(fmt::format("a message of {} bytes", message.size()));
  for (std::size_t sent = 0; sent < message.size();) {
    wait_for(POLLOUT);
    const ssize_t n =
        ::send(socket_, message.data() + sent, message.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) lost(std::strerror(errno));
    if (n > 0) sent += static_cast<std::size_t>(n);
  }
  std::string received;
  for (;;) {
    const Decoded reply = decode(received);
    if (reply.bad) lost("an answer that cannot be read");
    if (reply.whole) return reply.fields;
    wait_for(POLLIN);
    char bytes[16384];
    const ssize_t n = ::recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n == 0) lost("a connection that has ended");
    if (n < 0 && errno != EAGAIN && errno != EINTR) lost(std::strerror(errno));
    if (n > 0) received.append(bytes, static_cast<std::size_t>(n));
  }
}

void LocalStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask({"set", key, text_of(value)});
}

std::vector<std::uint8_t> LocalStore::compareSet(const std::string& key,
                                                 const std::vector<std::uint8_t>& expected,
                                                 const std::vector<std::uint8_t>& desired) {
  return bytes_of(ask({"compare", key, text_of(expected), text_of(desired)}).at(0));
}

std::vector<std::uint8_t> LocalStore::get(const std::string& key) {
  const auto deadline = Clock::now() + timeout_;
  for (;;) {
    const auto found = ask({"get", key});
    if (!found.empty()) return bytes_of(found[0]);
    wait({key}, std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()));
  }
}

std::int64_t LocalStore::add(const std::string& key, std::int64_t value) {
  return number_of(ask({"add", key, std::to_string(value)}).at(0));
}

bool LocalStore::deleteKey(const std::string& key) {
  return ask({"delete", key}).at(0) == "1";
}

bool LocalStore::check(const std::vector<std::string>& keys) {
  std::vector<std::string> request{"check"};
  request.insert(request.end(), keys.begin(), keys.end());
  return ask(request).at(0) == "1";
}

std::int64_t LocalStore::getNumKeys() {
  return number_of(ask({"count"}).at(0));
}

void LocalStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void LocalStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto deadline = Clock::now() + timeout;
  auto nap = std::chrono::microseconds(200);
  while (!check(keys)) {
    if (Clock::now() >= deadline)
      throw PeerError(
          {.where = "waiting at the store " + name_,
           .found = fmt::format("no {} within {} ms", keys.empty() ? "key" : keys[0], timeout.count()),
           .expected = "every rank to write its part",
           .action = "Look at the output of the other ranks for what kept them"});
    std::this_thread::sleep_for(nap);
    nap = std::min<std::chrono::microseconds>(nap * 2, std::chrono::milliseconds(20));
  }
}

std::string new_store_name() {
  std::uint8_t bytes[16];
  if (::getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes)))
    isograd::refuse("starting ranks", fmt::format("no random numbers: {}", std::strerror(errno)),
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

}  // namespace isograd
