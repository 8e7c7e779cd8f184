// The shared code of MpiBackend's operations, and the creation of its communicators.
#include "comm/mpi/backend.hpp"

#include <fmt/format.h>

#include <functional>

#include "base/refuse.hpp"
#include "comm/mpi/mpi.hpp"
#include "comm/mpi/runtime.hpp"
#include "comm/poll.hpp"
#include "isograd/error.hpp"

namespace isograd {

using mpi::Operation;

namespace mpi {
namespace {

// Completes the requests, or throws PeerError at the timeout. Incomplete requests stay alive.
void complete(std::vector<MPI_Request>& requests, const std::string& where,
              std::chrono::milliseconds timeout) {
  const auto done = [&] {
    const CallScope scope;
    int flag = 0;
    check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &flag, MPI_STATUSES_IGNORE), where);
    return flag != 0;
  };
  if (poll_until(done, timeout)) return;
  abandon();
  throw PeerError({.where = where,
                   .found = fmt::format("not all of its ranks within {} ms", timeout.count()),
                   .expected = "all of them to make it",
                   .action = "See which rank does not come, or raise parallel.timeout_seconds"});
}

// MPI_Comm_create_group waits without a timeout, so it is called after all members have arrived.
void meet(const std::vector<int>& ranks, std::uint64_t mark, int tag, const std::string& where,
          std::chrono::milliseconds timeout) {
  int self = 0;
  MPI_Comm_rank(control(), &self);
  struct Marks {
    std::uint64_t own;
    std::vector<std::uint64_t> got;
  };
  // Incomplete requests keep using this memory.
  auto* marks = new Marks{mark, std::vector<std::uint64_t>(ranks.size(), mark)};
  std::vector<MPI_Request> requests;
  const auto receive = [&](std::size_t from) {
    requests.emplace_back();
    const CallScope scope;
    check(MPI_Irecv(&marks->got[from], 1, MPI_UINT64_T, ranks[from], tag, control(), &requests.back()),
          where);
  };
  const auto send = [&](std::size_t to) {
    requests.emplace_back();
    const CallScope scope;
    check(MPI_Isend(&marks->own, 1, MPI_UINT64_T, ranks[to], tag, control(), &requests.back()), where);
  };
  if (self == ranks[0]) {
    for (std::size_t i = 1; i < ranks.size(); ++i) receive(i);
    complete(requests, where, timeout);
    requests.clear();
    for (std::size_t i = 1; i < ranks.size(); ++i) send(i);
  } else {
    send(0);
    receive(0);
  }
  complete(requests, where, timeout);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (marks->got[i] == mark) continue;
    throw PeerError({.where = where,
                     .found = fmt::format("rank {} makes another group now", ranks[i]),
                     .expected = "the same ranks and name on all members, in the same order",
                     .action = "Make groups in one order on all ranks"});
  }
  delete marks;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_world(const std::string& name, std::chrono::milliseconds timeout,
                                             std::int64_t most_elements) {
  start(timeout);
  auto* copy = new MPI_Comm(MPI_COMM_NULL);  // MPI writes to it until the request is complete
  std::vector<MPI_Request> requests(1);
  const std::string where = fmt::format("making group '{}' (mpi)", name);
  {
    const CallScope scope;
    check(MPI_Comm_idup(control(), copy, requests.data()), where);
  }
  complete(requests, where, std::max<std::chrono::milliseconds>(timeout, kLeastStart));
  auto backend = c10::make_intrusive<MpiBackend>(*copy, name, timeout, most_elements);
  delete copy;
  return backend;
}

c10::intrusive_ptr<c10d::Backend> make_subgroup(const std::vector<int>& ranks, const std::string& name,
                                                const std::string& key, std::chrono::milliseconds timeout) {
  constexpr std::uint64_t kLeastTagBound = 32767;  // every MPI supports tags up to here
  const std::string where = fmt::format("making group '{}' (mpi)", name);
  const std::uint64_t mark = std::hash<std::string>{}(key);
  const int tag = static_cast<int>(mark % kLeastTagBound);
  meet(ranks, mark, tag, where, timeout);
  MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  const CallScope scope;
  check(MPI_Comm_group(control(), &all), where);
  check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members), where);
  const int code = MPI_Comm_create_group(control(), members, tag, &comm);
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  check(code, where);
  return c10::make_intrusive<MpiBackend>(comm, name, timeout);
}

}  // namespace mpi

