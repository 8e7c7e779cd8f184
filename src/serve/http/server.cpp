// HttpServer by libmicrohttpd. One thread of the library reads and writes all connections; a request that has
// no answer yet is suspended and costs nothing. A second thread closes connections that take too long to send
// a request.
#include <fcntl.h>
#include <fmt/format.h>
#include <microhttpd.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/refuse.hpp"
#include "serve/http/http.hpp"
#include "serve/http/request.hpp"

namespace isograd::serve {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kNever = Clock::time_point::max();
// Memory that the library takes for a connection and keeps while it is open: its headers, and the part of a
// body that is read at once.
constexpr std::size_t kConnectionBytes = 16 << 10;
constexpr auto kLastAnswers = std::chrono::seconds(2);  // the time that a server which ends has for them

// A request from its first byte until its answer is sent; shared with those who may answer it.
struct Exchange {
  std::string target;
  HttpRequest request{};
  bool begun = false, dispatched = false;
  bool cut_off = false;                   // the answer is sent, and what still comes is dropped
  std::int64_t length = 0, received = 0;  // of the body; length 0: not known before its end
  std::optional<ShortParts> parts{};      // of a body that is too large
  std::optional<HttpReply> refusal{};     // sent when the body has been read and dropped

  std::mutex mutex{};
  bool answered = false;
  std::optional<HttpReply> reply{};
  MHD_Connection* suspended = nullptr;

