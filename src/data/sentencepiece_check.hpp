// Checks the fields of a model that libsentencepiece trusts blindly.
#pragma once

#include <string>
#include <string_view>

namespace isograd {

struct CheckedModel {
  std::string bytes;    // for LoadFromSerializedProto, without the model's own test sentences
  std::string problem;  // empty: loading and encoding stay within their memory
};

// libsentencepiece 0.1.97 walks a normaliser table without comparing offsets with its size, keeps at most 32
// rules and 64 symbols with a common prefix in arrays on the stack, treats pieces as C strings, and prints
// failing test sentences unescaped.
CheckedModel check_sentencepiece(std::string_view model);

}  // namespace isograd
