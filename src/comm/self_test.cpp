#include <ATen/ATen.h>
#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <optional>

#include "base/refuse.hpp"
#include "comm/group_impl.hpp"

namespace isograd {
namespace {

using Rows = Group::Rows;
using Answer = std::function<double(std::int64_t index)>;

// Input values: below 4093, so that sums over 4096 ranks are exact, and too fine for 16 bits.
double value(int rank, int slot, std::int64_t index) {
  return static_cast<double>((rank * 1009 + slot * 101 + index * 7 + 1) % 4093);
}

class Exam {
 public:
  Exam(Group group, c10::Device device) : group_(std::move(group)), device_(device) {}

  void run() {
    reductions();
    copies();
    parts_and_messages();
    barrier();
    agree();
  }

 private:
  // A rank finds this first: whether there is anything, the number of the collective, the element, its value
  // and the right one.
  using Finding = std::array<double, 5>;

  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  // Runs one collective; its slot is its number.
  void ask(const char* name, const std::function<void(int slot)>& collective) {
    names_.push_back(name);
    try {
      collective(static_cast<int>(names_.size()));
    } catch (const MissingOperation&) {  // on all ranks alike, before anything is sent
    }
  }

  at::Tensor tensor(std::int64_t numel, const Answer& content) const {
    at::Tensor result = at::empty({numel}, at::kFloat);
    for (std::int64_t i = 0; i < numel; ++i) result.data_ptr<float>()[i] = static_cast<float>(content(i));
    return result.to(device_);
  }
  at::Tensor input(std::int64_t numel, int slot) const {
    return tensor(numel, [&](std::int64_t i) { return value(rank(), slot, i); });
  }
  // For outputs: reused memory might already hold the answer that a collective fails to write.
  at::Tensor blank(std::int64_t numel) const { return at::full({numel}, -1.0f, device_); }

  void check(const at::Tensor& output, const Answer& answer) {
    const at::Tensor found = output.cpu();
    for (std::int64_t i = 0; i < found.numel(); ++i) {
      const double got = static_cast<double>(found.data_ptr<float>()[i]), expected = answer(i);
      if (got != expected) return note(i, got, expected);
    }
  }
  void note(std::int64_t index, double found, double expected) {
    if (finding_[0] == 0)
      finding_ = {1, static_cast<double>(names_.size() - 1), static_cast<double>(index), found, expected};
  }

  // Every rank's value of this element, combined.
  double combined(int slot, std::int64_t index, ReduceOp op = ReduceOp::kSum) const {
    double result = value(0, slot, index);
    for (int r = 1; r < size(); ++r) {
      const double other = value(r, slot, index);
      result = op == ReduceOp::kSum   ? result + other
               : op == ReduceOp::kMax ? std::max(result, other)
                                      : std::min(result, other);
    }
    return result;
  }

  void reductions() {
    const std::int64_t numel = 2 * size() + 3;
    for (const auto& one : {std::pair("all_reduce(sum)", ReduceOp::kSum),
                            {"all_reduce(max)", ReduceOp::kMax},
                            {"all_reduce(min)", ReduceOp::kMin}})
      ask(one.first, [&](int slot) {
        const at::Tensor x = input(numel, slot);
        group_.all_reduce(x, one.second);
        check(x, [&](auto i) { return combined(slot, i, one.second); });
      });
    ask("all_reduce(product)", [&](int) {  // of each element, one rank has a factor
      const auto factor = [](auto i) { return static_cast<double>(i % 7 + 2); };
      const at::Tensor x = tensor(numel, [&](auto i) { return i % size() == rank() ? factor(i) : 1; });
      group_.all_reduce(x, ReduceOp::kProduct);
      check(x, factor);
    });
    const int root = size() - 1;
    ask("reduce(sum)", [&](int slot) {
      const at::Tensor x = input(numel, slot);
      group_.reduce(x, root);
      check(x, [&](auto i) { return rank() == root ? combined(slot, i) : value(rank(), slot, i); });
    });
    for (const std::int64_t rest : {0, 1})
      ask(rest ? "reduce_scatter(sum) of uneven rows" : "reduce_scatter(sum)", [&](int slot) {
        const Rows rows = split_rows(3 * size() + rest, size());
        const at::Tensor x = input(3 * size() + rest, slot);
        const at::Tensor output = blank(rows[static_cast<std::size_t>(rank())]);
        group_.reduce_scatter_async(output, x, ReduceOp::kSum, rows).wait();
        const std::int64_t first = 3 * rank() + (rank() > 0 ? rest : 0);  // rank 0 has the extra row
        check(output, [&](auto i) { return combined(slot, first + i); });
      });
  }

