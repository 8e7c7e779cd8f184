#include "train/host_traffic.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

namespace isograd {

HostTraffic::HostTraffic(const World& world, const Grid& grid) : world_(&world) {
  const Hosts hosts = hosts_of(world);
  several_ = hosts.count() > 1;
  if (!several_) return;
  said_ = said_of_hosts(grid, hosts);
  said_.insert(said_.begin(), hosts_text(grid, hosts));
}

void HostTraffic::before_step() {
  if (several_) before_ = host_bytes(*world_);
}

std::optional<std::int64_t> HostTraffic::across_in_step() {
  if (!several_) return std::nullopt;
  const HostBytes now = host_bytes(*world_);  // before what follows
  last_ = {.within = now.within - before_.within, .across = now.across - before_.across};
  const at::Tensor sum = at::full({1}, last_.across, at::kLong);
  Group(world_->group).all_reduce(sum);
  return sum.item<std::int64_t>();
}

std::string HostTraffic::by_rank() {
  if (!several_) return {};
  const at::Tensor all = Group(world_->group).all_gather(at::tensor({last_.across, last_.within}, at::kLong));
  std::string text;
  for (int rank = 0; rank < world_->size; ++rank) {
    const auto* bytes = all[rank].const_data_ptr<std::int64_t>();
    text += fmt::format("{}rank {}: {} bytes across hosts, {} within", rank == 0 ? "" : "; ", rank, bytes[0],
                        bytes[1]);
  }
  return text;
}

}  // namespace isograd
