// HttpServer over real sockets of the loopback: plain POSIX clients, every wait with a limit.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <random>
#include <thread>

#include "base/error_testing.hpp"
#include "serve/http/http.hpp"

namespace isograd::serve {
namespace {

using namespace std::chrono_literals;
using error_testing::error_of;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

struct Answer {
  int status = 0;  // 0: the connection ended without one
  std::string head, body;
};

class Client {
 public:
  explicit Client(int port) {
    socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval limit{.tv_sec = 10, .tv_usec = 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    sockaddr_in address{};
    address.sin_family = AF_INET, address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Client() { close(); }
  Client(Client&& other) noexcept
      : connected(other.connected),
        socket_(std::exchange(other.socket_, -1)),
        read_(std::move(other.read_)) {}
  Client& operator=(Client&&) = delete;
  void close() {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  }
  bool send(std::string_view text) {
    while (!text.empty()) {
      const ssize_t done = ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
      if (done <= 0) return false;
      text.remove_prefix(static_cast<std::size_t>(done));
    }
    return true;
  }
  bool post(const std::string& path, const std::string& body, const std::string& headers = "") {
    return send("POST " + path +
                " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n" + headers + "\r\n" + body);
  }
  Answer receive() {
    while (read_.find("\r\n\r\n") == read_.npos)
      if (!more()) return {};
    Answer answer;
    const std::size_t end = read_.find("\r\n\r\n") + 4;
    answer.head = read_.substr(0, end);
    read_.erase(0, end);
    answer.status = std::atoi(answer.head.c_str() + 9);
    if (answer.status == 100) return receive();
    const std::size_t at = answer.head.find("Content-Length: ");
    EXPECT_NE(at, std::string::npos) << answer.head;
    if (at == std::string::npos) return answer;
    const std::size_t length = std::strtoul(answer.head.c_str() + at + 16, nullptr, 10);
    while (read_.size() < length)
      if (!more()) return {};
    answer.body = read_.substr(0, length);
    read_.erase(0, length);
    return answer;
  }
  // Reads and drops a whole answer; its last bytes, and its length.
  std::pair<std::string, std::size_t> drop(const std::function<void()>& between) {
    while (read_.find("\r\n\r\n") == read_.npos)
      if (!more()) return {};
    const std::size_t at = read_.find("Content-Length: "), end = read_.find("\r\n\r\n") + 4;
    const std::size_t length = at == read_.npos ? 0 : std::strtoul(read_.c_str() + at + 16, nullptr, 10);
    std::size_t got = read_.size() - end;
    while (got < length) {
      read_.clear();
      if (!more()) return {};
      got += read_.size();
      between();
    }
    return {std::exchange(read_, {}), got};
  }
  bool ended() {  // true: the server closed the connection
    read_.clear();
    while (more()) read_.clear();
    return errno != EAGAIN;
  }
  bool connected;

 private:
  bool more() {
    char part[1 << 16];
    errno = 0;
    const ssize_t got = ::recv(socket_, part, sizeof(part), 0);
    if (got <= 0) return false;
    read_.append(part, static_cast<std::size_t>(got));
    return true;
  }
  int socket_ = -1;
  std::string read_{};
};

Answer ask(int port, const std::string& request) {
  Client client(port);
  client.send(request);
  return client.receive();
}

// Answers with method, path, query and body.
void echo(const HttpRequest& request, const Respond& respond) {
  std::string text = request.method + " " + request.path;
  for (const auto& [name, value] : request.query) text += " " + name + "=" + value;
  respond({.body = text + "|" + request.body});
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// Keeps what waits.
struct Waiting {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Respond> responds;
  void add(Respond respond) {
    const std::scoped_lock held(mutex);
    responds.push_back(std::move(respond));
    changed.notify_all();
  }
  bool wait_for(std::size_t count) {
    std::unique_lock held(mutex);
    return changed.wait_for(held, 10s, [&] { return responds.size() >= count; });
  }
};

TEST(Http, KeepAliveServesManyRequests) {
  const HttpServer server({}, {}, echo);
  Client client(server.port());
  for (int i = 0; i < 500; ++i) {
    const std::string body = std::string(static_cast<std::size_t>(i * 37 % 3000), 'b') + std::to_string(i);
    ASSERT_TRUE(client.post("/a%20b%2Fc?x=1&y=%41+b", body));
    const Answer answer = client.receive();
    ASSERT_EQ(answer.status, 200);
    ASSERT_EQ(answer.body, "POST /a b/c x=1 y=A b|" + body);
    ASSERT_THAT(answer.head, HasSubstr("Content-Type: application/json"));
  }
  EXPECT_EQ(server.connections(), 1);
}

TEST(Http, PipelinedRequestsAreAnsweredInOrder) {
  const HttpServer server({}, {}, echo);
  Client client(server.port());
  std::string all;
  for (int i = 0; i < 100; ++i)
    all += "POST /" + std::to_string(i) +
           " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
  ASSERT_TRUE(client.send(all));
  for (int i = 0; i < 100; ++i) ASSERT_EQ(client.receive().body, "POST /" + std::to_string(i) + "|{}");
}

TEST(Http, ABodyOfManyMegabytesAndAReplyOfTheSameSize) {
  const HttpServer server({}, {}, [](const HttpRequest& request, const Respond& respond) {
    respond({.type = "application/x-protobuf", .body = request.body, .headers = {{"X-Mine", "yes"}}});
  });
  std::string body(20 << 20, '\0');
  for (std::size_t i = 0; i < body.size(); ++i) body[i] = static_cast<char>(i * 2654435761u >> 13);
  Client client(server.port());
  std::thread writer([&] { client.post("/", body); });
  const Answer answer = client.receive();
  writer.join();
  EXPECT_EQ(answer.status, 200);
  EXPECT_TRUE(answer.body == body);
  EXPECT_THAT(answer.head, HasSubstr("X-Mine: yes"));
}

TEST(Http, AFileIsSentPieceByPiece) {
  std::string path = (std::filesystem::temp_directory_path() / "isograd-http-XXXXXX").string();
  const int file = ::mkstemp(path.data());
  ASSERT_GE(file, 0);
  constexpr std::size_t kFileBytes = 300 << 20;
  ASSERT_EQ(::ftruncate(file, kFileBytes), 0);
  ASSERT_EQ(::pwrite(file, "end", 3, kFileBytes - 3), 3);
  ::close(file);
  const HttpServer server({}, {}, [&](const HttpRequest& request, const Respond& respond) {
    respond({.type = "application/octet-stream", .body = {}, .file = path + request.path.substr(1)});
  });
  Client client(server.port());
  client.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const std::int64_t before = resident_bytes();
  std::int64_t most = 0;
  const auto [last, length] = client.drop([&] { most = std::max(most, resident_bytes() - before); });
  EXPECT_EQ(length, kFileBytes);
  EXPECT_TRUE(last.ends_with("end"));
  std::printf("a file of 300 MiB: %.1f MiB\n", static_cast<double>(most) / (1 << 20));
#if !defined(ISOGRAD_SANITIZE_ADDRESS) && !defined(ISOGRAD_SANITIZE_THREAD)  // they keep what is freed
  EXPECT_LT(most, 16 << 20);
#endif
  client.send("GET /absent HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_EQ(client.receive().status, 404);
  std::filesystem::remove(path);
}

TEST(Http, FiveHundredLongPollsAreAnsweredLaterByOtherThreads) {
  Waiting waiting;
  const HttpServer server({}, {}, [&](const HttpRequest& request, Respond respond) {
    request.path == "/now" ? respond({.body = "now"}) : waiting.add(std::move(respond));
  });
  std::vector<Client> clients;
  for (int i = 0; i < 500; ++i) {
    clients.emplace_back(server.port());
    ASSERT_TRUE(clients.back().post("/wait", "{}"));
  }
  ASSERT_TRUE(waiting.wait_for(500));
  EXPECT_EQ(ask(server.port(), "GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n").body, "now");
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  std::this_thread::sleep_for(500ms);
  getrusage(RUSAGE_SELF, &after);
  const auto micros = [](const rusage& use) {
    return 1e6 * static_cast<double>(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           static_cast<double>(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
  };
  EXPECT_LT(micros(after) - micros(before), 25000) << "suspended requests take time";
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::size_t i = t; i < 500; i += 4) {
        waiting.responds[i]({.status = 408, .body = "{}"});
        waiting.responds[i]({.status = 200, .body = "twice"});  // the first one counts
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (Client& client : clients) {
    const Answer answer = client.receive();
    ASSERT_EQ(answer.status, 408);
    ASSERT_EQ(answer.body, "{}");
  }
}

TEST(Http, AnAnswerThatComesWhileTheHandlerRunsIsSent) {
  std::vector<std::thread> threads;
  {
    const HttpServer server({}, {}, [&](const HttpRequest&, const Respond& respond) {
      threads.emplace_back([respond] { respond({.body = "other thread"}); });
    });
    Client client(server.port());
    for (int i = 0; i < 300; ++i) {
      client.post("/", "{}");
      ASSERT_EQ(client.receive().body, "other thread");
    }
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Http, WithoutAnAnswerOrWithAnExceptionItIs500) {
  const HttpServer server({}, {}, [](const HttpRequest& request, const Respond&) {
    if (request.path == "/throw") throw std::runtime_error("secret");
  });
  for (const char* path : {"/drop", "/throw"}) {
    const Answer answer =
        ask(server.port(), std::string("GET ") + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_EQ(answer.status, 500);
    EXPECT_THAT(answer.body, ::testing::Not(HasSubstr("secret")));
  }
}

TEST(Http, AServerThatEndsAnswersWhatWaitsWith503) {
  Waiting waiting;
  std::vector<Client> clients;
  const auto begun = Clock::now();
  {
    const HttpServer server({}, {},
                            [&](const HttpRequest&, Respond respond) { waiting.add(std::move(respond)); });
    for (int i = 0; i < 50; ++i) {
      clients.emplace_back(server.port());
      clients.back().post("/", "{}");
    }
    ASSERT_TRUE(waiting.wait_for(50));
    for (int i = 0; i < 10; ++i) clients[static_cast<std::size_t>(i)].close();  // clients that are gone
  }
  EXPECT_LT(Clock::now() - begun, 5s);
  for (std::size_t i = 10; i < clients.size(); ++i) EXPECT_EQ(clients[i].receive().status, 503);
  for (const Respond& respond : waiting.responds) respond({});  // too late: nothing happens
}

TEST(Http, SlowHeadersAreEnded) {
  const HttpServer server({.header_seconds = 1}, {}, echo);
  Client silent(server.port()), slow(server.port());
  const auto begun = Clock::now();
  std::atomic<bool> over{false};
  std::thread drip([&] {
    slow.send("POST / HTTP/1.1\r\nX: ");
    while (!over && slow.send("x")) std::this_thread::sleep_for(50ms);
  });
  EXPECT_TRUE(silent.ended());
  drip.join();
  over = true;
  const auto took = Clock::now() - begun;
  EXPECT_GT(took, 900ms);
  EXPECT_LT(took, 4s);
  EXPECT_EQ(server.connections(), 0);
}

TEST(Http, SlowBodiesOfRefusedRequestsAreEnded) {
  const auto refused = [](const HttpRequest&) {
    return std::make_unique<HttpReply>(HttpReply{.status = 401, .body = {}});
  };
  const HttpServer server({.idle_seconds = 1}, refused, echo);
  Client slow(server.port());
  const auto begun = Clock::now();
  slow.send("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n");
  while (Clock::now() - begun < 8s && slow.send("x")) std::this_thread::sleep_for(50ms);
  EXPECT_LT(Clock::now() - begun, 5s);
}

TEST(Http, AnIdleConnectionIsEndedAndALongPollIsNot) {
  Waiting waiting;
  const HttpServer server(
      {.idle_seconds = 1, .header_seconds = 1}, {}, [&](const HttpRequest& request, Respond respond) {
        request.path == "/wait" ? waiting.add(std::move(respond)) : respond({.body = "now"});
      });
  Client idle(server.port()), poll(server.port());
  idle.post("/", "{}");
  EXPECT_EQ(idle.receive().body, "now");
  poll.post("/wait", "{}");
  EXPECT_TRUE(idle.ended());
  std::this_thread::sleep_for(1500ms);
  ASSERT_TRUE(waiting.wait_for(1));
  waiting.responds[0]({.body = "later"});
  EXPECT_EQ(poll.receive().body, "later");
}

TEST(Http, HalfABodyIsNoRequest) {
  std::atomic<int> called{0};
  const HttpServer server({.idle_seconds = 1}, {}, [&](const HttpRequest& request, const Respond& respond) {
    if (request.path == "/half") ++called;
    respond({});
  });
  {
    Client client(server.port());
    client.send(
        "POST /half HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{\"a\"");
  }
  {
    Client client(server.port());
    client.send(
        "POST /half HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"a");
  }
  EXPECT_EQ(ask(server.port(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status, 200);
  // The library may see that they ended only when it looks for idle connections.
  for (int i = 0; i < 200 && server.connections() > 0; ++i) std::this_thread::sleep_for(20ms);
  EXPECT_EQ(server.connections(), 0);
  EXPECT_EQ(called, 0);
}

TEST(Http, ABodyThatIsTooLargeIsKnownByItsShortParts) {
  std::atomic<int> unseen = 0;
  const auto told = [&](const HttpRequest& request) -> std::unique_ptr<HttpReply> {
    if (request.too_large == 0) return nullptr;
    unseen += 1;
    return std::make_unique<HttpReply>(HttpReply{.status = 200, .body = request.body});
  };
  constexpr std::size_t kMostDropped = 5 << 20;
  const HttpServer server({.most_body = 3000, .most_dropped = kMostDropped}, told, echo);
  const auto field = [](char tag, const std::string& value) {
    return std::string{tag, static_cast<char>(0x80 | (value.size() & 127)),
                       static_cast<char>(value.size() >> 7)} +
           value;
  };
  // Also beyond what is dropped of other refusals, and of a body whose length nobody knows.
  for (const std::size_t length : {3001, 2 << 20, 6 << 20}) {
    const std::string long_text(length, 'x');
    const std::string json = R"({"a": "m]\"}", "data": [{"b": ",", "c": ")" + long_text + R"("}, 2], ")" +
                             long_text + R"(": 1, "b": [1, {}] , "n": -3})";
    std::string message = field(10, "m") + "\x10\x07";
    while (message.size() < length) message += field(26, "ab") + field(26, std::string(2000, 'x'));
    const std::string last =
        "\x41"
        "12345678\x4d"
        "1234\x30\x01";
    message += last + "\x30\x02";
    const std::pair<std::string, std::string> bodies[] = {
        {json, R"({"a": "m]\"}", "b": [1, {}] , "n": -3})"},
        {message, field(10, "m") + "\x10\x07" + field(26, "ab") + last},
        {long_text, "{}"},
        {std::string(length, '\xff'), ""}};
    for (std::size_t i = 0; i < std::size(bodies); ++i) {
      const auto& [body, expected] = bodies[i];
      std::string head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/";
      head += i % 2 ? "x-protobuf\r\n" : "json\r\n";
      std::string chunks;
      for (std::size_t at = 0; at < body.size(); at += 60000) {
        const std::string chunk = body.substr(at, 60000);
        char size[20];
        std::snprintf(size, sizeof(size), "%zx\r\n", chunk.size());
        chunks += size + chunk + "\r\n";
      }
      const std::string counted = "Content-Length: " + std::to_string(body.size()) + "\r\n";
      for (const std::string& sent :
           {counted + "\r\n" + body, counted + "Expect: 100-continue\r\n\r\n" + body,
            "Transfer-Encoding: chunked\r\n\r\n" + chunks + "0\r\n\r\n"}) {
        if (length > kMostDropped && sent.starts_with("Transfer-Encoding")) continue;
        const auto reply = ask(server.port(), head + sent);
        EXPECT_EQ(reply.status, 200) << length << " " << i;
        EXPECT_EQ(reply.body, expected) << length << " " << i;
      }
    }
  }
  // Bytes that can be no message are answered before the rest of them comes.
  const auto reply = ask(server.port(),
                         "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
                         "Content-Length: 10000000000\r\n\r\n" +
                             std::string(1000, '\0'));
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body, "");
  // One that does not end is answered and cut off; what it was about is known all the same.
  const int before = unseen;
  Client endless(server.port());
  endless.send(
      "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: "
      "chunked\r\n\r\n9\r\n{\"n\": -3,\r\n");
  while (endless.send("10000\r\n" + std::string(1 << 16, 'x') + "\r\n")) {
  }
  EXPECT_EQ(endless.receive().body, R"({"n": -3})");
  EXPECT_EQ(unseen, before + 1);
}

TEST(Http, BodiesThatAreTooLargeAre413) {
  const HttpServer server({.most_body = 1000, .most_dropped = 1 << 20}, {}, echo);
  const std::string head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  for (const char* length : {"1001", "10000000000", "9223372036854775807"}) {
    const auto begun = Clock::now();
    Client client(server.port());
    client.send(head + "Content-Length: " + length + "\r\n\r\n" +
                (std::string(length) == "1001" ? std::string(1001, 'x') : ""));
    EXPECT_EQ(client.receive().status, 413) << length;
    EXPECT_LT(Clock::now() - begun, 2s);
  }
  EXPECT_THAT(ask(server.port(), head + "Content-Length: 18446744073709551616\r\n\r\n").status,
              AnyOf(400, 413));
  EXPECT_EQ(ask(server.port(), head + "Content-Length: 1000\r\n\r\n" + std::string(1000, 'x')).status, 200);
  Client chunked(server.port());
  std::string text = head + "Transfer-Encoding: chunked\r\n\r\n";
  for (int i = 0; i < 11; ++i) text += "64\r\n" + std::string(100, 'x') + "\r\n";
  chunked.send(text + "0\r\n\r\n");
  EXPECT_EQ(chunked.receive().status, 413);
  // Without end: the connection is closed, and memory does not grow.
  Client endless(server.port());
  endless.send(head + "Transfer-Encoding: chunked\r\n\r\n");
  const std::string part = "10000\r\n" + std::string(1 << 16, 'x') + "\r\n";
  int parts = 0;
  while (parts < 1000 && endless.send(part)) ++parts;
  EXPECT_LT(parts, 200);
  EXPECT_EQ(endless.receive().status, 413);
  // One that sends it all before it reads sees the reply too.
  Client late(server.port());
  late.send(head + "Transfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 25; ++i, std::this_thread::sleep_for(5ms)) ASSERT_TRUE(late.send(part)) << i;
  ASSERT_TRUE(late.send("0\r\n\r\n"));
  EXPECT_EQ(late.receive().status, 413);
}

TEST(Http, AdmitRefusesBeforeTheBodyAndTheClientSeesIt) {
  const auto admit = [](const HttpRequest& request) -> std::unique_ptr<HttpReply> {
    EXPECT_TRUE(request.body.empty());
    if (request.headers.contains("x-api-key") && request.headers.at("x-api-key") == "good") return nullptr;
    return std::make_unique<HttpReply>(HttpReply{.status = 401, .body = "{}"});
  };
  const HttpServer server({.most_body = 1 << 20}, admit, echo);
  Client client(server.port());
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(client.post("/", std::string(100000, 'x'), i % 2 ? "X-Api-Key: good\r\n" : ""));
    ASSERT_EQ(client.receive().status, i % 2 ? 200 : 401) << i;  // one connection serves both
  }
  for (const char* odd :
       {"GET /%zz HTTP/1.1\r\nHost: localhost", "GET / HTTP/1.1\r\nHost: evil.example",
        "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked",
        "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2",
        "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000000"})
    EXPECT_EQ(ask(server.port(), std::string(odd) + "\r\n\r\n{}").status, 401) << odd;
  // A client that asks first sends no body.
  EXPECT_EQ(ask(server.port(),
                "POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 1000\r\n\r\n")
                .status,
            401);
  EXPECT_EQ(ask(server.port(),
                "POST / HTTP/1.1\r\nHost: localhost\r\nX-API-Key: good\r\nContent-Type: application/json\r\n"
                "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}")
                .status,
            200);
}

TEST(Http, ForeignHostsAreRefusedOnTheLoopback) {
  const HttpServer server({}, {}, echo);
  const auto status = [&](const std::string& host) {
    return ask(server.port(), "GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n").status;
  };
  for (const char* host :
       {"localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "127.8.9.1", "[::1]", "[::1]:80"})
    EXPECT_EQ(status(host), 200) << host;
  for (const char* host :
       {"evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
        "[::2]", "[::1", "128.0.0.1", "0.0.0.0", "localhost@evil", "localhost, evil.example"})
    EXPECT_EQ(status(host), 421) << host;
  EXPECT_THAT(ask(server.port(), "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n").status,
              AnyOf(400, 421));
  const HttpServer open({.host = "0.0.0.0"}, {}, echo);
  EXPECT_EQ(ask(open.port(), "GET / HTTP/1.1\r\nHost: gpu-7.example\r\n\r\n").status, 200);
}

TEST(Http, OnlyJsonAndProtobufBodiesAreTaken) {
  const HttpServer server({}, {}, echo);
  const auto status = [&](const std::string& type, const std::string& body) {
    return ask(server.port(), "POST / HTTP/1.1\r\nHost: localhost\r\n" + type +
                                  "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body)
        .status;
  };
  for (const char* type : {"application/json", "Application/JSON; charset=utf-8", "application/x-protobuf",
                           "application/protobuf"})
    EXPECT_EQ(status(std::string("Content-Type: ") + type + "\r\n", "{}"), 200) << type;
  for (const char* type :
       {"text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx", ""})
    EXPECT_EQ(status(std::string("Content-Type: ") + type + "\r\n", "{}"), 415) << type;
  EXPECT_EQ(status("", "{}"), 415);
  EXPECT_EQ(status("", ""), 200);
  EXPECT_EQ(status("Content-Type: text/plain\r\n", ""), 200);
}

TEST(Http, OddRequestsAreServedOr4xx) {
  const HttpServer server({}, {}, echo);
  const auto status = [&](const std::string& text) { return ask(server.port(), text).status; };
  EXPECT_EQ(status("GET / HTTP/1.0\r\n\r\n"), 200);
  EXPECT_EQ(status("GET / HTTP/1.1\r\n\r\n"), 400) << "without Host";
  const std::string post = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
  EXPECT_EQ(status(post + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
            400);
  EXPECT_EQ(status(post + "Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
            400);
  EXPECT_EQ(status(post + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), 400);
  EXPECT_EQ(status(post + "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"), 400);
  for (const char* length : {"-1", "2x", "x", "0x2"})
    EXPECT_EQ(status(post + "Content-Length: " + length + "\r\n\r\n{}"), 400) << length;
  EXPECT_EQ(status(post + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"), 200);
  EXPECT_EQ(status("GET /a%00b HTTP/1.1\r\nHost: localhost\r\n\r\n"), 400);
  for (const char* target : {"/%", "/%4", "/%zz", "/?a=%0", "*", "http://evil/", "/%-1"})
    EXPECT_EQ(status("GET " + std::string(target) + " HTTP/1.1\r\nHost: localhost\r\n\r\n"), 400) << target;
  EXPECT_EQ(ask(server.port(), "GET /%252e%252e HTTP/1.1\r\nHost: localhost\r\n\r\n").body, "GET /%2e%2e|")
      << "decoded once";
  EXPECT_THAT(
      status("GET / HTTP/1.1\r\nHost: localhost\r\nX-API-Key: " + std::string(1 << 17, 'k') + "\r\n\r\n"),
      AnyOf(400, 413, 431));
  EXPECT_THAT(status("GET /" + std::string(1 << 17, 'k') + " HTTP/1.1\r\nHost: localhost\r\n\r\n"),
              AnyOf(400, 414, 431));
}

TEST(Http, TwoThousandIdleConnectionsCostLessThan64MiB) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max < 5000) GTEST_SKIP() << "at most " << limit.rlim_max << " descriptors";
  const rlimit more{.rlim_cur = std::max<rlim_t>(limit.rlim_cur, 5000), .rlim_max = limit.rlim_max};
  setrlimit(RLIMIT_NOFILE, &more);
  const HttpServer server({}, {}, echo);
  EXPECT_EQ(ask(server.port(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status, 200);
  const std::int64_t before = resident_bytes();
  std::vector<Client> clients;
  for (int i = 0; i < 2000; ++i) {
    clients.emplace_back(server.port());
    ASSERT_TRUE(clients.back().connected) << i;
    clients.back().post("/", "{}");
    ASSERT_EQ(clients.back().receive().status, 200);
  }
  EXPECT_EQ(server.connections(), 2000);
  const std::int64_t grown = resident_bytes() - before;
  std::printf("2,000 idle connections: %.1f MiB\n", static_cast<double>(grown) / (1 << 20));
#if !defined(ISOGRAD_SANITIZE_ADDRESS) && !defined(ISOGRAD_SANITIZE_THREAD)  // they take memory of their own
  EXPECT_LT(grown, 64 << 20);
#endif
  EXPECT_EQ(ask(server.port(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status, 200);
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(Http, BeyondItsConnectionsAServerLetsOthersWait) {
  const HttpServer server({.connections = 4}, {}, echo);
  std::vector<Client> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back(server.port());
    clients.back().post("/", "{}");
    ASSERT_EQ(clients.back().receive().status, 200);
  }
  Client fifth(server.port());
  fifth.post("/fifth", "{}");
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(server.connections(), 4);
  clients.clear();
  EXPECT_EQ(fifth.receive().body, "POST /fifth|{}");
}

TEST(Http, RandomBytesNeverEndTheServer) {
  const HttpServer server({.most_body = 10000}, {}, echo);
  const unsigned seed = 11;
  std::mt19937 random(seed);
  const std::vector<std::string> valid{
      "POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\n{\"\":1}",
      "POST /a?b=%20 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{} \r\n0\r\nT: x\r\n\r\n",
      "GET / HTTP/1.0\r\nX: 1\r\n y\r\nExpect: 100-continue\r\n\r\n"};
  for (int i = 0; i < 1000; ++i) {
    std::string text;
    if (i % 4 == 0) {
      text.resize(random() % 300);
      for (char& byte : text) byte = static_cast<char>(random());
    } else {
      text = valid[random() % valid.size()];
      for (unsigned changes = random() % 6; changes > 0 && !text.empty(); --changes) {
        const std::size_t at = random() % text.size();
        switch (random() % 3) {
          case 0: text[at] = static_cast<char>(random()); break;
          case 1: text.erase(at, random() % 8); break;
          default: text.insert(at, text.substr(random() % text.size(), random() % 30));
        }
      }
    }
    Client client(server.port());
    client.send(text);
    if (i % 5 == 0) client.close();
  }
  Client client(server.port());
  client.post("/still", "{}");
  EXPECT_EQ(client.receive().body, "POST /still|{}") << "seed " << seed;
}

TEST(Http, AnAddressThatCannotBeHadIsRefused) {
  const HttpServer server({}, {}, echo);
  EXPECT_THAT(error_of([&] { HttpServer({.port = server.port()}, {}, echo); }), HasSubstr("in use"));
  EXPECT_THAT(error_of([] { HttpServer({.host = "203.0.113.7"}, {}, echo); }), HasSubstr("203.0.113.7"));
  EXPECT_THAT(error_of([] { HttpServer({.host = "no.such.host.invalid"}, {}, echo); }),
              HasSubstr("listen on"));
}

}  // namespace
}  // namespace isograd::serve