  void copies() {
    const int root = size() - 1;
    ask("broadcast", [&](int slot) {
      const at::Tensor x = input(5, slot);
      group_.broadcast(x, root);
      check(x, [&](auto i) { return value(root, slot, i); });
    });
    const auto by_rank = [](int slot) {
      return [slot](std::int64_t i) { return value(static_cast<int>(i / 5), slot, i % 5); };
    };
    ask("all_gather", [&](int slot) {
      const at::Tensor output = blank(5 * size());
      group_.all_gather_async(output.view({size(), 5}), input(5, slot)).wait();
      check(output, by_rank(slot));
    });
    ask("all_gather of uneven rows", [&](int slot) {
      Rows rows(static_cast<std::size_t>(size()), 5);
      rows.back() = 2;
      const at::Tensor output = blank(5 * size() - 3);
      group_.all_gather_rows_async(output, input(rows[static_cast<std::size_t>(rank())], slot), rows).wait();
      check(output, by_rank(slot));
    });
    ask("gather", [&](int slot) {
      const at::Tensor output = rank() == root ? blank(5 * size()) : at::Tensor();
      group_.gather_async(rank() == root ? output.view({size(), 5}) : output, input(5, slot), root).wait();
      if (rank() == root) check(output, by_rank(slot));
    });
    ask("scatter", [&](int slot) {
      const at::Tensor output = blank(5);
      group_.scatter(output, rank() == root ? input(5 * size(), slot).view({size(), 5}) : at::Tensor(), root);
      check(output, [&](auto i) { return value(root, slot, 5 * rank() + i); });
    });
  }

  void parts_and_messages() {
    ask("all_to_all", [&](int slot) {
      const at::Tensor output = blank(2 * size());
      group_.all_to_all_async(output, input(2 * size(), slot)).wait();
      check(output, [&](auto i) { return value(static_cast<int>(i / 2), slot, 2 * rank() + i % 2); });
    });
    ask("all_to_all of uneven rows", [&](int slot) {  // every rank sends 1 + r % 2 rows to rank r
      const auto rows_to = [](std::int64_t r) { return 1 + r % 2; };
      const auto rows_before = [](std::int64_t r) { return r + r / 2; };
      Rows to, from(static_cast<std::size_t>(size()), rows_to(rank()));
      for (int r = 0; r < size(); ++r) to.push_back(rows_to(r));
      const std::int64_t mine = rows_to(rank()), first = rows_before(rank());
      const at::Tensor output = blank(mine * size());
      group_.all_to_all_async(output, input(rows_before(size()), slot), from, to).wait();
      check(output, [&](auto i) { return value(static_cast<int>(i / mine), slot, first + i % mine); });
    });
    ask("send and recv", [&](int slot) {
      const int left = (rank() + size() - 1) % size(), right = (rank() + 1) % size();
      const at::Tensor output = blank(5);
      Pending received = group_.recv_async(output, left);
      group_.send_async(input(5, slot), right).wait();
      received.wait();
      check(output, [&](auto i) { return value(left, slot, i); });
    });
  }

