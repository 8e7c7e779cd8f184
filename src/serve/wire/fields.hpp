// Typed access to the fields of a request, for both dialects. Errors name request and field: "asample:
// sampling_params.temperature".
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.hpp"
#include "serve/wire/messages.hpp"

namespace isograd::serve {

using Json = nlohmann::json;

inline constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();
inline constexpr std::size_t kMostText = 4096;                           // bytes of one name, id or value
inline constexpr std::size_t kMostDatums = 1 << 16, kMostInputs = 32;    // of a request, of a datum
inline constexpr std::int64_t kLeastTtl = 3600, kMostTtl = 315'360'000;  // an hour, ten years

// Numbers that a field may have.
struct Numbers {
  bool (*holds)(double);
  const char* expected;
};
inline constexpr Numbers kAtLeast0{[](double x) { return x >= 0; }, "a finite number of at least 0"},
    kAbove0{[](double x) { return x > 0; }, "a finite number above 0"},
    kClip{[](double) { return true; }, "a finite number; 0 does not clip"};

class Fields {
 public:
  // `object` must outlive this; `prefix` ends in ": " or ".".
  Fields(const Json& object, std::string prefix) : object_(&object), prefix_(std::move(prefix)) {}

  const Json* find(const char* key) const;  // null: absent, or JSON's null
  bool has(const char* key) const { return object_->contains(key); }
  std::string where(const std::string& key) const { return prefix_ + key; }
  [[noreturn]] void refuse(const char* key, const std::string& expected,
                           const std::string& action = "Correct that field") const;

  std::optional<std::string> text(const char* key) const;  // not empty
  std::string need_text(const char* key) const;
  std::optional<std::int64_t> integer(const char* key, std::int64_t least, std::int64_t most) const;
  std::int64_t need_integer(const char* key, std::int64_t least, std::int64_t most) const;
  std::optional<std::uint64_t> seed(const char* key) const;
  bool flag(const char* key, bool otherwise) const;
  std::optional<Fields> object(const char* key) const;
  Fields need_object(const char* key) const;
  const Json* list(const char* key) const;  // null: absent
  std::vector<std::int64_t> integers(const char* key, std::int64_t least, std::int64_t most) const;
  std::map<std::string, std::string> metadata(
      const char* key) const;  // values that are no strings: their JSON
  double number(const char* key, double otherwise, const Numbers& allowed) const;

 private:
  template <class T>
  T need(std::optional<T> value, const char* key, const std::string& expected) const {
    if (!value) refuse(key, expected);
    return *std::move(value);
  }
  const Json* object_;
  std::string prefix_;
};

// The body of a request, an object.
struct OwnedJson {
  Json json;
};
class RequestJson : OwnedJson, public Fields {
 public:
  RequestJson(const std::string& request, std::string_view text);
  RequestJson(const RequestJson&) = delete;
  RequestJson& operator=(const RequestJson&) = delete;
};

// As the server's own files have it.
void to_json(Json& to, const LoraShape& shape);
void from_json(const Json& from, LoraShape& shape);

// ---- of replies ----

std::string iso_time(double seconds);  // since 1970
Json finite(const Metrics& metrics);   // JSON has no others

// ---- arrays as they come ----

struct WireArray : Array {
  bool whole = false;                         // integers, else numbers
  bool sparse = false;                        // compressed rows, of two dimensions
  std::vector<std::int64_t> starts, columns;  // rows + 1 places where rows begin; the column of each value
};

// Dense and checked; cells that a sparse array does not list hold `filling`. `cells` is how many the
// request's arrays may still have.
Array to_dense(WireArray array, std::int64_t filling, const std::string& where, std::int64_t& cells);
// {data, dtype, shape, sparse_crow_indices, sparse_col_indices}, or a plain list of numbers.
WireArray json_array(const Json& value, const std::string& where);
// As an input `name` of a loss: "target_tokens" are integers >= 0, all others finite numbers.
Array as_input(Array array, const std::string& name, const std::string& where);

// base_model, user_metadata and, if there is an adapter, its seed; else rank 0.
CreateModel json_model(const Fields& fields);
// The tokens of {"chunks": [{"type": "encoded_text", "tokens"}]}.
std::vector<std::int64_t> json_chunks(const Fields& input);
AdamParams json_adam(const Fields& params);
[[noreturn]] void refuse_chunk(const std::string& where, const std::string& kind);

}  // namespace isograd::serve
