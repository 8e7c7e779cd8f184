#include "serve/wire/fields.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "serve/wire/tinker.hpp"

namespace isograd::serve {
namespace {

bool is_integer(const Json& value, std::int64_t least, std::int64_t most) {
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{1} << 62) return false;
  return value.is_number_integer() && value.get<std::int64_t>() >= least && value.get<std::int64_t>() <= most;
}

std::string range(std::int64_t least, std::int64_t most) {
  return fmt::format("an integer from {} to {}", least, most);
}
const std::string kText = fmt::format("a text of 1 to {} bytes", kMostText), kObject = "an object";

}  // namespace

RequestJson::RequestJson(const std::string& request, std::string_view text)
    : OwnedJson{[&] {
        auto parsed = parse_json(text);
        if (!parsed.problem.empty())
          isograd::refuse(request, parsed.problem, "a JSON object",
                          "Send the request's fields as one JSON object");
        return std::move(parsed.value);
      }()},
      Fields(OwnedJson::json, request + ": ") {}

const Json* Fields::find(const char* key) const {
  const auto at = object_->find(key);
  return at == object_->end() || at->is_null() ? nullptr : &*at;
}

void Fields::refuse(const char* key, const std::string& expected, const std::string& action) const {
  const Json* value = find(key);
  isograd::refuse(where(key),
                  value == nullptr         ? "nothing"
                  : value->is_structured() ? fmt::format("an {} of {}", value->type_name(), value->size())
                                           : brief(*value),
                  expected, action);
}

std::optional<std::string> Fields::text(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string() || value->get_ref<const std::string&>().empty() ||
      value->get_ref<const std::string&>().size() > kMostText)
    refuse(key, kText);
  return value->get<std::string>();
}

std::string Fields::need_text(const char* key) const { return need(text(key), key, kText); }

std::optional<std::int64_t> Fields::integer(const char* key, std::int64_t least, std::int64_t most) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!is_integer(*value, least, most)) refuse(key, range(least, most));
  return value->get<std::int64_t>();
}

std::int64_t Fields::need_integer(const char* key, std::int64_t least, std::int64_t most) const {
  return need(integer(key, least, most), key, range(least, most));
}

std::optional<std::uint64_t> Fields::seed(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_unsigned()) refuse(key, "an integer from 0 to 18446744073709551615");
  return value->get<std::uint64_t>();
}

bool Fields::flag(const char* key, bool otherwise) const {
  const Json* value = find(key);
  if (value != nullptr && !value->is_boolean()) refuse(key, "true or false");
  return value == nullptr ? otherwise : value->get<bool>();
}

std::optional<Fields> Fields::object(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) refuse(key, kObject);
  return Fields(*value, where(key) + ".");
}

Fields Fields::need_object(const char* key) const { return need(object(key), key, kObject); }

double Fields::number(const char* key, double otherwise, const Numbers& allowed) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_number() || !allowed.holds(value->get<double>())) refuse(key, allowed.expected);
  return value->get<double>();
}

const Json* Fields::list(const char* key) const {
  const Json* value = find(key);
  if (value != nullptr && !value->is_array()) refuse(key, "a list");
  return value;
}

std::vector<std::int64_t> Fields::integers(const char* key, std::int64_t least, std::int64_t most) const {
  std::vector<std::int64_t> result;
  const Json* values = list(key);
  if (values == nullptr) return result;
  result.reserve(values->size());
  for (const Json& value : *values) {
    if (!is_integer(value, least, most))
      isograd::refuse(where(fmt::format("{}[{}]", key, result.size())), brief(value), range(least, most),
                      "Correct that number");
    result.push_back(value.get<std::int64_t>());
  }
  return result;
}

std::map<std::string, std::string> Fields::metadata(const char* key) const {
  std::map<std::string, std::string> result;
  const Json* value = find(key);
  if (value == nullptr) return result;
  if (!value->is_object()) refuse(key, "an object");
  std::size_t bytes = 0;
  for (const auto& [name, item] : value->items()) {
    result[name] = item.is_string() ? item.get<std::string>() : item.dump();
    bytes += name.size() + result[name].size();
  }
  if (bytes > 16 * kMostText) refuse(key, fmt::format("at most {} bytes", 16 * kMostText));
  return result;
}

