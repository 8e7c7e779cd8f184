// The files of a dump: what its writer and its reader share.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string>

namespace isograd::dump_format {

inline constexpr const char* kFormat = "isograd-dump";
inline constexpr int kVersion = 1;
inline constexpr const char* kStep = "step.json";
inline constexpr const char* kGradients = "gradients.safetensors";
inline constexpr const char* kApplied = "applied.safetensors";
inline constexpr const char* kPeers = "peers.safetensors";

inline std::string share_file(std::size_t rank, std::size_t micro_batch) {
  return fmt::format("share-{}-{}.safetensors", rank, micro_batch);
}

}  // namespace isograd::dump_format
