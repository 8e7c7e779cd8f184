// The shared code of HostsBackend's operations, and the operations that it passes on.
#include "comm/hosts/backend.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/account.hpp"
#include "base/refuse.hpp"
#include "comm/call_site.hpp"
#include "comm/hosts/tags.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"

namespace isograd {

using hosts::Operation;
using hosts::Part;

HostsBackend::HostsBackend(Parts parts, std::shared_ptr<HostsOfGroup> hosts,
                           const std::vector<std::string>& names, std::string group,
                           std::chrono::milliseconds timeout)
    : c10d::Backend(parts.all->getRank(), parts.all->getSize()), group_(std::move(group)), timeout_(timeout) {
  auto links = std::make_shared<Links>();
  links->parts = parts;
  std::vector<int> seen;  // host numbers in the order of their first ranks
  for (int rank = 0; rank < size_; ++rank) {
    const int host = hosts->of_rank()[static_cast<std::size_t>(rank)];
    const auto found = std::ranges::find(seen, host);
    const auto at = static_cast<std::size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(host);
      links->members.emplace_back();
      links->names.push_back(names[static_cast<std::size_t>(host)]);
    }
    if (rank == rank_) {
      links->host = static_cast<int>(at);
      links->place = static_cast<int>(links->members[at].size());
    }
    links->members[at].push_back(rank);
  }
  const auto [fewest, most] =
      std::ranges::minmax(links->members, {}, [](const std::vector<int>& ranks) { return ranks.size(); });
  links->lanes = static_cast<int>(fewest.size());
  links->even = fewest.size() == most.size();
  ISOGRAD_INVARIANT(links->host_count() > 1, "a group of one host");
  ISOGRAD_INVARIANT(!parts.reducing == (links->here() == 1), "shared memory of another group");
  links->hosts = std::move(hosts);
  links_ = links;
  queue_ = std::make_shared<hosts::Queue>(group_, [parts](const std::string& reason) {
    for (const auto& within : {parts.reducing, parts.gathering})
      if (within) within->poison(reason);
    try {
      parts.all->abort();
    } catch (...) {  // a backend without abort(): its peers have its own timeout
    }
  });
}

void HostsBackend::give_up(const std::string& reason) noexcept {
  try {
    queue_->fail(reason);
  } catch (...) {  // no memory for the reason: the peers' timeouts remain
  }
}

HostsBackend::Splits HostsBackend::Links::cut(std::int64_t numel) const {
  Splits pieces = split_rows(numel, lanes);
  pieces.resize(static_cast<std::size_t>(here()), 0);
  return pieces;
}

std::vector<Part> HostsBackend::Links::exchange(const Tensors& to_hosts, const Tensors& from_hosts,
                                                int tag) const {
  std::vector<Part> begun;
  for (std::size_t other = 0; other < members.size(); ++other) {
    if (static_cast<int>(other) == host) continue;
    const int rank = members[other][static_cast<std::size_t>(place)];
    if (from_hosts[other].numel() > 0) {
      Tensors into{from_hosts[other]};
      begun.push_back(
          {parts.all->recv(into, rank, tag), fmt::format("host {} (rank {})", names[other], rank)});
    }
    if (to_hosts[other].numel() > 0) {
      Tensors from{to_hosts[other]};
      begun.push_back({parts.all->send(from, rank, tag), ""});
      hosts->add_across(static_cast<std::int64_t>(from[0].nbytes()));
    }
  }
  return begun;
}

std::string HostsBackend::where(const char* operation) {
  const std::lock_guard lock(sequence_mutex_);
  std::string text = fmt::format("{} #{} of group '{}' (shm+mpi) on rank {} of {}", operation, sequence_++,
                                 group_, rank_, size_);
  if (const CallSite site = current_call_site(); site.file)
    text += fmt::format(" at {}:{}", std::filesystem::path(site.file).filename().string(), site.line);
  return text;
}

