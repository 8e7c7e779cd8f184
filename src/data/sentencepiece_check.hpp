// What libsentencepiece believes of a model without looking.
#pragma once

#include <string>
#include <string_view>

namespace isograd {

struct CheckedModel {
  std::string bytes;    // for LoadFromSerializedProto, without the model's own test sentences
  std::string problem;  // what was found; empty where loading and encoding stay within their memory
};

// libsentencepiece 0.1.97 walks a normaliser table without comparing an offset with its size, keeps at most
// 32 rules and 64 symbols that begin alike in arrays on the stack, takes pieces for C strings, and prints
// test sentences that fail as they are.
CheckedModel check_sentencepiece(std::string_view model);

}  // namespace isograd