MpiBackend::MpiBackend(MPI_Comm comm, std::string name, std::chrono::milliseconds timeout,
                       std::int64_t most_elements)
    : c10d::Backend(
          [&] {
            int rank = 0;
            MPI_Comm_rank(comm, &rank);
            return rank;
          }(),
          [&] {
            int size = 1;
            MPI_Comm_size(comm, &size);
            return size;
          }()),
      channel_(std::make_shared<mpi::Channel>(comm, std::move(name), timeout)),
      most_elements_(most_elements) {}

void MpiBackend::abort() {
  channel_->poison("this rank has given the group up");
}

MpiBackend::Works MpiBackend::start(const std::string& name, c10d::OpType type, Tensors results,
                                    std::chrono::milliseconds timeout,
                                    const std::function<void(Operation&)>& issue) {
  auto operation = channel_->start(name, issue);
  operation->used.insert(operation->used.end(), results.begin(), results.end());
  return c10::make_intrusive<mpi::MpiWork>(channel_, std::move(operation), type, std::move(results),
                                           timeout == c10d::kUnsetTimeout ? channel_->timeout() : timeout);
}

void MpiBackend::check(const at::Tensor& tensor, const std::string& where) const {
  std::string found;
  if (!tensor.defined()) {
    found = "an undefined tensor";
  } else if (!tensor.device().is_cpu()) {
    found = "a tensor on " + tensor.device().str();
  } else if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    found = "a tensor that is not contiguous";
  }
  if (found.empty()) return;
  refuse(where, found, "a contiguous tensor on the CPU",
         "Call contiguous() or cpu() first, or give the group a backend of that device");
}

void MpiBackend::check_root(std::int64_t root, const std::string& where) const {
  if (root >= 0 && root < size_) return;
  refuse(where, fmt::format("rank {}", root), fmt::format("0 to {}", size_ - 1), "Name a rank of the group");
}

void MpiBackend::check_same(std::size_t found, std::size_t expected, const std::string& what,
                            const std::string& where) const {
  if (found == expected) return;
  refuse(where, fmt::format("{} {}", found, what), fmt::format("{}", expected),
         "Give tensors whose sizes fit the group and one another");
}

const at::Tensor& MpiBackend::only(const Tensors& tensors, const std::string& where) const {
  check_same(tensors.size(), 1, "tensors", where);
  check(tensors[0], where);
  return tensors[0];
}

int MpiBackend::count(std::int64_t elements, const std::string& where) const {
  if (elements <= most_elements_) return static_cast<int>(elements);
  refuse(where, fmt::format("{} elements", elements),
         fmt::format("at most {} in one call of MPI", most_elements_), "Call it for parts of the tensor");
}

std::pair<const int*, const int*> MpiBackend::parts(Operation& operation, const Sizes& counts) const {
  std::vector<int>& numbers = operation.counts.emplace_back();
  std::vector<int>& begins = operation.counts.emplace_back();
  std::int64_t total = 0;
  for (const std::int64_t part : counts) {
    begins.push_back(count(total, operation.where));
    numbers.push_back(count(part, operation.where));
    total += part;
  }
  return {numbers.data(), begins.data()};
}

void MpiBackend::pieces(std::int64_t elements, const std::function<void(std::int64_t, int)>& issue) const {
  std::int64_t begin = 0;
  do {
    const std::int64_t piece = std::min(elements - begin, most_elements_);
    issue(begin, static_cast<int>(piece));
    begin += piece;
  } while (begin < elements);
}

}  // namespace isograd
