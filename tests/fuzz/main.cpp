// isograd_fuzz [--inputs N] [--seed S] [--only READER] [--input I] [--seconds S] [--megabytes M]: changed
// files for every reader of foreign files. Input I of seed S is the same file on every machine. Children
// read, so that one that dies or hangs is told from the others by its number; what was wrong is kept in a
// folder.
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <map>
#include <thread>

#include "base/files.hpp"
#include "base/print.hpp"
#include "fuzz/readers.hpp"
#include "isograd/error.hpp"

// One allocation above 2 GiB is a finding, as memory that is left is not: children end with _exit.
extern "C" const char* __asan_default_options() {
  return "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=2048:handle_abort=1:symbolize=1";
}

namespace isograd::fuzz {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// ---- changes of a sound file: what disks, networks and enemies do, and what counts and offsets are prone to
// ----

// Numbers by (seed, count): the same on every machine, unlike the standard's distributions.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {  // SplitMix64 (Steele, Lea and Flood 2014)
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t end) { return end == 0 ? 0 : bits() % end; }
  bool one_in(std::size_t many) { return below(many) == 0; }

 private:
  std::uint64_t state_;
};

constexpr std::size_t kLargestInput = std::size_t{1} << 20;

// The ends of types, their neighbours, and products that overflow.
constexpr std::uint64_t kEnds[] = {0,          1,          2,          127,        128,        255,
                                   256,        32767,      32768,      65535,      65536,      0x7FFFFFFF,
                                   0x80000000, 0xFFFFFFFF, 1ull << 32, 1ull << 40, 1ull << 53, 1ull << 60,
                                   1ull << 61, 1ull << 62, 1ull << 63, ~0ull,      ~0ull - 7};
constexpr std::string_view kNumbers =
    "0 -1 1e400 -0.0 1e-400 4294967296 9007199254740993 1152921504606846976 9223372036854775807 "
    "9223372036854775808 18446744073709551615 18446744073709551616 99999999999999999999999999 nan inf 1.5 null "
    "true \"\" [] {} ";

std::string any_number(Random& random) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < kNumbers.size(); begin = kNumbers.find(' ', begin) + 1)
    words.emplace_back(kNumbers.substr(begin, kNumbers.find(' ', begin) - begin));
  return words[random.below(words.size())];
}

// Headers decide, and they stand at the beginning.
std::size_t place(const std::string& text, Random& random) {
  const std::size_t size = text.size() + 1;
  return random.one_in(2) ? random.below(size) : random.below(std::min<std::size_t>(size, 512));
}

std::size_t length(const std::string& text, std::size_t at, Random& random) {
  const std::size_t most = random.one_in(4) ? text.size() : 16;
  return std::min(text.size() - at, 1 + random.below(most));
}

void put_end(std::string& text, std::size_t at, Random& random) {
  std::uint64_t value = kEnds[random.below(std::size(kEnds))];
  if (random.one_in(3)) value = text.size() + random.below(5) - 2;
  const std::size_t bytes = std::min<std::size_t>(std::size_t{1} << random.below(4), text.size() - at);
  const bool big_endian = random.one_in(3);
  for (std::size_t i = 0; i < bytes; ++i)
    text[at + i] = static_cast<char>(value >> (8 * (big_endian ? bytes - 1 - i : i)));
}

// A decimal number in the text becomes another.
bool replace_number(std::string& text, Random& random) {
  const std::size_t from = place(text, random);
  const std::size_t at = text.find_first_of("0123456789", from);
  if (at == std::string::npos) return false;
  std::size_t end = at;
  while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end]))) ++end;
  text.replace(at, end - at, any_number(random));
  return true;
}

