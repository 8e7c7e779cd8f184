// The one precompiled header: what most torch-using files need, and no more (never torch/torch.h).
#pragma once
#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <ranges>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

// Clang instantiates in the compiled header what is used in it (-fpch-instantiate-templates); every file that
// uses the same afterwards has it. Nothing calls these.
#ifdef __clang__
namespace isograd::instantiated {
template <class Json>
void json(Json& value, const std::string& text) {
  value = Json::parse(text);
  value["key"] = value.at("key").template get<std::string>();
  value["key"] = value["key"].template get<std::int64_t>();
  value["key"] = value["key"].template get<double>();
  value["key"] = value["key"].template get<bool>();
  value["key"] = text.c_str();
  value["key"] =
      Json{{"a", 1}, {"b", text}, {"c", 1.0}, {"d", true}, {"e", std::uint64_t{1}}, {"f", std::int64_t{1}}};
  value[text].push_back(Json::array({value, text, 1}));
  value["list"] = std::vector<std::string>{text};
  value["list"] = std::vector<std::int64_t>{1};
  value["list"] = std::vector<double>{1};
  for (const auto& [key, each] : value.items())
    if (value.contains(key) && each.is_object() && value.find(key) != value.end() && each == value)
      value.erase(key);
  for (auto& each : value) each = value.value("key", text);
  for (const auto& each : value) (void)value.dump(1).append(each.dump());
}
inline void all(nlohmann::json& plain, nlohmann::ordered_json& ordered, const std::string& text,
                at::Tensor& tensor) {
  json(plain, text), json(ordered, text);
  std::map<std::string, std::string> strings;
  strings[text] = fmt::format("{} {} {} {:.2f} {}", text, 1, std::int64_t{1}, 1.0, "text");
  std::map<std::string, std::int64_t> numbers;
  numbers[text] = numbers.contains(text) ? 1 : static_cast<std::int64_t>(strings.count(text));
  std::map<std::string, double> figures;
  figures[text] += 1;
  std::set<std::string> names;
  names.insert(text), names.insert(text + text), names.erase(text);
  std::vector<std::string> list{text, text};
  list.push_back(text), list.emplace_back("text"), list.insert(list.end(), names.begin(), names.end());
  std::sort(list.begin(), list.end());
  list = std::vector<std::string>(list);
  std::vector<std::int64_t> ints{1};
  ints.push_back(2), ints.resize(3), ints = std::vector<std::int64_t>(ints);
  std::vector<at::Tensor> tensors{tensor};
  tensors.push_back(tensor), tensors.emplace_back(tensor), tensors = std::vector<at::Tensor>(tensors);
  std::vector<std::pair<std::string, at::Tensor>> named;
  named.emplace_back(text, tensor), named = std::vector<std::pair<std::string, at::Tensor>>(named);
  std::map<std::string, at::Tensor> by_name;
  by_name[text] = tensor;
  std::optional<std::string> maybe = text;
  std::function<void(const std::string&)> call = [](const std::string&) {};
  call(maybe.value_or(text));
}
}  // namespace isograd::instantiated
#endif
