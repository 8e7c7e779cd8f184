// A Hugging Face tokenizer.json. The Python package `tokenizers` encodes and decodes in a child process.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utf8.h>

#include <fmt/format.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/python.hpp"
#include "base/refuse.hpp"
#include "data/companions.hpp"
#include "data/corpus.hpp"
#include "data/tokenizer_json_script.hpp"
#include "isograd/data.hpp"

namespace isograd {
namespace {

constexpr std::uint32_t kBos = 256, kEos = 257;

class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  std::int64_t vocabulary() const override { return 258; }
  std::int64_t bos() const override { return kBos; }
  std::int64_t eos() const override { return kEos; }

  std::vector<std::uint32_t> encode(std::string_view text) const override {
    std::vector<std::uint32_t> tokens;
    tokens.reserve(text.size() + 2);
    tokens.push_back(kBos);
    for (unsigned char byte : text) tokens.push_back(byte);
    tokens.push_back(kEos);
    return tokens;
  }

  std::string decode(std::span<const std::uint32_t> tokens) const override {
    std::string bytes, text;
    for (std::uint32_t token : tokens)
      if (token < 256) bytes.push_back(static_cast<char>(token));
    utf8::replace_invalid(bytes.begin(), bytes.end(), std::back_inserter(text));
    return text;
  }
};

}  // namespace

std::vector<float> Tokenizer::encode_conversation(std::string_view /*record*/,
                                                  std::vector<std::uint32_t>& /*tokens*/) const {
  refuse("data.tokenizer", "a tokenizer without a chat template (" + name() + ")",
         "a Hugging Face tokenizer.json with one, for records with messages",
         "Name that model's tokenizer.json in data.tokenizer");
}

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

namespace {

constexpr const char* kFile = "tokenizer.json";
constexpr const char* kConfigFile = "tokenizer_config.json";

// The Python process (tokenizer_json.py): one request, one answer at a time.
class Helper {
 public:
  explicit Helper(std::string where) : where_(std::move(where)), python_(find_python()) {
    int ends[2] = {-1, -1};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
      refuse(where_, std::strerror(errno), "a pair of sockets", "Raise the limit of open files (ulimit -n)");
    socket_ = ends[0];
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], 0);
    posix_spawn_file_actions_adddup2(&files, ends[1], 1);
    posix_spawn_file_actions_addopen(&files, 2, "/dev/null", O_WRONLY, 0);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // Ctrl-C is for this process
    std::string script = kTokenizerScript;
    char flag[] = "-c";
    char* arguments[] = {python_.data(), flag, script.data(), nullptr};
    const int error = posix_spawnp(&process_, python_.c_str(), &files, &attributes, arguments, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    close(ends[1]);
    if (error != 0) {
      close(socket_);
      no_package(std::string("starting it: ") + std::strerror(error));
    }
  }

