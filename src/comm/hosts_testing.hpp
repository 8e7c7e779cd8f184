// Thread ranks that claim to be on several hosts, and groups over them. Messages between these hosts also use
// shared memory, because only a name depends on the carrier.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "comm/hosts/backend.hpp"
#include "comm/hosts/meeting.hpp"
#include "comm/wrappers_testing.hpp"
#include "isograd/world.hpp"

namespace isograd::testing {

struct HostOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  bool self_test = true;
  std::function<Inner(Inner)> wrapped = [](Inner all) {
    return all;
  };  // wraps the backend that spans the hosts
};

class HostGroups {
 public:
  using Options = HostOptions;
  struct Made {
    Group group;
    std::shared_ptr<HostsOfGroup> hosts;
  };

  // `placing`: the host of each rank, from 0: "a", "b", ...
  explicit HostGroups(std::vector<int> placing, Options options = {})
      : placing_(std::move(placing)), options_(std::move(options)) {
    const int hosts = *std::max_element(placing_.begin(), placing_.end()) + 1;
    for (int host = 0; host < hosts; ++host) names_.push_back(std::string(1, static_cast<char>('a' + host)));
  }
  int ranks() const { return static_cast<int>(placing_.size()); }

  // Collective over `ranks`, which include `own`. Each name is used once.
  Made make(const std::vector<int>& ranks, int own, const std::string& name) const {
    std::vector<int> of_rank, here;
    for (const int rank : ranks) of_rank.push_back(placing_[static_cast<std::size_t>(rank)]);
    for (const int rank : ranks)
      if (placing_[static_cast<std::size_t>(rank)] == placing_[static_cast<std::size_t>(own)])
        here.push_back(rank);
    const int place = place_of(own, ranks), size = static_cast<int>(ranks.size());
    auto hosts = std::make_shared<HostsOfGroup>(of_rank, place, std::make_shared<WorldBytes>());
    const auto over = [&](const std::vector<int>& some, const std::string& use) {
      return c10::make_intrusive<ShmBackend>(store_, place_of(own, some), static_cast<int>(some.size()),
                                             name + ", " + use, options_.timeout);
    };
    if (size == 1) return {Group::solo(), hosts};
    const GroupOptions tested{.self_test = options_.self_test};
    if (!hosts->several()) return {Group(over(ranks, "all"), name, options_.timeout, tested), hosts};
    const std::string host = names_[static_cast<std::size_t>(of_rank[static_cast<std::size_t>(place)])];
    HostsBackend::Parts parts{options_.wrapped(over(ranks, "all")), nullptr, nullptr};
    if (here.size() > 1)
      parts.reducing = over(here, "summing on " + host), parts.gathering = over(here, "gathering on " + host);
    Group group(make_over_hosts(parts, hosts, names_, name, options_.timeout), name, options_.timeout,
                tested);
    hosts->restart();
    return {group, hosts};
  }

  Made all(int own, const std::string& name) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < this->ranks(); ++rank) ranks.push_back(rank);
    return make(ranks, own, name);
  }

  // `name` distinguishes the mesh from others over these groups. As mesh_subgroup() without MPI.
  Mesh mesh(const Grid& grid, int own, const std::string& name) const {
    return Mesh(all(own, name).group, grid,
                [this, grid, own, name](const std::vector<int>& some, const std::string& use) {
                  const std::string full = name + ": " + use;
                  if (siblings_split_alike(grid, {placing_, names_}, some))
                    return make(some, own, full).group;
                  return Group(c10::make_intrusive<ShmBackend>(store_, place_of(own, some),
                                                               static_cast<int>(some.size()),
                                                               full + ", alone", options_.timeout),
                               full, options_.timeout, {.self_test = options_.self_test});
                });
  }

 private:
  static int place_of(int rank, const std::vector<int>& ranks) {
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }

  std::vector<int> placing_;
  Options options_;
  std::vector<std::string> names_{};
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

// Corrupts messages from the first rank of the second host to rank 0.
class Garbles final : public PassingOn {
 public:
  Garbles(Inner inner, int from) : PassingOn(std::move(inner)), from_(from) {}
  Works send(Tensors& tensors, int to, int tag) override {
    if (to != 0 || rank_ != from_ || !tensors[0].is_floating_point())
      return PassingOn::send(tensors, to, tag);
    Tensors other{tensors[0].mul(1.5)};
    Works work = PassingOn::send(other, to, tag);
    work->wait();  // its memory ends here
    return work;
  }

 private:
  int from_;
};

// For a world of ranks on hosts a, a, b, b: the hosts; sums over a pair within a host, a pair across hosts
// and all ranks, and whether each has shared memory; bytes that the pairs sent across hosts, and those of all
// groups.
inline std::string told_of_hosts(World& world) {
  const Hosts hosts = hosts_of(world);
  std::string text = fmt::format("{} {}", fmt::join(hosts.of_rank, ""), fmt::join(hosts.names, "/"));
  const int mate = world.rank ^ 1, twin = world.rank ^ 2;
  Group within = world.subgroup({std::min(world.rank, mate), std::max(world.rank, mate)}, "within");
  Group across = world.subgroup({std::min(world.rank, twin), std::max(world.rank, twin)}, "across");
  const HostBytes before = host_bytes(world);
  for (Group* group : {&within, &across, &world.group}) {
    at::Tensor sum = at::full({1000}, world.rank, at::kDouble);
    group->all_reduce(sum);
    text += fmt::format(" {}{}", sum[999].item<double>(), group->has_host_memory() ? " memory" : "");
  }
  return text + fmt::format(" {} {} {}", host_bytes(within).across, host_bytes(across).across,
                            host_bytes(world).across - before.across);
}

}  // namespace isograd::testing