HostsBackend::Works HostsBackend::work(std::shared_ptr<Operation> operation,
                                       std::chrono::milliseconds timeout) {
  return c10::make_intrusive<hosts::QueueWork>(queue_, std::move(operation), rank_,
                                               timeout == c10d::kUnsetTimeout ? timeout_ : timeout);
}

HostsBackend::Works HostsBackend::staged(std::string where, std::vector<hosts::Stage> stages,
                                         std::chrono::milliseconds timeout) {
  return work(queue_->begin(std::move(where), std::move(stages)), timeout);
}

HostsBackend::Works HostsBackend::followed(const char* operation, const std::function<Works()>& begin,
                                           std::chrono::milliseconds timeout) {
  return work(queue_->follow(where(operation), begin), timeout);
}

shm::Reduction HostsBackend::reduction(const char* operation, const at::Tensor& tensor,
                                       const c10d::ReduceOp& op) const {
  const shm::Arguments check(operation, group_, rank_, size_);
  const auto reduction = check.reduction(tensor, op);
  using kernels::Combine;
  if (reduction.combine == Combine::kAverage || reduction.combine == Combine::kScaledSum)
    check.refuse("a mean or a scaled sum over several hosts", "SUM, MAX, MIN, PRODUCT, BAND, BOR or BXOR",
                 "Sum, and divide once");
  return reduction;
}

void HostsBackend::check_tag(const char* operation, int tag) const {
  if (tag < hosts::kFirstTag) return;
  refuse(fmt::format("{} in group '{}' (shm+mpi)", operation, group_), fmt::format("tag {}", tag),
         fmt::format("0 to {}: above are the group's own messages", hosts::kFirstTag - 1),
         "Choose another tag");
}

at::Tensor HostsBackend::empty_shared(std::int64_t numel, at::ScalarType dtype) {
  if (!links_->parts.reducing) return at::zeros({numel}, at::TensorOptions(dtype));
  count_shared(numel * static_cast<std::int64_t>(c10::elementSize(dtype)));
  return links_->parts.reducing->empty_shared(numel, dtype);
}

HostsBackend::Works HostsBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return followed(
      "reduce", [&] { return links_->parts.all->reduce(tensors, options); }, options.timeout);
}

HostsBackend::Works HostsBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return followed(
      "broadcast", [&] { return links_->parts.all->broadcast(tensors, options); }, options.timeout);
}

HostsBackend::Works HostsBackend::gather(Lists& outputs, Tensors& inputs,
                                         const c10d::GatherOptions& options) {
  return followed(
      "gather", [&] { return links_->parts.all->gather(outputs, inputs, options); }, options.timeout);
}

HostsBackend::Works HostsBackend::scatter(Tensors& outputs, Lists& inputs,
                                          const c10d::ScatterOptions& options) {
  return followed(
      "scatter", [&] { return links_->parts.all->scatter(outputs, inputs, options); }, options.timeout);
}

HostsBackend::Works HostsBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                                Splits& input_splits, const c10d::AllToAllOptions& options) {
  return followed(
      "all_to_all",
      [&] { return links_->parts.all->alltoall_base(output, input, output_splits, input_splits, options); },
      options.timeout);
}

HostsBackend::Works HostsBackend::send(Tensors& tensors, int to, int tag) {
  check_tag("send", tag);
  return followed(
      "send", [&] { return links_->parts.all->send(tensors, to, tag); }, c10d::kUnsetTimeout);
}

HostsBackend::Works HostsBackend::recv(Tensors& tensors, int from, int tag) {
  check_tag("recv", tag);
  return followed(
      "recv", [&] { return links_->parts.all->recv(tensors, from, tag); }, c10d::kUnsetTimeout);
}

HostsBackend::Works HostsBackend::barrier(const c10d::BarrierOptions& options) {
  return followed(
      "barrier", [&] { return links_->parts.all->barrier(options); }, options.timeout);
}

}  // namespace isograd
