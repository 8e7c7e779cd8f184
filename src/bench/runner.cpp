#include "bench/runner.hpp"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>
#include <thread>

#include "base/child.hpp"
#include "base/files.hpp"
#include "base/json.hpp"
#include "base/output.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "base/shell.hpp"

namespace isograd {

using BenchClock = std::chrono::steady_clock;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Turn, seconds, losses, norms, exposed, parts, profile)

namespace {

double seconds_since(BenchClock::time_point start) {
  return std::chrono::duration<double>(BenchClock::now() - start).count();
}

// A line of /proc/self/status in bytes, e.g. VmRSS.
double status_bytes(const std::string& bench, const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return 1024 * std::stod(line.substr(name.size() + 1));
  refuse("bench " + bench, "no " + name + " in /proc/self/status", "Linux's account of a process's memory",
         "Run it on Linux");
}

// The output of a command; empty when it fails.
std::string output_of(const std::vector<std::string>& command) {
  std::string output;
  if (std::FILE* process = popen((shell_words(command) + " 2>/dev/null").c_str(), "re")) {
    char buffer[4096];
    for (std::size_t size; (size = std::fread(buffer, 1, sizeof buffer, process)) > 0;)
      output.append(buffer, size);
    if (pclose(process) != 0) output.clear();
  }
  return output;
}

int make_pipe(const fs::path& path) {
  // Opened for both directions: opening does not wait for the other end.
  const int file = mkfifo(path.c_str(), 0600) == 0 ? open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  if (file < 0)
    refuse(path.string(), std::strerror(errno), "a named pipe",
           "Point TMPDIR to a folder where pipes can be made");
  return file;
}

std::FILE* open_pipe(const fs::path& path, const char* mode) {
  std::FILE* file = std::fopen(path.c_str(), mode);
  if (!file)
    refuse("a side of isograd bench", "cannot open " + path.string(), "a pipe made by isograd bench",
           "Run `isograd bench step` or `isograd bench optim`, which start this");
  return file;
}

}  // namespace

nlohmann::ordered_json& Bench::record(const std::string& of, double ours, double peer,
                                      const std::string& peer_name, const std::string& unit, double ratio) {
  records.push_back({{"bench", name},
                     {"case", of},
                     {"ours", ours},
                     {"peer", peer},
                     {"peer_name", peer_name},
                     {"unit", unit},
                     {"ratio", ratio},
                     {"processor", processor_text()}});
  return records.back();
}

void Bench::refuse_comparison(const std::string& why) {
  comparable = false;
  const std::string text = fmt::format("  NOT COMPARABLE: {}\n", why);
  options.json == kStandardOutput ? print(stderr, text) : say(text);
}

void Bench::say(const std::string& text) {
  if (options.json == kStandardOutput) return;
  print(stdout, text);
  std::fflush(stdout);
}

BenchVerb comm_verb(), context_verb(), expert_verb(), loss_verb(), optim_verb(), pipeline_verb(),
    product_verb(), ranking_verb(), serve_bench_verb(), step_verb(), tensor_verb(),
    wrapped_verb();  // in cases/

const std::vector<BenchVerb>& bench_table() {
  static const std::vector<BenchVerb> table = {
      comm_verb(),     wrapped_verb(), step_verb(),    product_verb(), tensor_verb(), expert_verb(),
      pipeline_verb(), optim_verb(),   context_verb(), ranking_verb(), loss_verb(),   serve_bench_verb()};
  return table;
}

int run_bench(const BenchVerb& verb, const BenchOptions& options) {
  Bench bench{.name = verb.name, .options = options};
  bench.say(fmt::format("on {}\n", printable(processor_text())));
  if (!verb.packages.empty()) require_packages(verb.name, options.python, verb.packages);
  verb.run(bench);
  if (!options.json.empty()) write_output(options.json, bench.records.dump(2) + "\n");
  return bench.comparable ? 0 : 1;
}

std::string ranks_text(int ranks) { return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"); }

std::string fixed(double value, int digits) { return fmt::format("{:.{}f}", value, digits); }

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(place);
  const auto high = std::min(low + 1, values.size() - 1);
  return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
}