void change(std::string& text, const std::string& other, const std::vector<std::string>& words,
            Random& random) {
  const std::size_t at = std::min(place(text, random), text.size());
  const std::size_t count = text.empty() ? 0 : length(text, at, random);
  const auto word = [&] { return words.empty() ? std::string("\0", 1) : words[random.below(words.size())]; };
  switch (random.below(15)) {
    case 0:
    case 1:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
      break;
    case 2:
      if (at < text.size()) text[at] = static_cast<char>(random.bits());
      break;
    case 3: {
      std::string noise(1 + random.below(16), '\0');
      for (char& c : noise) c = static_cast<char>(random.bits());
      text.insert(at, noise);
      break;
    }
    case 4: text.erase(at, count); break;
    case 5: text.insert(place(text, random), text.substr(at, count)); break;
    case 6:
      if (at < text.size()) put_end(text, at, random);
      break;
    case 7:
    case 8:
      if (!replace_number(text, random)) text.insert(at, word());
      break;
    case 9: text.insert(at, word()); break;
    case 10: text.replace(at, count, word()); break;
    case 11: text.resize(at); break;
    case 12: {  // the end of another file of the kind
      const std::size_t from = std::min(place(other, random), other.size());
      text = text.substr(0, at) + other.substr(from);
      break;
    }
    case 13: {  // a part or a word many times: nesting, long names, long lists
      const std::string part = random.one_in(2) ? word() : text.substr(at, std::min<std::size_t>(count, 64));
      std::string many;
      for (std::size_t i = 1 + random.below(random.one_in(4) ? 20'000 : 200);
           i > 0 && many.size() < kLargestInput; --i)
        many += part;
      text.insert(at, many);
      break;
    }
    default:
      std::fill_n(text.begin() + static_cast<std::ptrdiff_t>(at), count, random.one_in(2) ? '\0' : '\xff');
  }
}

// One to eight changes of `sound`; `other` is another sound file of the kind, `words` are what its format is
// made of.
std::string mutated(const std::string& sound, const std::string& other, const std::vector<std::string>& words,
                    Random& random) {
  std::string text = sound;
  for (std::size_t changes = random.one_in(3) ? 1 : 1 + random.below(8); changes > 0; --changes)
    change(text, other, words, random);
  if (text.size() > kLargestInput) text.resize(kLargestInput);
  return text;
}

// ---- the program ----

constexpr std::uint64_t kBatch = 1000;  // inputs of one child

// Messages of a child while it works.
struct Progress {
  std::atomic<std::uint64_t> input{0};    // the one that is being read
  std::atomic<bool> reading{false};       // false: between two inputs
  std::atomic<std::uint64_t> refused{0};  // of this child
};

struct Options {
  std::uint64_t inputs = 20'000, seed = 1;
  std::string only;
  std::int64_t input = -1;
  double cpu_seconds = 10;         // of one input; twelve times that in all, for one that sleeps
  std::uint64_t megabytes = 2048;  // of the process that reads it
};

struct Sound {
  fs::path file;  // in the reader's folder
  std::string bytes;
};

struct Counters {
  std::uint64_t read = 0, refused = 0, wrong = 0;
  double slowest = 0;  // CPU seconds
};

fs::path folder_of(const fs::path& root, const Reader& reader) {
  std::string name = reader.name;
  for (char& c : name)
    if (c == ' ') c = '_';
  return root / name;
}

std::vector<Sound> sound_files(const fs::path& folder) {
  std::vector<Sound> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) files.push_back({entry.path(), read_file(entry.path())});
  std::sort(files.begin(), files.end(), [](const Sound& a, const Sound& b) { return a.file < b.file; });
  return files;
}

// CPU time and resident memory of a process; zeros when it has just ended.
std::pair<double, std::uint64_t> used_by(pid_t process) {
  clockid_t clock;
  timespec time{};
  if (clock_getcpuclockid(process, &clock) != 0 || clock_gettime(clock, &time) != 0) return {};
  std::ifstream file(fmt::format("/proc/{}/statm", process));
  std::uint64_t size = 0, resident = 0;
  file >> size >> resident;
  return {static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec),
          resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE))};
}