Array to_dense(WireArray array, std::int64_t filling, const std::string& where, std::int64_t& cells) {
  const auto held = static_cast<std::int64_t>(array.whole ? array.integers.size() : array.numbers.size());
  auto wrong = [&](const std::string& found, const std::string& expected) {
    refuse(where, found, expected, "Correct that array");
  };
  if (array.shape.empty() && !array.sparse) array.shape = {held};
  const std::string shape = fmt::format("shape [{}]", fmt::join(array.shape, ", "));
  if (array.shape.size() > 2 || (array.sparse && array.shape.size() != 2))
    wrong(shape, array.sparse ? "two dimensions of a sparse array" : "one dimension or two");
  std::int64_t product = 1;
  for (const std::int64_t size : array.shape) {
    if (size < 0 || size > kMostCells) wrong(shape, fmt::format("sizes from 0 to {}", kMostCells));
    product *= size;  // of two factors of at most 2^26
  }
  if (!array.sparse && product != held)
    wrong(fmt::format("{} values for {}", held, shape), "as many as the shape has");
  if (product > cells) wrong(shape, fmt::format("at most {} cells in all arrays of a request", kMostCells));
  cells -= product;
  if (!array.sparse) return std::move(array);

  const std::int64_t rows = array.shape[0], width = array.shape[1];
  const auto& starts = array.starts;
  if (static_cast<std::int64_t>(starts.size()) != rows + 1 || starts.front() != 0 || starts.back() != held ||
      static_cast<std::int64_t>(array.columns.size()) != held)
    wrong(fmt::format("{} row indices, {} column indices, {} values for {}", starts.size(),
                      array.columns.size(), held, shape),
          "row indices from 0 to the number of values, one more than rows, and a column for each value");
  Array dense{.shape = array.shape};
  if (array.whole)
    dense.integers.assign(static_cast<std::size_t>(product), filling);
  else
    dense.numbers.assign(static_cast<std::size_t>(product), static_cast<float>(filling));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t begin = starts[row], end = starts[row + 1];
    if (begin > end || end > held)
      wrong(fmt::format("row {} from {} to {}", row, begin, end), "ascending row indices");
    for (std::int64_t i = begin, before = -1; i < end; before = array.columns[i++]) {
      const std::int64_t column = array.columns[i];
      if (column <= before || column >= width)
        wrong(fmt::format("column {} in row {} of {}", column, row, shape),
              "ascending columns within the shape");
      if (array.whole)
        dense.integers[row * width + column] = array.integers[i];
      else
        dense.numbers[row * width + column] = array.numbers[i];
    }
  }
  return dense;
}

WireArray json_array(const Json& value, const std::string& where) {
  WireArray array;
  Json plain = Json::object();
  if (value.is_array()) plain["data"] = value;
  if (!value.is_array() && !value.is_object())
    refuse(where, brief(value), "{data, dtype, shape} or a list of numbers", "Correct that array");
  const Fields fields(value.is_array() ? plain : value, where + ".");
  const Json* data = fields.list("data");
  if (data == nullptr) fields.refuse("data", "a list of numbers");
  const std::string dtype = fields.text("dtype").value_or("");
  if (!dtype.empty() && dtype != "float32" && dtype != "int64")
    fields.refuse("dtype", "\"float32\" or \"int64\"");
  array.whole = dtype.empty() ? std::all_of(data->begin(), data->end(),
                                            [](const Json& x) { return x.is_number_integer(); })
                              : dtype == "int64";
  if (array.whole) {
    array.integers = fields.integers("data", -kMostInt32 - 1, kMostInt32);
  } else {
    array.numbers.reserve(data->size());
    for (const Json& item : *data) {
      if (!item.is_number())
        refuse(fmt::format("{}.data[{}]", where, array.numbers.size()), brief(item), "a number",
               "Correct that number");
      array.numbers.push_back(static_cast<float>(item.get<double>()));
    }
  }
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 2;
  array.shape = fields.integers("shape", -most, most);
  array.sparse = fields.find("sparse_crow_indices") != nullptr;
  array.starts = fields.integers("sparse_crow_indices", 0, most);
  array.columns = fields.integers("sparse_col_indices", 0, most);
  return array;
}