std::string spread(const std::vector<double>& values) {
  const double part = values.empty() ? 0 : (quantile(values, 0.75) - quantile(values, 0.25)) / median(values);
  return fixed(100 * part, 1) + "%";
}

double seconds_of(const std::function<void()>& work) {
  const auto start = BenchClock::now();
  work();
  return seconds_since(start);
}

double peak_growth(const std::string& bench, const std::function<void()>& work) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew
  const double before = status_bytes(bench, "VmRSS");
  work();
  return status_bytes(bench, "VmHWM") - before;
}

double relative_difference(double a, double b) {
  const double difference = std::abs(a - b) / std::max(std::abs(b), 1e-300);
  return std::isnan(difference) ? HUGE_VAL : difference;
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || a.size() != b.size()) return HUGE_VAL;
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, relative_difference(a[i], b[i]));
  return largest;
}

void by_turns(std::size_t sides, const std::function<bool(std::size_t)>& more,
              const std::function<void(std::size_t)>& turn) {
  std::vector<std::size_t> order(sides);
  for (std::size_t round = 0; more(round); ++round) {
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(round / 2 % sides), order.end());
    if (round % 2 != 0) std::reverse(order.begin(), order.end());
    for (const std::size_t side : order) turn(side);
  }
}

std::vector<std::vector<double>> race(const std::vector<std::function<double()>>& sides,
                                      const std::function<bool(std::size_t)>& more) {
  std::vector<std::vector<double>> seconds(sides.size());
  by_turns(sides.size(), more, [&](std::size_t side) { seconds[side].push_back(sides[side]()); });
  return seconds;
}

std::function<bool(std::size_t)> until(double seconds, std::size_t fewest) {
  return [=, start = BenchClock::now()](std::size_t round) {
    return round < fewest || seconds_since(start) < seconds;
  };
}

void write_case(const fs::path& exchange, const nlohmann::ordered_json& description) {
  write_file(exchange / "case.json", description.dump(2) + "\n");
}

nlohmann::json read_case(const fs::path& exchange) {
  return parse_json(read_file(exchange / "case.json")).value;
}

void require_packages(const std::string& bench, const std::string& wish,
                      const std::vector<std::string>& packages) {
  const std::string python = find_python(wish), where = "isograd bench " + bench;
  // Nothing is imported, and nothing of the working folder, which `python -c` puts first, is found.
  const std::string script = fmt::format(
      "import importlib.util, sys\nsys.path[:] = [p for p in sys.path if p]\n"
      "print('isograd', *(n for n in ('{}',) if not importlib.util.find_spec(n)))",
      fmt::join(packages, "', '"));
  const std::string needed =
      fmt::format("a Python that has {}, which the peer needs", fmt::join(packages, " and "));
  std::istringstream words(output_of({python, "-W", "ignore", "-c", script}));
  std::string word;
  if (!(words >> word) || word != "isograd")
    refuse(where, fmt::format("{}, which does not run as a Python", python), needed,
           "Name one with --python or in the variable PYTHON");
  std::vector<std::string> missing, install = {python, "-m", "pip", "install"};
  while (words >> word) {
    missing.push_back(word);
    install.push_back(word == "torch"               ? "torch==2.13.0"
                      : word == "imbalanced_losses" ? "imbalanced-losses==0.6.0"
                      : word == "peft"              ? "peft==0.21.2"
                      : word == "tinker"            ? "tinker==0.38.0"
                                                    : word);
  }
  if (!missing.empty())
    refuse(where, fmt::format("{} without {}", python, fmt::join(missing, " and ")), needed,
           fmt::format("Run `{}`, or name another Python with --python", shell_words(install)));
}

std::string find_peer(const std::string& script) {
  const char* elsewhere = std::getenv("ISOGRAD_PEERS");  // of a program that was built on another machine
  const fs::path path = fs::path(elsewhere ? elsewhere : ISOGRAD_PEERS) / script;
  if (!fs::exists(path))
    refuse("isograd bench", "no " + path.string(), "the peer's script",
           "Run a build whose source tree is still there, or name its bench/peers in ISOGRAD_PEERS");
  return path.string();
}