  // The process ends when its input ends.
  ~Helper() {
    close(socket_);
    for (int i = 0; i < 200; ++i) {
      if (waitpid(process_, nullptr, WNOHANG) != 0) return;
      usleep(10'000);
    }
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  std::string ask(char request, std::string_view data) {
    // The slowest tokenizers encode about 100 kB a second.
    const auto patience = std::chrono::seconds(60 + data.size() / 10'000);
    until_ = std::chrono::steady_clock::now() + patience;
    std::string head(1, request);
    append_size(head, data.size());
    send_all(head);
    send_all(data);
    std::string answer = receive(kHead);
    std::uint64_t size = 0;
    std::memcpy(&size, answer.data() + 1, sizeof size);
    if (size > kMostBytes) refuse(where_, "an answer that is none", "tokens or text", kReport);
    std::string result = receive(size);
    if (answer[0] == 'm') no_package("no package " + result, result.substr(0, result.find('.')));
    if (answer[0] == 'b') throw BadLine{result, "messages that the tokenizer's chat template accepts"};
    if (answer[0] == 't')
      refuse(where_, result, "a chat template that marks what the assistant says",
             "Put {% generation %} and {% endgeneration %} around it in chat_template.jinja, next to the "
             "tokenizer, or learn all tokens (data.train_on = \"all\"), or write records with prompt and "
             "completion");
    if (answer[0] != 'o')
      refuse(where_, result, "a Hugging Face tokenizer.json and UTF-8 text", "Check data.tokenizer");
    return result;
  }

  static void append_size(std::string& text, std::uint64_t size) {
    text.append(reinterpret_cast<const char*>(&size), sizeof size);
  }

 private:
  static constexpr std::size_t kHead = 9;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 40;
  static constexpr const char* kReport = "Report it, with the version of the package tokenizers";

  [[noreturn]] void no_package(const std::string& found, const std::string& package = "tokenizers") const {
    refuse(where_, found + " (" + python_ + ")", "a Python with the package " + package,
           fmt::format("Install it (python3 -m pip install {}), or name a Python that has it in the "
                       "variable PYTHON",
                       package));
  }

  // Waits for `events`, at most a second per poll. Throws once the time is up.
  void wait(short events) {
    if (std::chrono::steady_clock::now() > until_)
      refuse(where_, "no answer from " + python_, "tokens within a minute", "Look at the machine's load");
    pollfd waiting{socket_, events, 0};
    poll(&waiting, 1, 1000);
  }

  void send_all(std::string_view data) {
    while (!data.empty()) {
      wait(POLLOUT);
      const ssize_t sent = send(socket_, data.data(), data.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0)
        data.remove_prefix(static_cast<std::size_t>(sent));
      else if (errno != EAGAIN && errno != EINTR)
        ended();
    }
  }

  std::string receive(std::size_t size) {
    std::string data;
    char buffer[1 << 16];
    while (data.size() < size) {
      wait(POLLIN);
      const ssize_t got = recv(socket_, buffer, std::min(sizeof buffer, size - data.size()), MSG_DONTWAIT);
      if (got > 0)
        data.append(buffer, static_cast<std::size_t>(got));
      else if (got == 0 || (errno != EAGAIN && errno != EINTR))
        ended();
    }
    return data;
  }

  [[noreturn]] void ended() const { no_package("a process that ended without an answer"); }

  std::string where_, python_;
  pid_t process_ = -1;
  int socket_ = -1;
  std::chrono::steady_clock::time_point until_;
};

class JsonTokenizer final : public Tokenizer {
 public:
  explicit JsonTokenizer(const fs::path& path)
      : where_("tokenizer " + path.string()),
        file_(path),
        folder_(fs::absolute(path).parent_path()),
        companions_(path.parent_path()) {
    const fs::path config = path.parent_path() / kConfigFile;
    if (fs::exists(config)) config_ = read_file(config);
    name_ = "tokenizer.json:" + checksum(file_.data(), file_.size());
    // The other ranks of a run need no more, so their process ends here.
    Helper helper(where_);
    const auto [facts, problem] = parse_json(load(helper));
    if (!problem.empty()) refuse(where_, problem, "facts about the tokenizer", "Report it");
    vocabulary_ = facts.value("vocabulary", std::int64_t{0});
    bos_ = facts.value("bos", std::int64_t{-1});
    eos_ = facts.value("eos", std::int64_t{-1});
    if (vocabulary_ < 1) refuse(where_, "no tokens", "a vocabulary", "Check data.tokenizer");
  }

  std::string name() const override { return name_; }
  std::int64_t vocabulary() const override { return vocabulary_; }
  std::int64_t bos() const override { return bos_; }
  std::int64_t eos() const override { return eos_; }

  std::vector<std::uint32_t> encode(std::string_view text) const override {
    const std::string answer = ask('e', text);
    std::vector<std::uint32_t> tokens(answer.size() / sizeof(std::uint32_t));
    std::memcpy(tokens.data(), answer.data(), tokens.size() * sizeof(std::uint32_t));
    return tokens;
  }

  std::vector<float> encode_conversation(std::string_view record,
                                         std::vector<std::uint32_t>& tokens) const override {
    if (file_.path().filename() != kFile)
      refuse(where_, "another file's name", "a file called tokenizer.json, for records with messages",
             "transformers applies the chat template with the tokenizer.json of the folder: name that one");
    std::string request;
    Helper::append_size(request, folder_.native().size());
    const std::string answer = ask('c', request.append(folder_.native()).append(record));
    constexpr std::size_t kBoth = sizeof(std::uint32_t) + sizeof(float);
    tokens.resize(answer.size() / kBoth);
    std::vector<float> weights(tokens.size());
    std::memcpy(tokens.data(), answer.data(), tokens.size() * sizeof(std::uint32_t));
    std::memcpy(weights.data(), answer.data() + tokens.size() * sizeof(std::uint32_t),
                weights.size() * sizeof(float));
    for (const std::uint32_t token : tokens)
      if (token >= vocabulary_)
        refuse(where_, fmt::format("token {} of a conversation", token),
               fmt::format("tokens below {}, the vocabulary of tokenizer.json", vocabulary_),
               "Save the tokenizer again (save_pretrained), so that its added tokens are in tokenizer.json");
    return weights;
  }

  std::string chat_template() const override { return companions_.fingerprint() + config_; }

  std::string decode(std::span<const std::uint32_t> tokens) const override {
    const std::string bytes =
        ask('d', {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(std::uint32_t)});
    std::string text;
    utf8::replace_invalid(bytes.begin(), bytes.end(), std::back_inserter(text));
    return text;
  }

  void write(const fs::path& directory) const override {
    write_file(directory / kFile, {reinterpret_cast<const char*>(file_.data()), file_.size()});
    // Otherwise transformers would choose a class by the model, which may add other tokens to a text.
    write_file(directory / kConfigFile,
               config_.empty() ? "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\"\n}\n" : config_);
    companions_.write(directory);
  }

 private:
  std::string load(Helper& helper) const {
    std::string request;
    Helper::append_size(request, file_.size());
    request.append(reinterpret_cast<const char*>(file_.data()), file_.size());
    return helper.ask('l', request + config_);
  }

  std::string ask(char request, std::string_view data) const {
    const std::lock_guard lock(mutex_);
    if (!helper_) {
      auto helper = std::make_unique<Helper>(where_);
      load(*helper);
      helper_ = std::move(helper);
    }
    return helper_->ask(request, data);
  }

  std::string where_;
  MappedFile file_;
  fs::path folder_;
  std::string config_;  // empty: no such file
  Companions companions_;
  std::string name_;
  std::int64_t vocabulary_ = 0, bos_ = -1, eos_ = -1;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<Helper> helper_;
};

}  // namespace

std::unique_ptr<Tokenizer> json_tokenizer(const fs::path& file) {
  return std::make_unique<JsonTokenizer>(file);
}

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name) {
  if (name == "bytes") return byte_tokenizer();
  return name.ends_with(".json") ? json_tokenizer(name) : sentencepiece_tokenizer(name);
}

}  // namespace isograd
