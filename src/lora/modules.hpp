// The matrices that adapters update, by PEFT's names.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "isograd/model.hpp"

namespace isograd {

inline constexpr std::string_view kAttention = "attention", kMlp = "mlp", kUnembed = "unembed";

struct Adaptable {
  std::string_view group, name;
};
// In the order of Projection, to kHead.
inline constexpr std::array<Adaptable, 8> kAdaptable = {{{kAttention, "q_proj"},
                                                         {kAttention, "k_proj"},
                                                         {kAttention, "v_proj"},
                                                         {kAttention, "o_proj"},
                                                         {kMlp, "gate_proj"},
                                                         {kMlp, "up_proj"},
                                                         {kMlp, "down_proj"},
                                                         {kUnembed, "lm_head"}}};

// The matrix that a projection is, in whatever network.
inline const Adaptable& matrix_of(Projection projection) {
  const auto place = static_cast<std::size_t>(projection);
  constexpr auto shared = static_cast<std::size_t>(Projection::kSharedGate),
                 gate = static_cast<std::size_t>(Projection::kGate);
  return kAdaptable[place < shared ? place : place - shared + gate];
}

inline std::string module_names() {
  std::string names;
  for (const Adaptable& matrix : kAdaptable) names += (names.empty() ? "" : ", ") + std::string(matrix.name);
  return names;
}

}  // namespace isograd
