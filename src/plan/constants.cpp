// The constants, by program, device and precision.
#include "plan/constants.hpp"

#include <string_view>

namespace isograd::planner {
namespace {

// One share of the peak for each device of the built-in table and precision, fitted on the published rows of
// all programs but nanotron: the least sum of min(|relative error|, 0.5).
struct Share {
  std::string_view device;
  double bfloat16, float8;  // 0: no row
};
constexpr Share kShares[] = {{"a100-40", 0.752, 0},     {"a100-80", 0.681, 0},   {"h100", 0.658, 0.982},
                             {"h100-96", 0.464, 0.441}, {"h200", 0, 0.616},      {"b200", 0, 0.740},
                             {"gb200", 0.586, 0.669},   {"gb200-fp4", 0, 0.637}, {"gb300", 0, 0.904},
                             {"gb300-fp4", 0, 0.818},   {"tpu-v5p", 0, 0.999},   {"tpu-v6e", 0, 0.791},
                             {"v100", 0.361, 0}};

// FlashAttention-2 reaches 0.50 to 0.73 of an A100's peak (arXiv:2307.08691, figures 4 to 7) and a third of
// an H100's (arXiv:2407.08608); a V100 has no such kernel.
double share_of_attention(std::string_view device) {
  return device.starts_with("a100") ? 0.40 : device.starts_with("v100") ? 0.20 : 0.25;
}

}  // namespace

Constants constants_of(Program program, const Device& device, Precision precision) {
  Constants made;
  made.share_of_attention = share_of_attention(device.name);
  if (program == Program::kOther) {
    for (const Share& share : kShares)
      if (const double found = precision == Precision::kFloat8 ? share.float8 : share.bfloat16;
          share.device == device.name && found > 0)
        made.share_of_peak = found;
    made.layer_overhead = 0;
  }
  if (program == Program::kIsograd) {
    // No interpreter between operators: the lower end of what eager dispatch takes, 130 operators of 5 us.
    made.layer_overhead = 0.65e-3;
    made.overlap =
        1;  // units and buckets travel during the whole backward; what calibrate finds goes before it
    made.allocated = 1, made.fixed_bytes = 0;
  }
  return made;
}

Widths widths_of(Program program, Origin origin, bool experts) {
  double seconds = 0.30;                              // the 90th percentile of all other dense rows
  if (program == Program::kNanotron) seconds = 0.20;  // measured / foretold: 0.906 to 1.196
  if (program == Program::kIsograd && origin == Origin::kMeasured) seconds = 0.05;
  if (program == Program::kIsograd && origin == Origin::kCalibrated) seconds = 0.15;
  if (experts) seconds *= 2;  // how uneven routing is, nobody publishes
  return {.memory = program == Program::kIsograd ? 0.05 : 0.19, .seconds = seconds};
}

}  // namespace isograd::planner