class Fuzzer {
 public:
  explicit Fuzzer(Options options) : options_(std::move(options)) {
    std::string name = (fs::temp_directory_path() / "isograd-fuzz-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no folder for inputs");
    root_ = name;
    void* page = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw std::runtime_error("no shared page");
    progress_ = new (page) Progress;
    for (const Reader& reader : readers()) {
      if (options_.only.empty() ? reader.planted : reader.name != options_.only) continue;
      const std::string missing = reader.missing ? reader.missing() : "";
      if (missing.empty())
        chosen_.push_back(&reader);
      else
        print(stdout, fmt::format("{} is left out: this machine lacks {}\n", reader.name, missing));
    }
    if (chosen_.empty()) throw std::runtime_error("no reader of that name that this machine can run");
  }
  ~Fuzzer() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }

  int run() {
    // LibTorch and its threads stay out of this process, which forks.
    if (in_child([&] { prepare(); }) != 0) return 2;
    for (const Reader* reader : chosen_) sound_.push_back(sound_files(folder_of(root_, *reader)));
    if (options_.input >= 0) {
      read_one(static_cast<std::uint64_t>(options_.input), /*alone=*/true);
      return 0;
    }
    print(stdout,
          fmt::format("{} inputs of {} readers, seed {}\n", options_.inputs, chosen_.size(), options_.seed));
    std::fflush(stdout);
    for (std::uint64_t next = 0; next < options_.inputs;) next = one_child(next);
    return report();
  }

 private:
  template <typename Work>
  int in_child(Work work) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("no child");
    if (child == 0) {
      int status = 1;
      try {
        at::set_num_threads(1);
        work();
        status = 0;
      } catch (const std::exception& error) {
        print(stderr, std::string(error.what()) + "\n");
      }
      _exit(status);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }

  void prepare() {
    for (const Reader* reader : chosen_) {
      const fs::path folder = folder_of(root_, *reader);
      fs::create_directories(folder);
      reader->prepare(folder);
      for (const Sound& sound : sound_files(folder)) {
        try {
          reader->read(sound.file);
        } catch (const std::exception& error) {
          throw std::runtime_error("a sound file was refused: " + sound.file.string() + ": " + error.what());
        }
      }
    }
  }

  std::size_t reader_of(std::uint64_t input) const { return input % chosen_.size(); }

  // The changed file in its place; the place.
  const Sound& write(std::uint64_t input) const {
    const std::size_t index = reader_of(input);
    const Reader& reader = *chosen_[index];
    const auto& files = sound_[index];
    Random random(options_.seed * 0x9E3779B97F4A7C15 + input);
    const Sound &sound = files[random.below(files.size())], &other = files[random.below(files.size())];
    std::string bytes = mutated(sound.bytes, other.bytes, reader.words, random);
    if (reader.repair && random.one_in(2)) bytes = reader.repair(std::move(bytes));
    put(sound.file, bytes);
    return sound;
  }

  static void put(const fs::path& file, const std::string& bytes) {
    fs::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
  }

  void read_one(std::uint64_t input, bool alone) {
    const Sound& sound = write(input);
    const Reader& reader = *chosen_[reader_of(input)];
    progress_->input = input;
    progress_->reading = true;
    try {
      reader.read(sound.file);
      if (alone) print(stdout, "read: " + printable(sound.file.string()) + "\n");
    } catch (const std::exception& error) {
      if (exit_status(error) != 2) {
        print(stderr, fmt::format("not foreseen: {}\n", error.what()));
        _exit(3);
      }
      if (alone) print(stdout, fmt::format("refused: {}\n", error.what()));
      ++progress_->refused;
    }
    progress_->reading = false;
    put(sound.file, sound.bytes);  // other readers find it sound
  }

  // Reads from `next` on in a child; where to go on, behind what it ended at.
  std::uint64_t one_child(std::uint64_t next) {
    const std::uint64_t end = std::min(next + kBatch, options_.inputs);
    const fs::path log = root_ / "log";
    progress_->input = next;
    progress_->reading = false;
    progress_->refused = 0;
    std::fflush(stdout);
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("no child");
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int file = open(log.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
      dup2(file, STDERR_FILENO);
      at::set_num_threads(1);
      for (std::uint64_t input = next; input < end; ++input) read_one(input, false);
      progress_->input = end;
      _exit(0);
    }
    std::uint64_t input = next;
    double began_cpu = 0;
    auto began = Clock::now();
    std::string wrong;
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      const auto [cpu, bytes] = used_by(child);
      const std::uint64_t now = progress_->input;
      if (now != input) {
        note(input, now, cpu - began_cpu);
        input = now, began_cpu = cpu, began = Clock::now();
      }
      const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
      if (progress_->reading &&
          (cpu - began_cpu > options_.cpu_seconds || seconds > 12 * options_.cpu_seconds))
        wrong = fmt::format("{:.0f} s of CPU time, {:.0f} s in all", cpu - began_cpu, seconds);
      if (bytes >> 20 > options_.megabytes) wrong = fmt::format("{} MiB of memory", bytes >> 20);
      if (!wrong.empty()) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const std::uint64_t reached = progress_->input;
    refused_ += progress_->refused;
    if (wrong.empty() && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
      note(input, end, 0);
      return end;
    }
    if (wrong.empty())
      wrong = WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                                  : fmt::format("status {}", WEXITSTATUS(status));
    note(input, reached, 0);
    keep(reached, wrong, log);
    return reached + 1;
  }

  void note(std::uint64_t from, std::uint64_t to, double cpu) {
    for (std::uint64_t input = from; input < to; ++input) ++tallies_[chosen_[reader_of(input)]->name].read;
    if (to == from + 1) {
      double& slowest = tallies_[chosen_[reader_of(from)]->name].slowest;
      slowest = std::max(slowest, cpu);
    }
  }

  // The input, what it was made from and what was said, in a folder that stays.
  void keep(std::uint64_t input, const std::string& wrong, const fs::path& log) {
    const Reader& reader = *chosen_[reader_of(input)];
    ++tallies_[reader.name].wrong;
    ++wrong_;
    const fs::path kept = fs::current_path() / fmt::format("fuzz-findings/{}-{}-{}", options_.seed, input,
                                                           folder_of("", reader).string());
    fs::create_directories(kept);
    const Sound& sound = write(input);
    std::error_code ignored;
    fs::copy_file(sound.file, kept / sound.file.filename(), fs::copy_options::overwrite_existing, ignored);
    fs::copy_file(log, kept / "log", fs::copy_options::overwrite_existing, ignored);
    put(sound.file, sound.bytes);
    std::string said = read_file(log);
    if (said.size() > 3000) said.resize(3000);
    print(stdout,
          fmt::format("WRONG: {}, input {} (--input {} --seed {}{}): {}\n  {}\n{}\n", reader.name, input,
                      input, options_.seed, options_.only.empty() ? "" : " --only '" + options_.only + "'",
                      wrong, printable(kept.string()), said));
    std::fflush(stdout);
  }

  int report() const {
    for (const auto& [name, counters] : tallies_)
      print(stdout,
            fmt::format("{:<16} {:>7} inputs, {} wrong{}\n", name, counters.read + counters.wrong,
                        counters.wrong,
                        counters.slowest > 0.1 ? fmt::format(", slowest {:.1f} s", counters.slowest) : ""));
    print(stdout, fmt::format("{} inputs with seed {}: {} refused, {} wrong\n", options_.inputs,
                              options_.seed, refused_, wrong_));
    return wrong_ == 0 ? 0 : 1;
  }

  Options options_;
  fs::path root_;
  Progress* progress_ = nullptr;
  std::vector<const Reader*> chosen_;
  std::vector<std::vector<Sound>> sound_;
  std::map<std::string, Counters> tallies_;
  std::uint64_t refused_ = 0, wrong_ = 0;
};

Options options_of(int argc, char** argv) {
  Options options;
  CLI::App program("Changed files for every reader of foreign files.", "isograd_fuzz");
  program.add_option("--inputs", options.inputs);
  program.add_option("--seed", options.seed);
  program.add_option("--only", options.only)->type_name("READER");
  program.add_option("--input", options.input, "this one alone");
  program.add_option("--seconds", options.cpu_seconds, "CPU time of one input");
  program.add_option("--megabytes", options.megabytes);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(program.exit(error) == 0 ? 0 : 2);
  }
  return options;
}

}  // namespace
}  // namespace isograd::fuzz

int main(int argc, char** argv) {
  try {
    return isograd::fuzz::Fuzzer(isograd::fuzz::options_of(argc, argv)).run();
  } catch (const std::exception& error) {
    isograd::print(stderr, std::string(error.what()) + "\n");
    return 2;
  }
}
