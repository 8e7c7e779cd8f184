// The matrices that adapters update, by PEFT's names.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace isograd {

inline constexpr std::string_view kAttention = "attention", kMlp = "mlp", kUnembed = "unembed";

struct Adaptable {
  std::string_view group, folder, name;  // in a layer: folder and name
};
// In the order of Projection.
inline constexpr std::array<Adaptable, 8> kAdaptable = {{{kAttention, "self_attn.", "q_proj"},
                                                         {kAttention, "self_attn.", "k_proj"},
                                                         {kAttention, "self_attn.", "v_proj"},
                                                         {kAttention, "self_attn.", "o_proj"},
                                                         {kMlp, "mlp.", "gate_proj"},
                                                         {kMlp, "mlp.", "up_proj"},
                                                         {kMlp, "mlp.", "down_proj"},
                                                         {kUnembed, "", "lm_head"}}};

inline std::string module_names() {
  std::string names;
  for (const Adaptable& matrix : kAdaptable) names += (names.empty() ? "" : ", ") + std::string(matrix.name);
  return names;
}

}  // namespace isograd