std::string find_module() {
  const fs::path folder = fs::path(bench_self()).parent_path().parent_path() / "python";
  if (!fs::exists(folder / "isograd_comm.so"))
    refuse("isograd bench", "no isograd_comm.so in " + folder.string(),
           "the Python module, which carries isograd into the peer's processes",
           "Run ./dev build isograd_python_comm; it needs Python's headers (python3-dev)");
  return folder.string();
}

std::string bench_self() { return fs::read_symlink("/proc/self/exe").string(); }

Side our_side(const std::string& verb, const std::string& name, const std::string& title, int ranks) {
  return {.name = name, .title = title, .ranks = ranks, .starts = {bench_self(), "bench", verb}};
}

Side peer_side(const std::string& python, const std::string& script, const std::string& name,
               const std::string& title, int ranks, std::vector<std::string> more) {
  return {.name = name,
          .title = title,
          .ranks = ranks,
          .starts = {find_python(python), "-W", "ignore", find_peer(script)},
          .more = std::move(more)};
}

Contestant::Contestant(const Side& side, const fs::path& exchange)
    : where_("isograd bench, side '" + side.name + "' (" + side.starts.front() + ")"),
      log_(exchange / (side.name + ".log")) {
  for (int rank = 0; rank < side.ranks; ++rank)
    go_.push_back(make_pipe(exchange / fmt::format("{}.go.{}", side.name, rank)));
  done_ = make_pipe(exchange / (side.name + ".done"));
  std::vector<std::string> words = side.starts;
  words.insert(words.end(), {exchange.string(), std::to_string(side.ranks), side.name});
  words.insert(words.end(), side.more.begin(), side.more.end());
  // One thread a rank on both sides, whatever the caller's environment says.
  for (const char* variable : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}) setenv(variable, "1", 1);
  const int log = open(log_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (log < 0) refuse_file("write", log_, errno);
  process_ =
      start_child(words[0], words,
                  {.out = log,
                   .err = log,
                   .own_group = true,  // so that its ranks can be ended together
                   .unless_executed = words[0] + " could not be started; expected a program. Name the Python "
                                                 "interpreter that has torch in the variable PYTHON\n"});
  const int failed = errno;
  close(log);
  if (process_ < 0)
    refuse("starting " + words[0], std::strerror(failed), "room for one more process",
           "Compare fewer ranks, or raise the limit on processes (ulimit -u)");
}