Array as_input(Array array, const std::string& name, const std::string& where) {
  if (name == "target_tokens") {
    if (!array.numbers.empty()) refuse(where, "numbers of float32", "int64", "Send token ids as integers");
    for (std::size_t i = 0; i < array.integers.size(); ++i)
      if (array.integers[i] < 0 || array.integers[i] > kMostInt32)
        refuse(fmt::format("{}[{}]", where, i), fmt::format("{}", array.integers[i]),
               "a token id of at least 0",
               "Correct that token; rows without a target have token 0 and weight 0");
    return array;
  }
  array.numbers.insert(array.numbers.end(), array.integers.begin(), array.integers.end());
  array.integers.clear();
  for (std::size_t i = 0; i < array.numbers.size(); ++i)
    if (!std::isfinite(array.numbers[i]))
      refuse(fmt::format("{}[{}]", where, i), fmt::format("{}", array.numbers[i]), "a finite number",
             "Correct that number");
  return array;
}

void refuse_chunk(const std::string& where, const std::string& kind) {
  refuse(where, fmt::format("a chunk of type {}", brief(kind)), "encoded_text",
         "Send tokens alone; this server has no models of images or sounds");
}

std::vector<std::int64_t> json_chunks(const Fields& input) {
  const Json* chunks = input.list("chunks");
  if (chunks == nullptr) input.refuse("chunks", "a list of chunks");
  std::vector<std::int64_t> tokens;
  for (std::size_t i = 0; i < chunks->size(); ++i) {
    const std::string where = input.where(fmt::format("chunks[{}]", i));
    if (!(*chunks)[i].is_object()) refuse(where, brief((*chunks)[i]), "an object", "Correct that chunk");
    const Fields chunk((*chunks)[i], where + ".");
    const std::string type = chunk.text("type").value_or("encoded_text");
    if (type != "encoded_text") refuse_chunk(where, type);
    if (chunk.list("tokens") == nullptr) chunk.refuse("tokens", "a list of token ids");
    const auto more = chunk.integers("tokens", 0, kMostInt32);
    tokens.insert(tokens.end(), more.begin(), more.end());
  }
  if (tokens.empty()) input.refuse("chunks", "at least one token");
  return tokens;
}

AdamParams json_adam(const Fields& params) {
  constexpr Numbers share{[](double x) { return x >= 0 && x < 1; }, "a number of at least 0 and less than 1"};
  AdamParams adam;
  adam.learning_rate = params.number("learning_rate", adam.learning_rate, kAtLeast0);
  adam.beta1 = params.number("beta1", adam.beta1, share);
  adam.beta2 = params.number("beta2", adam.beta2, share);
  adam.epsilon = params.number("eps", adam.epsilon, kAtLeast0);
  adam.weight_decay = params.number("weight_decay", adam.weight_decay, kAtLeast0);
  adam.clip = params.number("grad_clip_norm", adam.clip, kClip);
  return adam;
}

CreateModel json_model(const Fields& fields) {
  CreateModel model{.base = fields.need_text("base_model"), .metadata = fields.metadata("user_metadata")};
  if (const auto lora = fields.object("lora_config"))
    model.lora.seed = lora->seed("seed");
  else
    model.lora.rank = 0;
  return model;
}

void to_json(Json& to, const LoraShape& shape) {
  to = {{"rank", shape.rank}, {"unembed", shape.unembed}, {"mlp", shape.mlp}, {"attention", shape.attention}};
  if (shape.seed) to["seed"] = *shape.seed;
}
void from_json(const Json& from, LoraShape& shape) {
  from.at("rank").get_to(shape.rank), from.at("unembed").get_to(shape.unembed);
  from.at("mlp").get_to(shape.mlp), from.at("attention").get_to(shape.attention);
  if (from.contains("seed")) shape.seed = from.at("seed").get<std::uint64_t>();
}

std::string iso_time(double seconds) {
  const auto whole = static_cast<std::time_t>(seconds);
  std::tm parts{};
  gmtime_r(&whole, &parts);
  char buffer[64];
  return {buffer, std::strftime(buffer, sizeof buffer, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

Json finite(const Metrics& metrics) {
  Json found = Json::object();
  for (const auto& [name, value] : metrics)
    if (std::isfinite(value)) found[name] = value;
  return found;
}

}  // namespace isograd::serve
