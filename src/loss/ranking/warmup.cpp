#include <ATen/ATen.h>

#include <cmath>

#include "isograd/ranking.hpp"
#include "loss/checks.hpp"
#include "loss/ranking/cores.hpp"

namespace isograd {
namespace {
enum Progress : std::int64_t { kEpoch, kStep, kSwitch };
}

LossWarmup::LossWarmup(Warmup warmup, std::shared_ptr<RankingLoss> main, WarmupOptions options)
    : torch::nn::Module("LossWarmup"), warmup_(std::move(warmup)), main_(std::move(main)), options_(options) {
  const auto check = [](bool holds, const char* key, auto found, const char* expected) {
    check_option(holds, "LossWarmup", key, found, expected);
  };
  const std::int64_t warmup_steps = options.warmup_steps.value_or(0),
                     blend_steps = options.blend_steps.value_or(0);
  check(warmup_ && main_, "losses", 0, "a warm-up loss and a main loss");
  check(options.warmup_epochs >= 0, "warmup_epochs", options.warmup_epochs, "0 or more");
  check(options.blend_epochs >= 0, "blend_epochs", options.blend_epochs, "0 or more");
  check(warmup_steps >= 0, "warmup_steps", warmup_steps, "0 or more");
  check(blend_steps >= 0, "blend_steps", blend_steps, "0 or more");
  check(!options.warmup_steps || options.warmup_epochs == 0, "warmup_steps", warmup_steps,
        "not with warmup_epochs: one of the two");
  check(!options.blend_steps || options.blend_epochs == 0, "blend_steps", blend_steps,
        "not with blend_epochs: one of the two");
  check(!options.blend_steps || options.warmup_steps, "blend_steps", blend_steps, "only with warmup_steps");
  check(!options.warmup_steps || options.blend_epochs == 0, "blend_epochs", options.blend_epochs,
        "not with warmup_steps: use blend_steps");
  check(options.final_main_weight > 0 && options.final_main_weight <= 1, "final_main_weight",
        options.final_main_weight, "above 0, at most 1");
  check(is_temperature(options.temp_start), "temp_start", options.temp_start, kTemperatures);
  check(is_temperature(options.temp_end), "temp_end", options.temp_end, kTemperatures);
  check(options.temp_decay_steps > 0, "temp_decay_steps", options.temp_decay_steps, "1 or more");
  register_module("main", main_);
  progress_ = register_buffer("progress", at::full({3}, -1, at::kLong));
}

std::int64_t LossWarmup::steps_past_warmup() const {
  const auto* progress = progress_.const_data_ptr<std::int64_t>();
  return options_.warmup_steps ? std::max<std::int64_t>(progress[kStep], 0) - *options_.warmup_steps
                               : std::max<std::int64_t>(progress[kEpoch], 0) - options_.warmup_epochs;
}

double LossWarmup::main_weight() const {
  const std::int64_t past = steps_past_warmup();
  const std::int64_t blend = options_.warmup_steps ? options_.blend_steps.value_or(0) : options_.blend_epochs;
  if (past < 0) return 0;
  if (past >= blend) return options_.final_main_weight;
  return static_cast<double>(past + 1) / static_cast<double>(blend + 1) * options_.final_main_weight;
}

void LossWarmup::on_train_epoch_start(std::int64_t epoch) {
  progress_[kEpoch] = epoch;
  if (options_.reset_queue_each_epoch) main_->reset_queue();
}

void LossWarmup::on_train_batch_start(std::int64_t global_step) {
  auto* progress = progress_.data_ptr<std::int64_t>();
  progress[kStep] = global_step;
  if (steps_past_warmup() < 0) return;
  if (progress[kSwitch] < 0) {
    // The temperature decays from the first step of the main phase, wherever the run began.
    progress[kSwitch] = global_step;
    if (options_.warmup_epochs > 0 || options_.warmup_steps.value_or(0) > 0) main_->reset_queue();
  }
  const double along = std::min(1.0, static_cast<double>(global_step - progress[kSwitch]) /
                                         static_cast<double>(options_.temp_decay_steps));
  main_->set_temperature(options_.temp_start * std::pow(options_.temp_end / options_.temp_start, along));
}

at::Tensor LossWarmup::forward(const at::Tensor& scores, const at::Tensor& targets,
                               const RankingExtras& extras) {
  const auto* progress = progress_.const_data_ptr<std::int64_t>();
  const bool by_epoch = !options_.warmup_steps && (options_.warmup_epochs > 0 || options_.blend_epochs > 0);
  if (is_training() && (progress[kStep] < 0 || (by_epoch && progress[kEpoch] < 0)))
    refuse("LossWarmup",
           progress[kStep] < 0 ? "a training forward before on_train_batch_start()"
                               : "a training forward before on_train_epoch_start()",
           "to be told the step, and the epoch where epochs are counted",
           "Call the hooks from the training loop");
  const double weight = main_weight();
  if (weight == 0) return warmup_(scores, targets, extras.sample_weight);
  if (weight >= 1) return main_->forward(scores, targets, extras);
  return (1 - weight) * warmup_(scores, targets, extras.sample_weight) +
         weight * main_->forward(scores, targets, extras);
}

RankingLoss::State LossWarmup::state() const {
  RankingLoss::State state = main_->state();
  state.emplace_back("progress", progress_.clone());
  return state;
}

void LossWarmup::load_state(const RankingLoss::State& state) {
  const auto given =
      std::find_if(state.begin(), state.end(), [](const auto& entry) { return entry.first == "progress"; });
  if (given == state.end() || given->second.sizes() != progress_.sizes())
    refuse("LossWarmup: state 'progress'", given == state.end() ? "nothing" : c10::str(given->second.sizes()),
           "[3]", "Load what state() gave");
  main_->load_state(state);
  progress_.copy_(given->second);
}

}  // namespace isograd