  // No rank may leave before the last has arrived. Ranks of one host compare their common clock; the last
  // rank arrives a little late.
  void barrier() {
    ask("barrier", [&](int) {
      const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
      const auto begin = now();
      while (rank() == size() - 1 && now() - begin < 100'000) {
      }
      at::Tensor mine = at::empty({3}, at::kLong);
      auto* numbers = mine.data_ptr<std::int64_t>();
      numbers[0] = host();
      numbers[1] = now();
      group_.barrier();
      numbers[2] = now();
      const at::Tensor all = group_.all_gather(mine.to(device_)).cpu();
      for (int r = 0; r < size(); ++r) {
        const auto* theirs = all.data_ptr<std::int64_t>() + 3 * r;
        if (theirs[0] != numbers[0] || numbers[0] == 0 || theirs[1] <= numbers[2]) continue;
        return note(r, static_cast<double>(numbers[2] - theirs[1]) * 1e-3, 0);
      }
    });
  }

  // Equal on ranks that share a clock; 0: unknown.
  static std::int64_t host() {
    std::string id;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
    return id.empty() ? 0 : static_cast<std::int64_t>(std::hash<std::string>()(id) >> 2);
  }

  // Any collective may be the wrong one, so each rank's finding is sent in two ways.
  void agree() {
    const at::Tensor mine = at::tensor(at::ArrayRef<double>(finding_), at::kDouble).to(device_);
    const at::Tensor gathered = at::zeros({size(), mine.numel()}, mine.options());
    const at::Tensor summed = gathered.clone();
    summed[rank()].copy_(mine);
    ask("agreement", [&](int) { group_.all_reduce(summed); });
    ask("agreement", [&](int) { group_.all_gather_async(gathered, mine).wait(); });
    const auto by_gather = first_finding(gathered), by_sum = first_finding(summed);
    const bool sum_is_wrong = by_gather && name_of(by_gather->second) == "all_reduce(sum)";
    if (by_sum && !sum_is_wrong) fail(by_sum->first, by_sum->second);
    if (by_gather) fail(by_gather->first, by_gather->second);
    if (finding_[0] != 0) fail(rank(), finding_);
  }

  std::string_view name_of(const Finding& finding) const {
    return names_[static_cast<std::size_t>(finding[1])];
  }
  // The first rank that found something, and what it found.
  std::optional<std::pair<int, Finding>> first_finding(const at::Tensor& findings) const {
    const at::Tensor all = findings.cpu();
    for (int r = 0; r < size(); ++r) {
      Finding finding;
      std::copy_n(all.data_ptr<double>() + finding.size() * static_cast<std::size_t>(r), finding.size(),
                  finding.begin());
      const bool names_a_collective = finding[1] >= 0 && finding[1] < static_cast<double>(names_.size()) - 2;
      if (finding[0] == 1 && names_a_collective) return std::pair(r, finding);
    }
    return std::nullopt;
  }

  [[noreturn]] void fail(int where, const Finding& finding) const {
    const bool barrier = name_of(finding) == "barrier";
    const auto index = static_cast<std::int64_t>(finding[2]);
    throw_peer_error(
        fmt::format("self-test of group '{}' on rank {} of {}", group_.name(), rank(), size()),
        barrier
            ? fmt::format("rank {} left the barrier {} us before rank {} came", where, -finding[3], index)
            : fmt::format("{} gave {} in element {} on rank {}", name_of(finding), finding[3], index, where),
        barrier ? "nobody to leave before all have come" : fmt::format("{}", finding[4]),
        "Do not train with this backend: its results are wrong. Try another version of it");
  }

  Group group_;
  c10::Device device_;
  std::vector<const char*> names_;  // of the collectives asked so far
  Finding finding_{};               // this rank's first
};

}  // namespace

void self_test(Group group, c10::Device device) {
  if (group.size() > 1) Exam(std::move(group), device).run();
}

}  // namespace isograd
