// A store for the ranks of one host: a Unix socket without a name in the file system, which the kernel lets
// only processes of the same user use. LibTorch's TCPStore would answer whoever reaches its port.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace isograd {

// Serves from a thread of its own while it lives. Whoever connects is asked for by the kernel (SO_PEERCRED);
// processes of another user than `owner` are hung up on before a byte of theirs is read.
class LocalStoreServer {
 public:
  // `name` is abstract: it vanishes with the process. ConfigError when it is taken.
  explicit LocalStoreServer(const std::string& name, uid_t owner = ::geteuid());
  ~LocalStoreServer();
  LocalStoreServer(const LocalStoreServer&) = delete;
  LocalStoreServer& operator=(const LocalStoreServer&) = delete;
  void set(const std::string& key, std::string value);

 private:
  struct Connection;
  using Fields = std::vector<std::string>;
  void serve();
  bool take_in(Connection& connection);  // false: it has ended
  bool answer(Connection& connection);
  Fields reply_to(const Fields& request);

  uid_t owner_;
  int listening_ = -1, wake_[2] = {-1, -1};
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::thread thread_;
};

class LocalStore : public c10d::Store {
 public:
  // Connects to the server of that name, waiting for it to come. PeerError when none does within `timeout`,
  // or when it belongs to another user than `owner`. `server`: kept alive as long as this store, where the
  // same process serves.
  LocalStore(std::string name, std::chrono::milliseconds timeout,
             std::shared_ptr<LocalStoreServer> server = nullptr, uid_t owner = ::geteuid());
  ~LocalStore() override;

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;  // waits for it
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  std::vector<std::string> ask(const std::vector<std::string>& request);

  std::string name_;
  std::shared_ptr<LocalStoreServer> server_;
  uid_t owner_;
  std::mutex mutex_;
  int socket_ = -1;
};

// A name that nobody can have taken beforehand.
std::string new_store_name();

// Where a launcher writes why the launch as a whole has failed: seen by ranks that still wait for others.
inline constexpr const char* kLaunchFailed = "launch/failed";

// Whether this process is the first of its launch to claim `what`: of the ranks that fail alike one says so.
// True where no launcher of ours serves a store, or it does not answer.
bool first_of_launch(const std::string& what);

}  // namespace isograd
