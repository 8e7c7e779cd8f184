// Names that other trainers have for our keys and values. They lead to ours.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace isograd {

using OtherNames = std::vector<std::pair<std::string_view, std::string_view>>;  // theirs, ours

// Names of keys and of sections in torchtitan (torchtitan/config/job_config.py, September 2025), transformers
// (TrainingArguments and configurations of models, 5.24), Lightning (Trainer and ModelCheckpoint, 2.6) and
// PyTorch. None is a name of ours.
const OtherNames& other_keys();
const OtherNames& other_sections();
// Values of keys: "gpu" is "cuda" here.
const OtherNames& other_values();

// Our name of theirs, whatever stands before the last dot: "schedule.peak" of "optimizer.lr" and of "lr".
std::optional<std::string> our_key(std::string_view theirs);
std::optional<std::string> our_section(std::string_view theirs);
std::optional<std::string> our_value(std::string_view theirs);

}  // namespace isograd
