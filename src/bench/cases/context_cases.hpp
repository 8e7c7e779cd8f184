// What `isograd bench context` measures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

struct ContextCase {
  std::string name;
  std::vector<std::int64_t> lengths;  // of the documents
  DecoderConfig model{};
  bool attention_alone = false;  // one layer's attention, nothing else
  bool standard = true;
  bool turns = true;  // false: memory alone
};

const std::vector<ContextCase>& context_cases();

}  // namespace isograd
