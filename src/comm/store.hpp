// Where ranks meet. On one host: an abstract Unix socket, which accepts only processes of the same user
// (LibTorch's TCPStore would answer any process that reaches its port). Elsewhere: a TCPStore on one address.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace isograd {

// Serves from its own thread while it lives. The kernel tells the user of each client (SO_PEERCRED). The
// server closes connections of users other than `owner` before it reads a byte.
class LocalStoreServer {
 public:
  // `name` is an abstract address, which vanishes with the process. ConfigError when it is taken.
  explicit LocalStoreServer(const std::string& name, uid_t owner = ::geteuid());
  ~LocalStoreServer();
  LocalStoreServer(const LocalStoreServer&) = delete;
  LocalStoreServer& operator=(const LocalStoreServer&) = delete;
  void set(const std::string& key, const std::string& value) { values_->set(key, value); }

 private:
  struct Connection;
  void serve();
  std::vector<std::string> reply_to(const std::vector<std::string>& request);

  uid_t owner_;
  int listening_ = -1, wake_[2] = {-1, -1};
  c10::intrusive_ptr<c10d::Store> values_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Connection>> connections_;
  std::thread thread_;
};

// Messages on their way through a socket. A message is its length and its fields. Each field is a length and
// its bytes.
class Wire {
 public:
  using Fields = std::vector<std::string>;
  void put(const Fields& fields);
  // The next message, if it is whole. Throws std::length_error when its lengths contradict.
  bool take(Fields& fields);
  // Sends or receives what is possible without waiting. False, with errno (0: closed): the connection has
  // ended.
  bool send(int socket);
  bool receive(int socket);
  bool empty() const { return at_ == bytes_.size(); }

 private:
  void drop(std::size_t taken);
  std::string bytes_;
  std::size_t at_ = 0;  // the first byte that is still needed
};

class LocalStore : public c10d::Store {
 public:
  // Connects to the server of that name and waits until it exists. PeerError when it does not appear within
  // `timeout` or belongs to a user other than `owner`. `server`: kept alive as long as this store, where this
  // process serves.
  LocalStore(std::string name, std::chrono::milliseconds timeout,
             std::shared_ptr<LocalStoreServer> server = nullptr, uid_t owner = ::geteuid());
  ~LocalStore() override;

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;  // waits for the key
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  Wire::Fields ask(const Wire::Fields& request);

  std::string name_;
  std::shared_ptr<LocalStoreServer> server_;
  uid_t owner_;
  std::mutex mutex_;
  int socket_ = -1;
};

// A name that nobody can have taken before.
std::string new_store_name();

// The key where a launcher writes why the whole launch has failed. Ranks that still wait for others read it.
inline constexpr const char* kLaunchFailed = "launch/failed";

// Whether this process is the first of its launch to claim `what`, so that one of several ranks with the same
// failure reports it. True where none of our launchers serves a store, or it does not answer.
bool first_of_launch(const std::string& what);

struct Listener {
  int descriptor = -1;  // the caller closes it or passes it on
  int port = 0;
};

// Listens on `address` (a name or number) only, where LibTorch's store would listen on every interface. port
// 0: any free one. ConfigError when it cannot.
Listener listen_on(const std::string& address, int port);

}  // namespace isograd
