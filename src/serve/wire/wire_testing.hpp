// Requests of the real client, for tests and tests/fuzz.
#pragma once

#include <string>
#include <string_view>

namespace isograd::serve::wire_testing {

inline std::string bytes_of_hex(std::string_view hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  return bytes;
}

// ---- messages of tinker 0.38.0's own classes (tinker.proto.tinker_public_pb2), serialized by them ----

// Model "s:train:0", sequence 3, "ppo" with {clip_low_threshold: 0.8, loss_id: "x"} in both maps. Datum 0:
// tokens 5 6 7, dense inputs, a provenance span. Datum 1: tokens 300 2, dense targets [2, 3], weights [2, 3]
// as CSR: 0.25 at (0, 2), -2 at (1, 0).
inline constexpr const char* kPpo =
    "0a09733a747261696e3a3010031a93010a100a0e0a0c05000000060000000700000012210a0a616476616e746167657312130a0c0000c03f"
    "00000000000080bf1801220103121f0a086c6f6770726f627312130a0c000000bf000080bf000010c0180122010312300a0d746172676574"
    "5f746f6b656e73121f0a180600000000000000070000000000000008000000000000001802220103220912070a0171100118021aa4010a0c"
    "0a0a0a082c0100000200000012490a0d7461726765745f746f6b656e7312380a300100000000000000020000000000000003000000000000"
    "0004000000000000000500000000000000060000000000000018022202020312490a0777656967687473123e12360a080000803e000000c0"
    "12180000000000000000010000000000000002000000000000001a1002000000000000000000000000000000180122020203220370706f2a"
    "1d0a12636c69705f6c6f775f7468726573686f6c64119a9999999999e93f3a1f0a12636c69705f6c6f775f7468726573686f6c641209099a"
    "9999999999e93f3a0e0a076c6f73735f69641203120178";

// Model "m", sequence 2^31 - 1, forward only, {beta: 0.5} in the older map alone; tokens 1 2 in two chunks,
// weights [1, -2.5] as bfloat16 without a shape, targets [9, 70000] as int32.
inline constexpr const char* kOlder =
    "0a016d10ffffffff071a4b0a080a060a04010000000a080a060a040200000012200a0d7461726765745f746f6b656e73120f0a0809000000"
    "70110100180322010212130a077765696768747312080a04803f20c01804220d63726f73735f656e74726f70792a0f0a0462657461110000"
    "00000000e03f3001";

}  // namespace isograd::serve::wire_testing
