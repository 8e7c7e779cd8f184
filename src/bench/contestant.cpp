#include "bench/contestant.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"

extern char** environ;

namespace isograd {
namespace {

int make_pipe(const std::filesystem::path& path) {
  // Opened for both directions: opening does not wait for the other end.
  const int file = mkfifo(path.c_str(), 0600) == 0 ? open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  if (file < 0)
    refuse(path.string(), std::strerror(errno), "a named pipe",
           "Point TMPDIR to a folder where pipes can be made");
  return file;
}

// One thread a rank on both sides, whatever the caller's environment says.
std::vector<std::string> environment() {
  std::vector<std::string> variables{"OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1"};
  for (char** variable = environ; *variable; ++variable) {
    const std::string text = *variable;
    if (!text.starts_with("OMP_NUM_THREADS=") && !text.starts_with("MKL_NUM_THREADS="))
      variables.push_back(text);
  }
  return variables;
}

std::FILE* open_pipe(const std::filesystem::path& path, const char* mode) {
  std::FILE* file = std::fopen(path.c_str(), mode);
  if (!file)
    refuse("a side of isograd bench", "cannot open " + path.string(), "a pipe made by isograd bench",
           "Run `isograd bench step` or `isograd bench optim`, which start this");
  return file;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

// Process groups of the sides that run. A signal that ends this program ends them: a side that still starts
// would wait at its pipe for ever.
std::array<std::atomic<pid_t>, 64> process_groups{};
constexpr int kEnding[] = {SIGINT, SIGTERM, SIGHUP};

void end_sides(int signal) {
  for (const auto& each : process_groups)
    if (const pid_t group = each.load(); group > 0) kill(-group, SIGKILL);
  raise(signal);  // SA_RESETHAND: as if nobody had handled it
}

void exchange_side(pid_t from, pid_t to) {
  static const bool handled = [] {
    struct sigaction action {};
    action.sa_handler = end_sides;
    action.sa_flags = SA_RESETHAND;
    for (const int signal : kEnding) sigaction(signal, &action, nullptr);
    return true;
  }();
  for (auto& side : process_groups)
    if (pid_t expected = from; handled && side.compare_exchange_strong(expected, to)) return;
}

}  // namespace

Contestant::Contestant(std::string name, std::vector<std::string> command, std::filesystem::path exchange,
                       int ranks)
    : name_(std::move(name)), command_(std::move(command)), exchange_(std::move(exchange)) {
  for (int rank = 0; rank < ranks; ++rank)
    go_.push_back(make_pipe(exchange_ / (name_ + ".go." + std::to_string(rank))));
  done_ = make_pipe(exchange_ / (name_ + ".done"));

  const std::string log = (exchange_ / (name_ + ".log")).string();
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // In a process group, so that its ranks can be ended together. A signal waits until the group is known
  // here.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
  sigset_t ending, before;
  sigemptyset(&ending);
  for (const int signal : kEnding) sigaddset(&ending, signal);
  pthread_sigmask(SIG_BLOCK, &ending, &before);
  posix_spawnattr_setsigmask(&attributes, &before);
  auto arguments = pointers(command_);
  auto variables = environment();
  const int error = posix_spawnp(&process_, command_[0].c_str(), &files, &attributes, arguments.data(),
                                 pointers(variables).data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error == 0) exchange_side(0, process_);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    process_ = -1;
    refuse("starting " + command_[0], std::strerror(error), "a program",
           "Name the Python interpreter that has torch in the variable PYTHON");
  }
}

Contestant::~Contestant() {
  for (int file : go_) close(file);
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (running() && std::chrono::steady_clock::now() < patience)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (running()) {
    kill(-process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    exchange_side(process_, 0);
  }
  if (done_ >= 0) close(done_);
}

bool Contestant::running() {
  if (process_ <= 0) return false;
  if (waitpid(process_, nullptr, WNOHANG) == 0) return true;
  kill(-process_, SIGKILL);  // ranks that outlived the process that started them
  exchange_side(process_, 0);
  process_ = -1;
  return false;
}

void Contestant::fail(const std::string& found) {
  std::string log = read_file(exchange_ / (name_ + ".log"));
  constexpr std::size_t kShown = 2000;
  if (log.size() > kShown) log = "..." + log.substr(log.size() - kShown);
  if (!log.empty()) print(stderr, log + "\n");  // its lines stay lines, which a message has none of
  refuse("isograd bench, side '" + name_ + "' (" + command_[0] + ")", found, "a line for each turn",
         "Read its output above; the peer needs a Python with torch (variable PYTHON)");
}

void Contestant::start(char kind) {
  for (int file : go_)
    if (write(file, &kind, 1) != 1) fail(std::strerror(errno));
}

Turn Contestant::answer(double patience) {
  const auto start = std::chrono::steady_clock::now();
  while (unread_.find('\n') == std::string::npos) {
    pollfd waiting{done_, POLLIN, 0};
    if (poll(&waiting, 1, 200) > 0) {
      char buffer[4096];
      const auto count = read(done_, buffer, sizeof buffer);
      if (count > 0) unread_.append(buffer, static_cast<std::size_t>(count));
    } else if (!running()) {
      fail("it ended");
    } else if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > patience) {
      fail("no answer for " + std::to_string(patience) + " s");
    }
  }
  const auto end = unread_.find('\n');
  const auto [line, problem] = parse_json(std::string_view(unread_).substr(0, end));
  unread_.erase(0, end + 1);
  if (!problem.empty() || !line.contains("seconds") || !line.contains("losses"))
    fail(problem.empty() ? "a line without seconds or losses" : problem);
  const auto numbers = [&](const char* key) { return line.value(key, std::vector<double>{}); };
  return {numbers("seconds"), numbers("losses"), numbers("norms"),
          numbers("exposed"), numbers("parts"),  line.contains("profile") ? line["profile"].dump() : ""};
}

TurnPipes::TurnPipes(const std::filesystem::path& exchange, const std::string& name, int rank)
    : go_(open_pipe(exchange / (name + ".go." + std::to_string(rank)), "rb"), &std::fclose),
      done_(rank == 0 ? open_pipe(exchange / (name + ".done"), "w") : nullptr, &std::fclose) {}

bool TurnPipes::wait() {
  return (turn_ = std::fgetc(go_.get())) != EOF;
}

void TurnPipes::answer(const nlohmann::json& line) {
  if (!done_) return;
  std::fputs((line.dump() + "\n").c_str(), done_.get());
  std::fflush(done_.get());
}

}  // namespace isograd