  void answer(HttpReply with) {
    const std::scoped_lock held(mutex);
    if (std::exchange(answered, true)) return;
    reply = std::move(with);
    if (suspended) MHD_resume_connection(std::exchange(suspended, nullptr));
  }
};

int socket_of(MHD_Connection* connection) {
  return MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
}

MHD_Response* response_of_file(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  struct stat status {};
  if (file < 0 || ::fstat(file, &status) != 0) return nullptr;
  MHD_Response* response = MHD_create_response_from_fd64(static_cast<std::uint64_t>(status.st_size), file);
  if (!response) ::close(file);
  return response;
}

MHD_Response* response_of_text(std::string text) {
  auto* body = new std::string(std::move(text));
  MHD_Response* response = MHD_create_response_from_buffer_with_free_callback_cls(
      body->size(), body->data(), [](void* text) { delete static_cast<std::string*>(text); }, body);
  if (!response) delete body;
  return response;
}

MHD_Result send(MHD_Connection* connection, HttpReply reply) {
  MHD_Response* response =
      reply.file.empty() ? response_of_text(std::move(reply.body)) : response_of_file(reply.file);
  if (!response && !reply.file.empty()) return send(connection, error_reply(404, "There is no such file"));
  if (!response) return MHD_NO;  // closes the connection
  if (!reply.type.empty()) MHD_add_response_header(response, "Content-Type", reply.type.c_str());
  for (const auto& [name, value] : reply.headers)
    MHD_add_response_header(response, name.c_str(), value.c_str());
  const MHD_Result queued = MHD_queue_response(connection, static_cast<unsigned>(reply.status), response);
  MHD_destroy_response(response);
  return queued;
}

// The reply to a request whose body goes on: the library sends none before its end. It is the last one.
void send_early(MHD_Connection* connection, const HttpReply& reply) {
  std::string text = fmt::format(
      "HTTP/1.1 {} {}\r\nConnection: close\r\nContent-Type: {}\r\nContent-Length: {}\r\n", reply.status,
      MHD_get_reason_phrase_for(static_cast<unsigned>(reply.status)), reply.type, reply.body.size());
  for (const auto& [name, value] : reply.headers) text += name + ": " + value + "\r\n";
  text += "\r\n" + reply.body;
  ::send(socket_of(connection), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  ::shutdown(socket_of(connection), SHUT_WR);
}

struct Address {
  int socket = -1, port = 0;
  bool loopback = false;
};

Address listen_on(const std::string& host, int port) {
  const std::string where = fmt::format("listen on {}:{}", host, port);
  const auto refuse_address = [&](const std::string& found) {
    refuse(where, found, "an address of this machine and a free port", "Choose another --host or --port");
  };
  addrinfo hints{}, *all = nullptr;
  hints.ai_socktype = SOCK_STREAM, hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  if (const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &all))
    refuse_address(gai_strerror(code));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> found(all, freeaddrinfo);
  const int socket = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
  if (socket >= 0) setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (socket < 0 || ::bind(socket, found->ai_addr, found->ai_addrlen) != 0 ||
      ::listen(socket, SOMAXCONN) != 0 ||
      ::getsockname(socket, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    const int code = errno;
    if (socket >= 0) ::close(socket);
    refuse_address(std::strerror(code));
  }
  if (bound.ss_family == AF_INET6) {
    const auto& address = reinterpret_cast<const sockaddr_in6&>(bound);
    return {socket, ntohs(address.sin6_port), IN6_IS_ADDR_LOOPBACK(&address.sin6_addr) != 0};
  }
  const auto& address = reinterpret_cast<const sockaddr_in&>(bound);
  return {socket, ntohs(address.sin_port), ntohl(address.sin_addr.s_addr) >> 24 == 127};
}

// Every connection takes a descriptor; shells commonly allow 1024 unless asked for more.
void allow_descriptors(rlim_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

struct HttpServer::Impl {
  Impl(HttpOptions with, Admit ask, Handler call)
      : options(std::move(with)), admit(std::move(ask)), handler(std::move(call)) {
    address = listen_on(options.host, options.port);
    allow_descriptors(options.connections + 256);
    daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, nullptr, nullptr, &on_request, this,
        MHD_OPTION_LISTEN_SOCKET, address.socket, MHD_OPTION_STRICT_FOR_CLIENT, 1,
        MHD_OPTION_CONNECTION_LIMIT, options.connections, MHD_OPTION_CONNECTION_TIMEOUT, options.idle_seconds,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes, MHD_OPTION_URI_LOG_CALLBACK, &on_target, this,
        MHD_OPTION_NOTIFY_COMPLETED, &on_completed, this, MHD_OPTION_NOTIFY_CONNECTION, &on_connection, this,
        MHD_OPTION_END);
    if (!daemon) {
      const int code = errno;
      ::close(address.socket);
      refuse("start the HTTP server", std::strerror(code), "a free thread and descriptors",
             "Raise the limits of this process (ulimit -a)");
    }
    watch = std::thread([this] { close_slow_ones(); });
  }

  ~Impl() {
    ::close(MHD_quiesce_daemon(daemon));
    std::unique_lock held(mutex);
    stopping = true;
    const auto left = waiting;
    held.unlock();
    for (const auto& exchange : left) exchange->answer(error_reply(503, "The server is ending"));
    held.lock();
    changed.wait_for(held, kLastAnswers, [&] { return waiting.empty(); });
    held.unlock();
    MHD_stop_daemon(daemon);
    changed.notify_all();
    watch.join();
  }

  void close_slow_ones() {
    std::unique_lock held(mutex);
    while (!stopping) {
      const auto now = Clock::now();
      for (auto& [socket, deadline] : deadlines)
        if (deadline < now) {
          deadline = kNever;
          ::shutdown(socket, SHUT_RDWR);  // the library sees the end of the stream and closes
        }
      changed.wait_for(held, std::chrono::milliseconds(250));
    }
  }

  // ---- called by the library, on its thread ----

  static void* on_target(void*, const char* target, MHD_Connection*) {
    return new std::shared_ptr<Exchange>(new Exchange{.target = target});
  }

  static void on_connection(void* self, MHD_Connection* connection, void**,
                            MHD_ConnectionNotificationCode code) {
    auto& impl = *static_cast<Impl*>(self);
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
      return impl.set_deadline(connection, Clock::now() + std::chrono::seconds(impl.options.header_seconds));
    const std::scoped_lock held(impl.mutex);
    impl.deadlines.erase(socket_of(connection));  // before the library closes it
  }

  void set_deadline(MHD_Connection* connection, Clock::time_point deadline) {
    const std::scoped_lock held(mutex);
    deadlines[socket_of(connection)] = deadline;
  }

  static void on_completed(void* self, MHD_Connection* connection, void** context,
                           MHD_RequestTerminationCode) {
    const std::unique_ptr<std::shared_ptr<Exchange>> exchange(
        static_cast<std::shared_ptr<Exchange>*>(std::exchange(*context, nullptr)));
    auto& impl = *static_cast<Impl*>(self);
    impl.set_deadline(connection, Clock::now() + std::chrono::seconds(impl.options.idle_seconds));
    if (!exchange) return;
    {
      const std::scoped_lock held((*exchange)->mutex);
      (*exchange)->answered = true, (*exchange)->suspended = nullptr;
    }
    const std::scoped_lock held(impl.mutex);
    impl.waiting.erase(*exchange);
    if (impl.waiting.empty()) impl.changed.notify_all();
  }

  static MHD_Result on_request(void* self, MHD_Connection* connection, const char*, const char* method,
                               const char* version, const char* upload, std::size_t* upload_bytes,
                               void** context) {
    const std::shared_ptr<Exchange> exchange = *static_cast<std::shared_ptr<Exchange>*>(*context);
    auto& impl = *static_cast<Impl*>(self);
    try {
      if (!std::exchange(exchange->begun, true)) return impl.begin(*exchange, connection, method, version);
      if (*upload_bytes > 0)
        return impl.read(*exchange, connection, {upload, std::exchange(*upload_bytes, 0)});
      return impl.finish(exchange, connection);
    } catch (const std::exception&) {  // no memory
      return MHD_NO;
    }
  }

  // The most of a refused body that is read and dropped so that a client which sends first and reads later
  // sees its refusal; of one that is too large also because an operation's number may come last.
  std::int64_t most_dropped(const Exchange& exchange) const {
    if (!exchange.parts) return 2 * options.most_body + (1 << 20);
    if (exchange.length <= options.most_dropped) return options.most_dropped;
    return exchange.parts->is_message() ? exchange.length : 0;
  }

  MHD_Result begin(Exchange& exchange, MHD_Connection* connection, const char* method, const char* version) {
    set_deadline(connection, kNever);
    HttpRequest& request = exchange.request;
    request.method = method;
    MHD_get_connection_values_n(
        connection, MHD_HEADER_KIND,
        [](void* to, MHD_ValueKind, const char* name, std::size_t name_size, const char* value,
           std::size_t value_size) {
          add_header(*static_cast<HttpRequest*>(to), {name, name_size}, {value ? value : "", value_size});
          return MHD_YES;
        },
        &request);
    const Framing framing = framing_of(request);
    exchange.length = framing.length.value_or(0);
    exchange.refusal = refusal_of(exchange, framing, version);
    const bool asks_first = request.headers.contains("expect") && !exchange.parts;
    // Whoever may not ask must not hold a connection with a body that arrives byte by byte.
    if (exchange.refusal && request.too_large == 0)
      set_deadline(connection, Clock::now() + std::chrono::seconds(options.idle_seconds));
    const bool waits = framing.broken || asks_first;
    if (!exchange.refusal || (!waits && exchange.length <= most_dropped(exchange))) return MHD_YES;
    if (!waits) return cut_off(exchange, connection, *exchange.refusal);
    exchange.refusal->headers["Connection"] = "close";
    return send(connection, *std::move(exchange.refusal));
  }

  // Closed at once, a connection may lose the reply on the way to a client that still sends.
  MHD_Result cut_off(Exchange& exchange, MHD_Connection* connection, const HttpReply& reply) {
    send_early(connection, reply);
    set_deadline(connection, Clock::now() + kLastAnswers);
    exchange.cut_off = true;
    return MHD_YES;
  }

  std::optional<HttpReply> refusal_of(Exchange& exchange, const Framing& framing,
                                      const std::string& version) const {
    HttpRequest& request = exchange.request;
    if (const auto refused = admit ? admit(request) : nullptr) return std::move(*refused);
    if (framing.broken) return error_reply(400, framing.broken);
    if (version != "HTTP/1.1" && version != "HTTP/1.0") return error_reply(400, "Expected HTTP/1.1");
    if (!read_target(exchange.target, request)) return error_reply(400, "The path cannot be decoded");
    // A browser sends the name that its page came from, whatever address that name leads to.
    if (const auto host = request.headers.find("host");
        address.loopback && host != request.headers.end() && !is_local_host(host->second, options.host))
      return error_reply(421,
                         "This server listens for programs of its own machine: use localhost or 127.0.0.1");
    if (exchange.length > options.most_body) return too_large(exchange);
    if (framing.length != 0 && !is_known_type(request))
      return error_reply(415, "Expected a body of application/json or application/x-protobuf");
    return std::nullopt;
  }

  HttpReply too_large(Exchange& exchange) const {
    exchange.request.too_large = options.most_body;
    if (admit) exchange.parts.emplace(is_json(exchange.request));
    return error_reply(413, fmt::format("Expected a body of at most {} bytes", options.most_body));
  }

  MHD_Result read(Exchange& exchange, MHD_Connection* connection, std::string_view part) {
    HttpRequest& request = exchange.request;
    exchange.received += static_cast<std::int64_t>(part.size());
    if (exchange.cut_off) return exchange.received <= 2 * options.most_dropped ? MHD_YES : MHD_NO;
    if (!exchange.refusal && exchange.received > options.most_body) {
      exchange.refusal = too_large(exchange);
      const std::string before = std::exchange(request.body, {});
      if (exchange.parts) exchange.parts->add(before);
    }
    if (!exchange.refusal) request.body += part;
    if (exchange.parts) exchange.parts->add(part);
    return exchange.received <= most_dropped(exchange) ? MHD_YES
                                                       : cut_off(exchange, connection, refused(exchange));
  }

  // The reply to a refused request; to a body that is too large there may be a better one than the 413.
  HttpReply refused(Exchange& exchange) const {
    if (exchange.parts) {
      exchange.request.body = exchange.parts->body();
      if (const auto better = admit(exchange.request)) return std::move(*better);
    }
    return *std::move(exchange.refusal);
  }

  MHD_Result finish(const std::shared_ptr<Exchange>& exchange, MHD_Connection* connection) {
    if (exchange->cut_off) return MHD_NO;
    if (exchange->refusal) return send(connection, refused(*exchange));
    if (!std::exchange(exchange->dispatched, true)) dispatch(exchange);
    const std::scoped_lock held(exchange->mutex);
    if (exchange->reply) return send(connection, *std::move(exchange->reply));
    MHD_suspend_connection(connection);  // resumed by answer(); then finish() is called again
    exchange->suspended = connection;
    return MHD_YES;
  }

  void dispatch(const std::shared_ptr<Exchange>& exchange) {
    bool ends;
    {
      const std::scoped_lock held(mutex);
      ends = stopping;
      if (!ends) waiting.insert(exchange);
    }
    if (ends) return exchange->answer(error_reply(503, "The server is ending"));
    try {
      const std::shared_ptr<Exchange> last(exchange.get(), [exchange](Exchange* unanswered) {
        unanswered->answer(error_reply(500, "The server gave no answer"));
      });
      handler(exchange->request, [last](HttpReply reply) { last->answer(std::move(reply)); });
    } catch (const std::exception&) {
      exchange->answer(error_reply(500, "The server failed"));
    }
  }

  const HttpOptions options;
  const Admit admit;
  const Handler handler;
  Address address;
  MHD_Daemon* daemon = nullptr;
  std::thread watch;
  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  bool stopping = false;
  std::map<int, Clock::time_point> deadlines;   // of each connection's next headers, by its socket
  std::set<std::shared_ptr<Exchange>> waiting;  // given to the handler, the answer not yet sent
};

HttpServer::HttpServer(HttpOptions options, Admit admit, Handler handler)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(admit), std::move(handler))) {}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return impl_->address.port; }
std::int64_t HttpServer::connections() const {
  const std::scoped_lock held(impl_->mutex);
  return std::ssize(impl_->deadlines);
}

}  // namespace isograd::serve