Contestant::~Contestant() {
  for (int file : go_) close(file);
  const auto start = BenchClock::now();
  while (running() && seconds_since(start) < 20) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (running()) {
    kill(-process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  if (done_ >= 0) close(done_);
}

bool Contestant::running() {
  if (process_ <= 0) return false;
  if (waitpid(process_, nullptr, WNOHANG) == 0) return true;
  kill(-process_, SIGKILL);  // ranks that outlived the process that started them
  process_ = -1;
  return false;
}

void Contestant::fail(const std::string& found) {
  std::string log = read_file(log_);
  constexpr std::size_t kShown = 2000;
  if (log.size() > kShown) log = "..." + log.substr(log.size() - kShown);
  if (!log.empty()) print(stderr, log + "\n");  // its lines stay lines, which a message has none of
  refuse(where_, found, "a line for each turn",
         "Read its output above; the peer needs a Python with torch (variable PYTHON)");
}

void Contestant::start(char kind) {
  for (int file : go_)
    if (write(file, &kind, 1) != 1) fail(std::strerror(errno));
}

Turn Contestant::answer() {
  constexpr double kPatience = 600;
  const auto start = BenchClock::now();
  while (unread_.find('\n') == std::string::npos) {
    pollfd waiting{done_, POLLIN, 0};
    if (poll(&waiting, 1, 200) > 0) {
      char buffer[4096];
      const auto count = read(done_, buffer, sizeof buffer);
      if (count > 0) unread_.append(buffer, static_cast<std::size_t>(count));
    } else if (!running()) {
      fail("it ended");
    } else if (seconds_since(start) > kPatience) {
      fail(fmt::format("no answer for {} s", kPatience));
    }
  }
  const auto end = unread_.find('\n');
  const auto [line, problem] = parse_json(std::string_view(unread_).substr(0, end));
  unread_.erase(0, end + 1);
  if (!problem.empty() || !line.contains("seconds") || !line.contains("losses"))
    fail(problem.empty() ? "a line without seconds or losses" : problem);
  return line.get<Turn>();
}

TurnPipes::TurnPipes(const fs::path& exchange, const std::string& name, int rank)
    : go_(open_pipe(exchange / fmt::format("{}.go.{}", name, rank), "rb"), &std::fclose),
      done_(rank == 0 ? open_pipe(exchange / (name + ".done"), "w") : nullptr, &std::fclose) {}

bool TurnPipes::wait() { return (turn_ = std::fgetc(go_.get())) != EOF; }

void TurnPipes::answer(const Turn& turn) {
  if (!done_) return;
  std::fputs((nlohmann::json(turn).dump() + "\n").c_str(), done_.get());
  std::fflush(done_.get());
}

std::vector<SideResult> take_turns(const std::vector<Side>& sides, const fs::path& exchange, double seconds,
                                   bool on_device, std::size_t fewest_rounds) {
  std::vector<std::unique_ptr<Contestant>> contestants;
  std::vector<SideResult> results;
  for (const Side& side : sides) {
    contestants.push_back(std::make_unique<Contestant>(side, exchange));
    results.push_back({.side = side});
  }
  for (std::size_t i = 0; on_device && i < sides.size(); ++i) contestants[i]->start();
  for (std::size_t i = 0; i < sides.size(); ++i)
    results[i].first = on_device ? contestants[i]->answer() : contestants[i]->turn();
  by_turns(sides.size(), until(seconds, fewest_rounds), [&](std::size_t i) {
    const Turn turn = contestants[i]->turn();
    SideResult& result = results[i];
    const auto append = [](std::vector<double>& all, const std::vector<double>& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    append(result.seconds, turn.seconds), append(result.losses, turn.losses);
    append(result.exposed, turn.exposed);
    result.parts.resize(turn.parts.size());
    for (std::size_t part = 0; part < turn.parts.size(); ++part)
      result.parts[part].push_back(turn.parts[part]);
    result.rounds.push_back(quantile(turn.seconds, 0.5));
  });
  for (std::size_t i = 0; on_device && i < sides.size(); ++i) {
    contestants[i]->start(kProfiledTurn);
    results[i].profile = contestants[i]->answer().profile;
  }
  return results;
}

std::string Ratio::text() const { return fmt::format("{:.2f} ({:.2f} .. {:.2f})", median, lowest, highest); }

Ratio faster(const SideResult& ours, const SideResult& peer) {
  Ratio ratio{.median = peer.median() / ours.median(), .lowest = HUGE_VAL, .highest = 0};
  for (std::size_t i = 0; i < ours.rounds.size(); ++i) {
    ratio.lowest = std::min(ratio.lowest, peer.rounds.at(i) / ours.rounds[i]);
    ratio.highest = std::max(ratio.highest, peer.rounds.at(i) / ours.rounds[i]);
  }
  return ratio;
}

std::string disagreement(const SideResult& side, const SideResult& reference, const Agreement& allowed) {
  const Turn &a = side.first, &b = reference.first;
  if (a.losses.size() != b.losses.size())
    return fmt::format("{} reports {} losses a turn, {} reports {}", side.side.title, a.losses.size(),
                       reference.side.title, b.losses.size());
  const auto of_first = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.empty() || y.empty() ? HUGE_VAL : relative_difference(x.front(), y.front());
  };
  const double first_loss = of_first(a.losses, b.losses), losses = relative_difference(a.losses, b.losses),
               norm = of_first(a.norms, b.norms);
  if (first_loss <= allowed.first_loss && losses <= allowed.losses && norm <= allowed.norm) return "";
  return fmt::format(
      "{} differs from {}: first losses by {:.2g} ({:.2g} allowed), those of the first turn by {:.2g} ({:.2g} "
      "allowed), first norm by {:.2g} ({:.2g} allowed)",
      side.side.title, reference.side.title, first_loss, allowed.first_loss, losses, allowed.losses, norm,
      allowed.norm);
}

}  // namespace isograd
